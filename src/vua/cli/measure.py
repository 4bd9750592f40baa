"""`vua bench` and `vua advise`: how fast a cache is, and what twice or half the space would bring.

`bench` measures a directory or a bucket (:mod:`vua.catalog.speed`). `advise` runs a directory's log
of requests through simulated stores (:mod:`vua.capacity.simulation`), which its first quarter only
fills.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from vua.capacity.limits import Limits
from vua.capacity.scan import silent
from vua.capacity.simulation import (
    distinct_chunks,
    sample_share,
    simulated_rooms,
    sound_requests,
)
from vua.catalog.base import size
from vua.catalog.opening import open_catalog
from vua.catalog.speed import Demand, probe, probe_bucket
from vua.cli.command import VARIABLE, argument, command
from vua.cli.output import Report, progress, table, when
from vua.errors import InputError
from vua.storage.location import is_url

_OF_DIRECTORIES: Final = (
    "machine",
    "o_direct",
    "gpu_direct",
    "write_cpu_ms_per_mib",
    "metadata_us",
    "bandwidth",
    "unmeasured",
)
_OF_BUCKETS: Final = ("chunk_nbytes", "lookup_round_s", "load_times")
_OF_WORTH: Final = ("cases", "worth_from_tokens", "by_length")
_HINT: Final = "With --model and --prefill the report says from which prompt length loading pays"


@dataclass(frozen=True, slots=True)
class BenchReport(Report):
    """The measurements of a directory or bucket."""

    report: dict[str, Any]
    """As returned by `probe` or `probe_bucket`."""

    def describe(self) -> object:
        report = {**dict.fromkeys((*_OF_DIRECTORIES, *_OF_BUCKETS)), **self.report}
        if report["worth_loading"] is not None:
            report["worth_loading"] = {**dict.fromkeys(_OF_WORTH), **report["worth_loading"]}
        return report

    def show(self) -> None:
        (_print_path if "machine" in self.report else _print_bucket)(self.report)


@command("bench", "measure a directory or a bucket", takes_directory=False)
@argument(
    "words", "directory or URL; the word path may be left out", metavar="[path] DIR", nargs=-1
)
@click.option("--path", metavar="DIR", help="the same as: path DIR")
@click.option("--out", metavar="FILE", help="write the report to this file as JSON")
@click.option("--tiny", is_flag=True, help="take seconds only; shows that it works")
@click.option("--model", help="a model's name, or bytes of K and V per token")
@click.option("--prefill", type=float, metavar="TOKENS/S", help="the model's prefill speed")
@click.option("--ranks", type=int, default=1, help="tensor parallel size")
def bench(
    words: Sequence[str], *, path: str | None = None, out: str | None = None, tiny: bool = False,
    model: str | None = None, prefill: float | None = None, ranks: int = 1,
) -> BenchReport:  # fmt: skip
    """Measure files in a directory, or whole loads from a bucket.

    Raises:
        VUAError: the words are not valid, or something measured did not do its work.
        OSError: a file or directory cannot be used.
    """
    targets = [path] if path is not None else list(words[words[:1] == ("path",) :])
    if not targets and VARIABLE in os.environ:
        targets = [os.environ[VARIABLE]]
    if len(targets) != 1:
        raise InputError("bench needs a directory or a URL: vua bench DIR")
    demand = None
    if model is not None and prefill is not None:
        demand = Demand.of(model, prefill, ranks)
    elif model is not None or prefill is not None:
        raise InputError("--model and --prefill belong together: what to load, and what to beat")
    measure = probe_bucket if is_url(targets[0]) else probe
    with progress() as show:
        report = BenchReport(measure(targets[0], demand, show, tiny=tiny))
    if out:
        Path(out).write_text(json.dumps(report.describe(), indent=1) + "\n", encoding="utf-8")
    return report


def _print_path(report: dict[str, Any]) -> None:
    machine = report["machine"]
    print(f"{report['directory']}: {machine['file_system']}, {machine['cpus']} CPUs, ", end="")
    print(f"O_DIRECT {'works' if report['o_direct'] else 'does not work'}, ", end="")
    print(f"GPU-direct storage: {report['gpu_direct']}\n")
    sizes = sorted({one["nbytes"] for one in report["bandwidth"]})
    ways = list(dict.fromkeys((one["what"], one["threads"]) for one in report["bandwidth"]))
    rates = {(s["what"], s["threads"], s["nbytes"]): s["gb_s"] for s in report["bandwidth"]}
    rows = [[*way, *(f"{rates[(*way, size)]:.2f}" for size in sizes)] for way in ways]
    table(["GB/s", " threads", *(f" {size >> 10} KiB" for size in sizes)], rows)
    print()
    costs = report["write_cpu_ms_per_mib"]
    table(["CPU ms per MiB written", " median"], [[k, f"{v:.2f}"] for k, v in costs.items()])
    print()
    table(["us", " median"], [[k, f"{v:.1f}"] for k, v in report["metadata_us"].items()])
    for one in report["unmeasured"]:
        print(f"\nunmeasured: {one['what']}: {one['reason']}")
    worth = report["worth_loading"]
    if worth is None:
        print(f"\n{_HINT}")
        return
    model = worth["model"]
    print(
        f"\n{model['name']}, {model['prefill_tokens_s']:g} tokens/s: worth loading above ", end=""
    )
    print(f"{worth['break_even_gb_s']:.3f} GB/s")
    rows = [
        [case["files"], f"{case['gb_s']:.2f}", f"{case['speed_up_bound']:.1f}",
         "never" if case["worth_from_tokens"] is None else f"{case['worth_from_tokens']:,}"]
        for case in worth["cases"]
    ]  # fmt: skip
    table(["files", " GB/s", " at most x faster", " worth from tokens"], rows)


def _print_bucket(report: dict[str, Any]) -> None:
    round_ms = report["lookup_round_s"] * 1e3
    print(f"{report['directory']}: a round of a lookup takes {round_ms:.1f} ms\n")
    rows = [
        [f"{one['chunks']} x {report['chunk_nbytes'] >> 10} KiB",
         f"{one['seconds'] * 1e3:,.1f}", f"{one['gb_s']:.3f}"]
        for one in report["load_times"]
    ]  # fmt: skip
    table(["loads", " ms", " GB/s"], rows)
    worth = report["worth_loading"]
    if worth is None:
        print(f"\n{_HINT}")
        return
    model, tokens = worth["model"], worth["worth_from_tokens"]
    print(f"\n{model['name']}, {model['prefill_tokens_s']:g} tokens/s: ", end="")
    print("never worth loading" if tokens is None else f"worth loading from {tokens:,} tokens on")
    rows = [
        [f"{int(length):,}", f"{one['compute_s']:,.2f}", f"{one['load_s']:,.2f}"]
        for length, one in worth["by_length"].items()
    ]
    table(["tokens", " computed, s", " loaded, s"], rows)


# -- vua advise -----------------------------------------------------------------------------------

_LEAST_REQUESTS: Final = 200
_SAME: Final = 0.005
"""Share of the hits below which two results count as equal."""


@dataclass(frozen=True, slots=True)
class Advice(Report):
    """What more or less space would bring."""

    report: dict[str, Any]

    def describe(self) -> object:
        return self.report

    def show(self) -> None:
        _print(self.report)


@command(
    "advise",
    "estimate the hits of a larger or smaller cache from past requests",
    as_owner_of=True,
)
@click.option(
    "--max-bytes", metavar="SIZE", help="the engines' limit, if the directory has more room"
)
def advise(directory: str, *, max_bytes: str | None = None) -> Advice:
    """Report what stores of several sizes would have found; ``max_bytes`` as in engines' settings.

    If the log has too few requests, the report says so. Raises ConfigError (a bucket),
    StorageError.
    """
    given = Limits(max_bytes=max_bytes)
    catalog = open_catalog(directory)
    log, use = catalog.use_log(), catalog.quick_use(given) or catalog.use(silent)
    most, least = use.limits["max_bytes"] or 0, use.limits["min_free_bytes"] or 0
    free_nbytes = use.free_nbytes or 0
    room_nbytes = int(max(0, min(most, use.nbytes + free_nbytes - least)))
    chunk_nbytes = use.nbytes / use.chunks if use.chunks else None
    requests = sound_requests(log.read())
    report: dict[str, Any] = {
        "version": 1, "directory": directory,
        "requests": len(requests), "chunks": sum(len(one.whole) for one in requests),
        "distinct_chunks": distinct_chunks(requests),
        "first_s": requests[0].time_s if requests else None,
        "last_s": requests[-1].time_s if requests else None,
        "room_nbytes": room_nbytes, "chunk_nbytes": chunk_nbytes and round(chunk_nbytes),
        "sample_share": 1.0, "rooms": [],
    }  # fmt: skip
    if len(requests) < _LEAST_REQUESTS:
        report["advice"] = [f"Too little to advise from: it takes {_LEAST_REQUESTS} requests."]
    elif not chunk_nbytes:
        report["advice"] = ["Nothing is stored, so it is not known how large a chunk is."]
    elif room_nbytes < chunk_nbytes:
        report["advice"] = ["The space is too small for one chunk: see `vua du`."]
    else:
        report["sample_share"] = part = sample_share(report["chunks"])
        with progress() as show:
            report["rooms"] = simulated_rooms(requests, room_nbytes, chunk_nbytes, part, show)
        report["advice"] = _advice({one["share"]: one["hit_ratio"] for one in report["rooms"]})
    return Advice(report)


def _advice(hits: Mapping[float | None, float]) -> list[str]:
    half, now, twice = (hits.get(share, hits[None]) for share in (0.5, 1.0, 2.0))
    if 2.0 in hits:
        found = [f"Twice the space would find {_than(twice, now)}."]
    else:
        found = ["All that was asked for fits: more space cannot bring more hits here."]
    if 0.5 in hits or 1.0 not in hits:  # else it is less than a chunk
        found.append(f"Half the space would find {_than(half, now)}.")
    return found


def _than(hits: float, now: float) -> str:
    if abs(hits - now) <= _SAME * now:
        return "about as much"
    if not now:
        return f"{100 * hits:.1f} % of what is asked for, the present space nothing"
    return f"{100 * abs(hits - now) / now:.0f} % {'more' if hits > now else 'less'}"


def _print(report: dict[str, Any]) -> None:
    text = f"{report['directory']}: {report['requests']:,} requests for {report['chunks']:,} chunks"
    if report["requests"]:
        text += f" ({report['distinct_chunks']:,} different), "
        text += f"{when(report['first_s'])} to {when(report['last_s'])}"
    print(text)
    if report["rooms"]:
        print(
            f"room for {size(report['room_nbytes'])} in chunks of {size(report['chunk_nbytes'])}; "
            "the first quarter of the requests fills it, hits are counted in the rest"
        )
        if report["sample_share"] < 1:
            part = f"{100 * report['sample_share']:.1f} %"
            print(f"simulated: a sample, {part} of the chunks, in stores of {part} of these sizes")
        rows = []
        for one in report["rooms"]:
            written, hits = one["written_per_hit_nbytes"], (one["hit_ratio"], one["lru_hit_ratio"])
            name = "unbounded" if one["share"] is None else f"{one['share']:g} x"
            ratios = [f"{100 * ratio:.1f} %" for ratio in hits]
            rows.append(
                [name, size(one["nbytes"]), *ratios, "-" if written is None else size(written)]
            )
        table(["room", " size", " hits", " hits by LRU", " written per chunk hit"], rows)
    print(" ".join(report["advice"]))
