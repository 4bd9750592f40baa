"""How fast a directory or a bucket is, and from which prompt length loading pays.

    python benchmarks/speed.py DIR|URL [--model NAME --prefill TOKENS/S] [--json FILE]

A load from a bucket takes as many round trips as its objects and a lookup need, many of them
concurrent. So whole loads of several lengths are measured there, with the requests that VUA sends.
Files are measured by raw reads and writes: O_DIRECT, cold files, and the lower bound of every
store.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import os
import platform
import secrets
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from vua import native
from vua.capacity.spaces import Show
from vua.cli.output import progress, table
from vua.errors import InputError, VUAError
from vua.format.layout import KVLayout
from vua.io.files import make_folder
from vua.io.memory import IOV_MAX
from vua.io.posix import page_aligned
from vua.storage.bucket import Bucket
from vua.storage.location import BucketPath, is_url
from vua.storage.object import ObjectStorage

PAGE: Final = 4096
_DIRECT: Final = getattr(os, "O_DIRECT", 0)

_LIBC: Final = ctypes.CDLL(None)
for _call in (_LIBC.preadv, _LIBC.pwritev):
    _call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    _call.restype = ctypes.c_ssize_t


class MeasurementError(VUAError):
    """The measured code did not do its work: its numbers would mean nothing."""


def expect(what: str, *, holds: bool) -> None:
    """Raise MeasurementError unless ``holds``: a time for wrong bytes would mean nothing."""
    if not holds:
        raise MeasurementError(f"{what}: not as expected, so nothing was measured")


class Buffer:
    """Touched, page aligned memory.

    Neither on huge pages nor shared: a virtual disk read into these at half the speed.
    """

    def __init__(self, nbytes: int) -> None:
        self.bytes: npt.NDArray[np.uint8] = page_aligned(nbytes)
        self.bytes[:] = 1


class RawFile:
    """A file's bytes and their memory, with all addresses computed before the clock starts.

    The lower bound of every store: one ``preadv`` (or ``pwritev``) per 1024 iovecs, unverified.
    """

    def __init__(
        self, path: str, rows: npt.NDArray[np.uint64], owner: object, call_nbytes: int | None = None
    ) -> None:
        """Prepare to move the file ``path`` to or from ``rows`` (address, nbytes) of ``owner``.

        With ``call_nbytes`` no call moves much more than that.
        """
        self.path, self.nbytes, self._owner = path, int(rows[:, 1].sum()), owner
        self._rows = np.ascontiguousarray(rows)
        step = IOV_MAX
        if call_nbytes is not None:
            step = min(step, max(1, call_nbytes // int(rows[:, 1].max())))
        self._calls, at = [], 0
        for start in range(0, len(self._rows), step):
            part = self._rows[start : start + step]
            self._calls.append((part.ctypes.data, len(part), at))
            at += int(part[:, 1].sum())

    def read(self, flags: int = 0) -> int:
        """Open, read everything, close; return the bytes."""
        fd = os.open(self.path, os.O_RDONLY | flags)
        done: int = sum(_LIBC.preadv(fd, address, count, at) for address, count, at in self._calls)
        os.close(fd)
        expect(f"{self.path}: read {done} of {self.nbytes} bytes", holds=done == self.nbytes)
        return done

    def write(self, flags: int = 0) -> int:
        """Write everything to a temporary name, close, rename; return the bytes."""
        temporary = f"{self.path}.tmp"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o600)
        done: int = sum(_LIBC.pwritev(fd, address, count, at) for address, count, at in self._calls)
        os.close(fd)
        os.rename(temporary, self.path)
        expect(f"{self.path}: wrote {done} of {self.nbytes} bytes", holds=done == self.nbytes)
        return done


def in_buffer(paths: Sequence[str], buffer: Buffer, nbytes: int) -> list[RawFile]:
    """Return files of ``nbytes`` each, one after the other in a buffer, page aligned."""
    step = -(-nbytes // PAGE) * PAGE
    base = buffer.bytes.ctypes.data
    rows = [np.array([[base + n * step, nbytes]], dtype=np.uint64) for n in range(len(paths))]
    return [RawFile(path, row, buffer) for path, row in zip(paths, rows, strict=True)]


def cool(paths: Sequence[str | Path], *, sync: bool) -> None:
    """Ask the kernel to drop files from memory (some file systems refuse).

    ``sync`` writes them to disk first, without which they stay; a flush per file takes time.
    """
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            if sync:
                os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def is_cold(path: str | Path) -> bool:
    """Whether the page cache holds nothing of a file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        whole, found = ctypes.create_string_buffer(16), ctypes.create_string_buffer(40)
        number = ctypes.c_long(451)  # cachestat, since Linux 6.5; for files that may be written
        if _LIBC.syscall(number, ctypes.c_int(fd), whole, found, ctypes.c_uint(0)) == 0:
            return int.from_bytes(found.raw[:8], sys.byteorder) == 0
        with suppress(BlockingIOError):  # an older system: may make it fetch the file
            os.preadv(fd, [bytearray(PAGE)], 0, os.RWF_NOWAIT)
            return False
        return True
    finally:
        os.close(fd)


