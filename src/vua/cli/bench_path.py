"""What a directory can do, and from which prompt length on it pays to load from there."""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np

from vua.capacity.scan import Show
from vua.cli.bench_files import (
    Buffer,
    RawFile,
    cool,
    describe_machine,
    direct_works,
    in_buffer,
    is_cold,
)
from vua.errors import InputError
from vua.format.layout import KVLayout

__all__ = ["LENGTHS", "MODELS", "Demand", "layout_of", "probe", "token_nbytes", "worth"]

MODELS: Final = {
    # layers, KV heads, K dim, V dim: from the models' published configs
    "Llama-3.2-1B": (16, 8, 64, 64),
    "Llama-3.1-8B": (32, 8, 128, 128),
    "Llama-3.1-70B": (80, 8, 128, 128),
    "Qwen3-8B": (36, 8, 128, 128),
    "Qwen3-32B": (64, 8, 128, 128),
    "Qwen3-30B-A3B": (48, 4, 128, 128),
    "DeepSeek-V3": (61, 1, 576, 0),
}
"""KV geometries in bfloat16. DeepSeek's is one latent for K and V (MLA)."""

_SIZES: Final = (256 << 10, 2 << 20, 8 << 20)
_THREADS: Final = (1, 2, 4)
_TOTAL_NBYTES: Final = 128 << 20
_NAMES: Final = 256
LENGTHS: Final = (256, 1024, 4096, 16384, 65536, 131072)
"""Tokens of the prompts that a report speaks of."""


def layout_of(model: str, chunk_tokens: int = 64) -> KVLayout:
    """Return the layout of a model that is listed here."""
    layers, heads, k, v = MODELS[model]
    return KVLayout(layers, heads, k, v, "BF16", chunk_tokens)


def token_nbytes(layout: KVLayout) -> int:
    """Return the bytes of K and V of one token."""
    return layout.full.payload_nbytes(layout) // layout.chunk_tokens


