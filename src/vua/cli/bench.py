"""`vua bench`: what a directory can do, what a trace finds in a store, and plots of both."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from vua.capacity.limits import nbytes_of
from vua.capacity.scan import Show
from vua.cli.arguments import VARIABLE
from vua.cli.text import SOUND, Write, progress, table
from vua.errors import InputError
from vua.storage.urls import is_url

__all__ = ["add_arguments", "bench"]

_HINT: Final = "--model and --prefill tell which prompt lengths are worth loading"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's words."""
    parser.add_argument(
        "what", nargs="?", choices=("path", "replay", "report"), default="path",
        help="what one directory can do (default); a request trace through a store; plots",
    )  # fmt: skip
    parser.add_argument(
        "targets",
        nargs="*",
        type=_place,
        metavar="TARGET",
        help="DIR or URL, TRACE, or for plots JSON files",
    )
    parser.add_argument(
        "--path", type=_place, metavar="DIR", help="the same as: path DIR; or a URL"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the report there as JSON, plots as a page"
    )
    parser.add_argument("--tiny", action="store_true", help="path: seconds; shows that it works")
    parser.add_argument("--model", help="path: a model's name, or bytes of K and V per token")
    parser.add_argument("--prefill", type=float, metavar="TOKENS/S", help="path: its prefill speed")
    parser.add_argument("--ranks", type=int, default=1, help="path: its tensor parallel size")
    parser.add_argument("--dir", type=Path, help="replay: where to keep the store meanwhile")
    parser.add_argument("--requests", type=int, help="replay: only the first of them")
    parser.add_argument("--max-bytes", metavar="SIZE", help="replay: with a bounded store")
    parser.add_argument(
        "--simulated", action="store_true", help="replay: only the table of policies, no store"
    )
    parser.add_argument(
        "--policies", default="S3-FIFO,hit density", metavar="NAMES",
        help="replay: in that table beside LRU and Belady's; or all (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--sizes", metavar="1%,3%,20000",
        help="replay: its sizes, in blocks or of the trace's distinct blocks "
        "(default: --max-bytes, or 1%%,3%%,10%%,30%%)",
    )  # fmt: skip


def _place(word: str) -> Path | str:
    """Return a URL as it is, and anything else as a path."""
    return word if is_url(word) else Path(word)


def bench(options: argparse.Namespace, *, write: Write | None) -> int:
    """Run what ``options`` (of :func:`add_arguments`) ask for; return the exit code.

    Raises:
        VUAError: the words make no sense, or something measured did not do its work.
        OSError: a file or directory cannot be used.
    """
    if options.path is not None:
        options.what, options.targets = "path", [options.path]
    if options.what == "path" and not options.targets and VARIABLE in os.environ:
        options.targets = [_place(os.environ[VARIABLE])]
    if options.what == "report":
        return _plots(options, write=write)
    if len(options.targets) != 1:
        raise InputError(f"bench {options.what} needs one more word: DIR or TRACE")
    (options.target,) = options.targets
    run, show_report = {"path": (_path, _print_path), "replay": (_replay, _print_replay)}[
        options.what
    ]
    with progress() as show:
        report = run(options, show)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.what == "path" and is_url(options.target):
        show_report = _print_bucket
    (write or show_report)(report)
    return SOUND


def _plots(options: argparse.Namespace, *, write: Write | None) -> int:
    from vua.cli.bench_report import page, plots_of, read

    if not options.targets or options.out is None:
        raise InputError(
            "bench report needs JSON files of measurements, and --out PAGE.html for the plots"
        )
    plots = [
        (plot, path.name) for path in options.targets for plot in plots_of(read(path), str(path))
    ]
    options.out.write_text(page(plots), encoding="utf-8")
    if write is not None:
        write({"version": 1, "file": str(options.out), "plots": [plot.title for plot, _ in plots]})
    else:
        print(f"{options.out}: {len(plots)} plots")
    return SOUND


def _path(options: argparse.Namespace, show: Show) -> dict[str, Any]:
    from vua.cli.bench_bucket import probe_bucket
    from vua.cli.bench_path import Demand, probe

    if (options.model is None) != (options.prefill is None):
        raise InputError("--model and --prefill belong together: what to load, and what to beat")
    demand = None
    if options.model is not None:
        demand = Demand.of(options.model, options.prefill, options.ranks)
    if is_url(options.target):
        return probe_bucket(options.target, demand, show, tiny=options.tiny)
    return probe(options.target, demand, show, tiny=options.tiny)


def _replay(options: argparse.Namespace, show: Show) -> dict[str, Any]:
    from vua.cli.bench_replay import block_file_nbytes, read, replay
    from vua.cli.bench_simulate import POLICIES, compare

    requests = read(options.target, options.requests)
    report: dict[str, Any] = {"version": 1, "trace": options.target.name}
    if not options.simulated:
        with tempfile.TemporaryDirectory(prefix="vua-bench-", dir=options.dir) as name:
            report |= replay(Path(name), requests, show, max_bytes=options.max_bytes).describe()
    distinct = len({block for request in requests for block in request.whole})
    if options.sizes is None and options.max_bytes is not None:
        room = nbytes_of(options.max_bytes, shutil.disk_usage(options.dir or "/").total)
        sizes = [room // block_file_nbytes()]
    else:
        words = (options.sizes or "1%,3%,10%,30%").split(",")
        sizes = [_blocks(word, distinct) for word in words]
    names = list(POLICIES) if options.policies == "all" else options.policies.split(",")
    show(f"simulating {len(names)} policies at {len(sizes)} sizes")
    return report | {"bounded": [one._asdict() for one in compare(requests, names, sizes)]}


def _blocks(size: str, distinct: int) -> int:
    """Return a size in blocks. Raises InputError."""
    try:
        blocks = float(size[:-1]) / 100 * distinct if size.endswith("%") else float(size)
    except ValueError:
        blocks = math.nan
    if not 0 < blocks < math.inf:
        raise InputError(f"--sizes: {size!r} is neither a number of blocks nor like 3%")
    return max(1, round(blocks))


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


def _print_replay(report: dict[str, Any]) -> None:
    if "requests" in report:
        _print_store(report)
    sizes = sorted({one["blocks"] for one in report["bounded"]})
    found = {(one["policy"], one["blocks"]): one for one in report["bounded"]}
    rows = [
        [name, *(_cell(found[name, size]) for size in sizes)]
        for name in dict.fromkeys(one["policy"] for one in report["bounded"])
    ]
    table(["hits, of LRU to Belady, written per hit", *(f" {size:,}" for size in sizes)], rows)


def _cell(one: dict[str, Any]) -> str:
    return f"{one['hit_ratio']:.4f} {one['covered']:+.2f} {one['written_per_hit']:.2f}"


def _print_store(report: dict[str, Any]) -> None:
    print(
        f"{report['requests']:,} requests, {report['tokens']:,} tokens, {report['seconds']:.0f} s"
    )
    for name in ("token_hit_ratio", "hit_ratio", "ideal_ratio"):
        print(f"{name.replace('_', ' ')}: {report[name]:.4f}")
    p50, p90, p99 = report["lookup_ms"]
    print(f"lookup, ms: p50 {p50:.3f}, p90 {p90:.3f}, p99 {p99:.3f}")
    print(f"bytes written {report['written_nbytes']:,}, loaded {report['loaded_nbytes']:,}")
    print(f"blocks evicted between lookup and load {report['vanished_blocks']:,}, ", end="")
    print(f"not stored for want of room {report['refused_blocks']:,}\n")