def direct_works(directory: Path) -> str | None:
    """Return None if O_DIRECT reads and writes work in a directory, otherwise why not."""
    if not _DIRECT:
        return "this system has no O_DIRECT"
    path = directory / ".vua-bench-direct"
    try:
        (one,) = in_buffer([str(path)], Buffer(PAGE), PAGE)
        one.write(_DIRECT)
        one.read(_DIRECT)
    except OSError as problem:
        return f"O_DIRECT is refused here: {problem.strerror}"
    finally:
        path.unlink(missing_ok=True)
    return None


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
"""Prompt lengths in a report, in tokens."""


def layout_of(model: str, chunk_tokens: int = 64) -> KVLayout:
    """Return the layout of a listed model."""
    layers, heads, k, v = MODELS[model]
    return KVLayout(layers, heads, k, v, "BF16", chunk_tokens)


def token_nbytes(layout: KVLayout) -> int:
    return layout.full.payload_nbytes(layout) // layout.chunk_tokens


@dataclass(frozen=True, slots=True)
class Demand:
    """The size of a prompt's KV cache, and the cost of computing it."""

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
    """Measure a directory and return plain values for JSON. Leaves nothing in it.

    Raises OSError: the directory cannot be written.
    """
    home = Path(directory, f".vua-bench-{secrets.token_hex(4)}")
    make_folder(home)
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
    """CPU milliseconds per MiB written, medians: the cost for an engine on the same cores.

    First new files, all kept, so that the system must find memory for them, as VUA writes them and
    by one call each; then one of them again, into memory that it has; and past the page cache.
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
    """Microseconds per operation, medians: the cost of a lookup and a save beside bytes."""
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
    """Return where loading beats computing: ``n / prefill > fixed + n * bytes / bandwidth``."""
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


# -- a bucket -------------------------------------------------------------------------------------

_CHUNK_TOKENS: Final = 64
_COUNTS: Final = (1, 4, 16, 32, 64, 128)
_USUAL_NBYTES: Final = 2 << 20
"""Size of an object if no model is given."""
_OBJECTS: Final = 16
"""Objects written; longer loads read them several times."""
_PROBES: Final = ObjectStorage.capabilities.probes


@dataclass(frozen=True, slots=True)
class BucketLoad:
    """Duration of loading so many chunks."""

    chunks: int
    seconds: float
    """Median of the rounds."""
    low: float
    high: float
    gb_s: float
    """1e9 bytes per second."""


def probe_bucket(
    url: str, demand: Demand | None, show: Show, *, tiny: bool = False
) -> dict[str, Any]:
    """Measure a prefix in a bucket and return plain values for JSON. Leaves nothing in it.

    Writes 16 objects as large as a chunk of the model. Raises ConfigError; StorageError if the
    bucket does not answer, or is not writable.
    """
    place = BucketPath(Bucket.at(url))
    bucket, rounds = place.bucket, 2 if tiny else 5
    nbytes = _USUAL_NBYTES if demand is None else _CHUNK_TOKENS * demand.token_nbytes
    counts = _COUNTS[:3] if tiny else _COUNTS
    folder = f".bench-{secrets.token_hex(6)}"
    keys = [(place / folder / str(number)).key for number in range(_OBJECTS)]
    try:
        show("writes", 0, 2 + len(counts))
        data = os.urandom(nbytes)
        for key in keys:
            bucket.put(key, data)
        show("lookups", 1, 2 + len(counts))
        heads = [_took(bucket.head, keys[:_PROBES], small=True) for _ in range(3 * rounds)]
        loads = []
        for step, count in enumerate(counts, 2):
            show(f"loads of {count} chunks", step, 2 + len(counts))
            asked = [keys[at % _OBJECTS] for at in range(count)]
            _took(lambda key: _get(bucket, key, nbytes), asked)  # opens the connections
            took = [_took(lambda key: _get(bucket, key, nbytes), asked) for _ in range(rounds)]
            low, middle, high = np.percentile(took, (25, 50, 75)).tolist()
            loads.append(BucketLoad(count, middle, low, high, count * nbytes / middle / 1e9))
    finally:
        with suppress(OSError):
            bucket.delete(keys)
    round_s = statistics.median(heads)
    return {
        "version": 1,
        "directory": url,
        "chunk_nbytes": nbytes,
        "lookup_round_s": round_s,
        "load_times": [asdict(load) for load in loads],
        "worth_loading": None if demand is None else _worth_of_bucket(demand, round_s, loads),
    }


def _get(bucket: Bucket, key: str, nbytes: int) -> None:
    with bucket.in_flight(nbytes):
        bucket.get(key)


def _took(ask: Callable[[str], object], keys: Sequence[str], *, small: bool = False) -> float:
    """Return the seconds of concurrent requests, as many at a time as VUA sends. Raises OSError."""
    problems: list[OSError] = []

    def guarded(key: str) -> None:
        try:
            ask(key)
        except OSError as problem:
            problems.append(problem)

    start = time.perf_counter()
    Bucket.each(guarded, keys, small=small)
    took = time.perf_counter() - start
    if problems:
        raise problems[0]
    return took


def load_seconds(chunks: int, round_s: float, loads: Sequence[BucketLoad]) -> float:
    """Return the duration of a hit of so many chunks: its lookup, and the load.

    Args:
        chunks: from 1 on.
        round_s: seconds of one round of a lookup.
        loads: measurements, by rising length; lengths in between are interpolated linearly, longer
            ones continue with the bandwidth of the longest.
    """
    rounds = max(1, math.ceil(math.log(chunks, _PROBES)))
    last = loads[-1]
    if chunks > last.chunks:
        body_s = last.seconds * chunks / last.chunks
    else:
        counts, seconds = [one.chunks for one in loads], [one.seconds for one in loads]
        body_s = float(np.interp(chunks, counts, seconds))
    return rounds * round_s + body_s


def worth_from_tokens(
    demand: Demand, round_s: float, loads: Sequence[BucketLoad], most: int = LENGTHS[-1]
) -> int | None:
    """Return the number of tokens from which loading is faster than computing, up to ``most``.

    A multiple of a chunk's tokens; None if computing is faster even at ``most``.
    """
    slower = 0
    for chunks in range(most // _CHUNK_TOKENS, 0, -1):
        compute_s = chunks * _CHUNK_TOKENS / demand.prefill_tokens_s
        if load_seconds(chunks, round_s, loads) >= compute_s:
            slower = chunks
            break
    return None if slower == most // _CHUNK_TOKENS else (slower + 1) * _CHUNK_TOKENS


def _worth_of_bucket(demand: Demand, round_s: float, loads: Sequence[BucketLoad]) -> dict[str, Any]:
    return {
        "model": asdict(demand),
        "break_even_gb_s": demand.token_nbytes * demand.prefill_tokens_s / 1e9,
        "worth_from_tokens": worth_from_tokens(demand, round_s, loads),
        "by_length": {
            str(length): {
                "compute_s": length / demand.prefill_tokens_s,
                "load_s": load_seconds(length // _CHUNK_TOKENS, round_s, loads),
            }
            for length in LENGTHS
        },
    }


# -- the machine ----------------------------------------------------------------------------------


def describe_machine(directory: Path) -> dict[str, object]:
    """Return what the numbers depend on: processors, system, versions, file system, load."""
    return {
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "xxhash": xxhash.VERSION,
        "file_system": file_system(directory),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "native_load_loop": native.library() is not None,
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def file_system(directory: Path) -> str:
    """Return the type of a directory's file system by the mount table."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    best, kind = "", "unknown"
    for line in mounts:
        point, found = line.split()[1:3]
        inside = directory.resolve().is_relative_to(point.replace("\\040", " "))
        if inside and len(point) >= len(best):
            best, kind = point, found
    return kind