@dataclass(frozen=True, slots=True)
class Demand:
    """What a prompt's KV cache weighs and what computing it costs."""

    name: str
    token_nbytes: int
    """Bytes of K and V per token that one process loads."""
    prefill_tokens_s: float
    """Prefill speed, tokens per second."""

    @classmethod
    def of(cls, model: str, prefill_tokens_s: float, ranks: int = 1) -> Demand:
        """Return the demand of a model by name, or by its bytes per token."""
        if prefill_tokens_s <= 0 or ranks < 1:
            raise InputError(f"prefill {prefill_tokens_s} tokens/s, {ranks} ranks: expected more")
        if model.isdigit():
            return cls(f"{model} bytes/token", int(model), prefill_tokens_s)
        if model not in MODELS:
            raise InputError(
                f"model {model!r} is not known here; give its bytes of K and V per token, or one "
                f"of {', '.join(MODELS)}"
            )
        layout = layout_of(model)
        share = 1 if layout.kv_heads == 1 else ranks  # an MLA rank holds the whole latent
        return cls(model, token_nbytes(layout) // share, prefill_tokens_s)


@dataclass(frozen=True, slots=True)
class Speed:
    """One way to move files of one size."""

    what: str
    nbytes: int
    threads: int
    gb_s: float
    """Median of the rounds, 1e9 bytes per second."""
    low: float
    high: float


def probe(
    directory: Path | str, demand: Demand | None, show: Show, *, tiny: bool = False
) -> dict[str, object]:
    """Measure a directory and return plain values for JSON. Leaves nothing behind.

    Raises OSError: the directory cannot be written.
    """
    home = Path(tempfile.mkdtemp(prefix=".vua-bench-", dir=directory))
    try:
        why_not = direct_works(home)
        sizes = _SIZES[:1] if tiny else _SIZES
        steps = 2 + len(sizes)
        show("writes", 0, steps)
        costs = _write_cost(home, 4 if tiny else 64, direct=why_not is None)
        show("metadata", 1, steps)
        rates = _metadata(home, 32 if tiny else _NAMES)
        speeds: list[Speed] = []
        unmeasured = [] if why_not is None else [{"what": "O_DIRECT", "reason": why_not}]
        for number, size in enumerate(sizes, 2):
            show(f"files of {size >> 10} KiB", number, steps)
            found, missing = _bandwidth(home, size, tiny=tiny, direct=why_not is None)
            speeds += found
            unmeasured += missing
        gds = gpu_direct()
        return {
            "version": 1,
            "directory": str(directory),
            "machine": describe_machine(home),
            "o_direct": why_not is None,
            "gpu_direct": gds,
            "write_cpu_ms_per_mib": costs,
            "metadata_us": rates,
            "bandwidth": [asdict(speed) for speed in speeds],
            "unmeasured": unmeasured,
            "worth_loading": None if demand is None else worth(demand, speeds, rates),
        }
    finally:
        shutil.rmtree(home, ignore_errors=True)


def gpu_direct() -> str:
    """Say whether files can go straight to a GPU here, or why not."""
    if not Path("/dev/nvidia0").exists():
        return "no: no NVIDIA GPU"
    if not Path("/proc/driver/nvidia-fs").exists():
        return "compatibility mode at best: the kernel module nvidia-fs is not loaded"
    if find_spec("cuda") is None and find_spec("kvikio") is None:
        return "no: neither cuda.bindings nor kvikio is installed"
    return "perhaps: nvidia-fs is loaded and a library is installed"


def _write_cost(home: Path, count: int, *, direct: bool) -> dict[str, float]:
    """CPU milliseconds per MiB written, medians: what a write costs the engine on the same cores.

    New files first, all kept, so that the system has to find memory for them, as VUA writes them
    and by one call each; then one of them again, into memory that it has; and past the page cache.
    """
    nbytes = 4 << 20
    buffer = Buffer(nbytes)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC

    def cost(name: str, flag: int = 0, call_nbytes: int = nbytes) -> float:
        fd = os.open(home / name, flags | flag, 0o600)
        try:
            start, done = time.thread_time(), 0
            while done < nbytes:
                done += os.pwrite(fd, buffer.bytes[done : done + call_nbytes].data, done)
            took = time.thread_time() - start
        finally:
            os.close(fd)
        return took * 1e3 / (nbytes / 2**20)

    names = [f"cost-{n}" for n in range(count)]
    costs = {"new files": [cost(name, call_nbytes=1 << 20) for name in names]}
    costs["new files, one call each"] = [cost(f"{name}-whole") for name in names]
    costs["written again"] = [cost(names[0]) for _ in names]
    if direct:
        costs["past the page cache"] = [cost(f"{name}-direct", os.O_DIRECT) for name in names]
    for path in home.iterdir():
        path.unlink()
    return {what: statistics.median(found) for what, found in costs.items()}


def _metadata(home: Path, count: int) -> dict[str, float]:
    """Microseconds per operation, medians: what a lookup and a save need beside bytes."""
    names = [str(home / f"{n:04}") for n in range(count)]
    acts: dict[str, Callable[[str], object]] = {
        "mkdir": os.mkdir,
        "create": lambda name: os.close(os.open(f"{name}/t", os.O_WRONLY | os.O_CREAT, 0o600)),
        "rename": lambda name: os.rename(f"{name}/t", f"{name}/f"),
        "lookup, found": lambda name: os.stat(f"{name}/f"),
        "lookup, not found": lambda name: os.path.exists(f"{name}/none"),
        "open and close": lambda name: os.close(os.open(f"{name}/f", os.O_RDONLY)),
        "list": os.listdir,
        "unlink": lambda name: os.unlink(f"{name}/f"),
        "rmdir": os.rmdir,
    }
    rates = {}
    for what, act in acts.items():
        took = []
        for name in names:
            start = time.perf_counter()
            act(name)
            took.append((time.perf_counter() - start) * 1e6)
        rates[what] = statistics.median(took)
        if what.startswith("lookup"):
            rates[f"{what}, p99"] = float(np.percentile(took, 99))
    return rates


def _bandwidth(
    home: Path, size: int, *, tiny: bool, direct: bool
) -> tuple[list[Speed], list[dict[str, str]]]:
    """Write and read files of one size by raw calls: warm, cold, and past the page cache."""
    count = 4 if tiny else max(8, min(64, _TOTAL_NBYTES // size))
    paths = [str(home / f"{size}-{n}") for n in range(count)]
    files = in_buffer(paths, Buffer(count * size), size)
    flag = getattr(os, "O_DIRECT", 0)
    ways: list[tuple[str, Callable[[RawFile], object], bool]] = [
        ("write", lambda file: file.write(), False),
        ("read, warm", lambda file: file.read(), False),
        ("read, cold", lambda file: file.read(), True),
    ]
    if direct:
        ways += [
            ("write, O_DIRECT", lambda file: file.write(flag), False),
            ("read, cold, O_DIRECT", lambda file: file.read(flag), True),
        ]
    for file in files:
        file.write()
    cool(paths, sync=True)
    unmeasured = []
    if not is_cold(paths[0]):
        reason = "this file system keeps files in memory, or cannot be asked"
        unmeasured.append({"what": f"cold reads of {size >> 10} KiB", "reason": reason})
        ways = [way for way in ways if not way[2]]
    found = []
    for (what, way, cold), threads in itertools.product(ways, (1, 2) if tiny else _THREADS):
        rates = [_round(files, way, threads, cold=cold) for _ in range(2 if tiny else 3)]
        low, middle, high = np.percentile(rates, (25, 50, 75)).tolist()
        found.append(Speed(what, size, threads, middle, low, high))
    for path in paths:
        os.unlink(path)
    return found, unmeasured


def _round(
    files: Sequence[RawFile], way: Callable[[RawFile], object], threads: int, *, cold: bool
) -> float:
    if cold:
        cool([file.path for file in files], sync=True)
    parts = [files[n::threads] for n in range(threads)]

    def work(part: Sequence[RawFile]) -> None:
        for file in part:
            way(file)

    start = time.perf_counter()
    if threads == 1:
        work(parts[0])
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, parts))
    return sum(file.nbytes for file in files) / (time.perf_counter() - start) / 1e9


def worth(demand: Demand, speeds: Sequence[Speed], rates: dict[str, float]) -> dict[str, object]:
    """Where loading beats computing: ``n / prefill > fixed + n * bytes / bandwidth``."""
    needed = demand.token_nbytes * demand.prefill_tokens_s / 1e9
    cases = list(_states(demand, speeds, rates, needed))
    return {"model": asdict(demand), "break_even_gb_s": needed, "cases": cases}


def _states(
    demand: Demand, speeds: Sequence[Speed], rates: dict[str, float], needed: float
) -> Iterator[dict[str, object]]:
    for what in ("read, warm", "read, cold", "read, cold, O_DIRECT"):
        found = [speed for speed in speeds if speed.what == what]
        if not found:
            continue
        best = max(found, key=lambda speed: speed.gb_s)
        probes = 2 * np.log2(LENGTHS[-1] / 64)
        fixed = (probes * rates["lookup, found, p99"] + rates["open and close"]) / 1e6
        gain = 1 / demand.prefill_tokens_s - demand.token_nbytes / (best.gb_s * 1e9)
        seconds = {
            str(length): {
                "compute_s": length / demand.prefill_tokens_s,
                "load_s": fixed + length * demand.token_nbytes / (best.gb_s * 1e9),
            }
            for length in LENGTHS
        }
        yield {
            "files": what,
            "gb_s": best.gb_s,
            "threads": best.threads,
            "speed_up_bound": best.gb_s / needed,
            "worth_from_tokens": None if gain <= 0 else int(np.ceil(fixed / gain)),
            "by_length": seconds,
        }
