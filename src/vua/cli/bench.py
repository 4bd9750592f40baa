"""`vua bench`: what a directory or a bucket can do."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vua.capacity.scan import Show
from vua.cli.output import Report, progress, table
from vua.cli.values import VARIABLE
from vua.errors import InputError
from vua.storage.urls import is_url

__all__ = ["add_arguments", "bench"]

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's words."""
    parser.add_argument(
        "what", nargs="?", choices=("path",), default="path", help="may be left out"
    )
    parser.add_argument("targets", nargs="*", type=_place, metavar="DIR", help="directory, or URL")
    parser.add_argument("--path", type=_place, metavar="DIR", help="the same as: path DIR")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report there as JSON")
    parser.add_argument("--tiny", action="store_true", help="seconds; shows that it works")
    parser.add_argument("--model", help="a model's name, or bytes of K and V per token")
    parser.add_argument(
        "--prefill", type=float, metavar="TOKENS/S", help="the model's prefill speed"
    )
    parser.add_argument("--ranks", type=int, default=1, help="tensor parallel size")


def _place(word: str) -> Path | str:
    """Return a URL as it is, and anything else as a path."""
    return word if is_url(word) else Path(word)


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


def bench(options: argparse.Namespace) -> Measured:
    """Run what ``options`` (of :func:`add_arguments`) ask for.

    Raises:
        VUAError: the words make no sense, or something measured did not do its work.
        OSError: a file or directory cannot be used.
    """
    targets = [options.path] if options.path is not None else options.targets
    if not targets and VARIABLE in os.environ:
        targets = [_place(os.environ[VARIABLE])]
    if len(targets) != 1:
        raise InputError("bench needs a directory or a URL: vua bench path DIR")
    (target,) = targets
    with progress() as show:
        report = Measured(_path(target, options, show))
    if options.out:
        options.out.write_text(json.dumps(report.describe(), indent=1) + "\n", encoding="utf-8")
    return report


def _path(target: Path | str, options: argparse.Namespace, show: Show) -> dict[str, Any]:
    from vua.cli.bench_bucket import probe_bucket
    from vua.cli.bench_path import Demand, probe

    if (options.model is None) != (options.prefill is None):
        raise InputError("--model and --prefill belong together: what to load, and what to beat")
    demand = None
    if options.model is not None:
        demand = Demand.of(options.model, options.prefill, options.ranks)
    if is_url(target):
        return probe_bucket(str(target), demand, show, tiny=options.tiny)
    return probe(Path(target), demand, show, tiny=options.tiny)


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