# -- the program ----------------------------------------------------------------------------------


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
        print("\nWith --model and --prefill: from which prompt length on loading pays")
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
        print("\nWith --model and --prefill: from which prompt length on loading pays")
        return
    model, tokens = worth["model"], worth["worth_from_tokens"]
    print(f"\n{model['name']}, {model['prefill_tokens_s']:g} tokens/s: ", end="")
    print("never worth loading" if tokens is None else f"worth loading from {tokens:,} tokens on")
    rows = [
        [f"{int(length):,}", f"{one['compute_s']:,.2f}", f"{one['load_s']:,.2f}"]
        for length, one in worth["by_length"].items()
    ]
    table(["tokens", " computed, s", " loaded, s"], rows)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("place", metavar="DIR|URL")
    parser.add_argument("--model", help="a model's name, or bytes of K and V per token")
    parser.add_argument("--prefill", type=float, metavar="TOKENS/S", help="its prefill speed")
    parser.add_argument("--ranks", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--tiny", action="store_true", help="take seconds only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    given = parser.parse_args(words)
    if (given.model is None) != (given.prefill is None):
        parser.error("--model and --prefill belong together: what to load, and what to beat")
    demand = Demand.of(given.model, given.prefill, given.ranks) if given.model else None
    with progress() as show:
        measure = probe_bucket if is_url(given.place) else probe
        report: dict[str, Any] = measure(given.place, demand, show, tiny=given.tiny)
    (_print_path if "machine" in report else _print_bucket)(report)
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
