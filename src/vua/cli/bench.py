"""`vua bench`: what a directory or a bucket can do."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from vua.cli.bench_bucket import probe_bucket
from vua.cli.bench_path import Demand, probe
from vua.cli.command import VARIABLE, argument, command
from vua.cli.output import Report, progress, table
from vua.errors import InputError
from vua.storage.urls import is_url

__all__ = ["Measured", "bench"]

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
_HINT: Final = "--model and --prefill tell which prompt lengths are worth loading"


@dataclass(frozen=True, slots=True)
class Measured(Report):
    """What a place can do."""

    report: dict[str, Any]
    """Of a directory or of a bucket; the other's fields are null."""

    def describe(self) -> object:
        """Return plain values for programs."""
        report = {**dict.fromkeys((*_OF_DIRECTORIES, *_OF_BUCKETS)), **self.report}
        if report["worth_loading"] is not None:
            report["worth_loading"] = {**dict.fromkeys(_OF_WORTH), **report["worth_loading"]}
        return report

    def show(self) -> None:
        """Print its tables."""
        (_print_path if "machine" in self.report else _print_bucket)(self.report)


@command("bench", "measure a directory or a bucket", takes_directory=False)
@argument("words", "directory, or URL; path may be left out", metavar="[path] DIR", nargs=-1)
@click.option("--path", metavar="DIR", help="the same as: path DIR")
@click.option("--out", metavar="FILE", help="write the report there as JSON")
@click.option("--tiny", is_flag=True, help="seconds; shows that it works")
@click.option("--model", help="a model's name, or bytes of K and V per token")
@click.option("--prefill", type=float, metavar="TOKENS/S", help="the model's prefill speed")
@click.option("--ranks", type=int, default=1, help="tensor parallel size")
def bench(
    words: Sequence[str], *, path: str | None = None, out: str | None = None, tiny: bool = False,
    model: str | None = None, prefill: float | None = None, ranks: int = 1,
) -> Measured:  # fmt: skip
    """Measure a place: files in a directory, or whole loads from a bucket.

    Raises:
        VUAError: the words make no sense, or something measured did not do its work.
        OSError: a file or directory cannot be used.
    """
    targets = [path] if path is not None else list(words[words[:1] == ("path",) :])
    if not targets and VARIABLE in os.environ:
        targets = [os.environ[VARIABLE]]
    if len(targets) != 1:
        raise InputError("bench needs a directory or a URL: vua bench path DIR")
    demand = None
    if model is not None and prefill is not None:
        demand = Demand.of(model, prefill, ranks)
    elif model is not None or prefill is not None:
        raise InputError("--model and --prefill belong together: what to load, and what to beat")
    measure = probe_bucket if is_url(targets[0]) else probe
    with progress() as show:
        report = Measured(measure(targets[0], demand, show, tiny=tiny))
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
