"""What grows with the number of chunks: measured, fitted, and predicted to a thousand million.

    python benchmarks/scale.py /mnt/disk/new --sizes 10000,30000,100000,300000,1000000
    python benchmarks/scale.py --bucket seaweedfs --sizes 1000,3000,10000
    python benchmarks/scale.py /mnt/disk/new --engine --sizes 600000

The first two fill a new directory (on any file system), or a bucket, to each size
in turn with sparse files: a valid header, and zeros that take no space. On ext4 a chunk takes 8 KiB
and two inodes. At each size every command runs in a process of its own, by turns, and an engine's
process starts, stores a prompt and loads it. Root's run empties the kernel's memory first. Measured
are processor time, peak memory and requests: those of a bucket, RPCs of a mount of NFS. Lines are
fitted to all sizes but the largest one, which they predict; shown is a prediction from
all, where that one held. Wall time is in the report alone: other work on the machine changes it.

`--engine` measures an engine beside eviction in a full directory: how long a new process takes to
store its first chunk; writers' times with and without eviction, by turns; system calls and looks
for an evicted chunk (with strace); how long a burst of eviction holds the interpreter lock (with a
C compiler).

The directory is removed at the end. `--out` writes the report.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from buckets import seaweedfs, speaking_to
from directory import CODEC, IDENTITY, LAYOUT, PROMPT_CHUNKS, keys_of
from house import ROOT
from lock import held_clock, library
from tools import fill
from vua.capacity import spaces
from vua.capacity.evictor import Evictor
from vua.capacity.limits import Limits
from vua.capacity.lru import LRU, LeastHitDensity
from vua.capacity.upkeep import next_tick_ns, upkeep_directory
from vua.capacity.usage import measure
from vua.device.buffers import StagingBuffer
from vua.storage.base import WRITTEN
from vua.storage.bucket import Bucket
from vua.storage.location import BucketPath, is_url
from vua.store.namespace import Namespace
from vua.store.store import Loader
from vua.store.writer import EntryWriter

NEW = 1 << 28
"""Only the measuring process stores prompts from this number on."""
INTERVAL_S = 1
VUA = [sys.executable, "-m", "vua"]
COMMANDS = {
    "du --exact": ["du", "{}", "--exact"],
    "ls --exact": ["ls", "{}", "--exact"],
    "gc": ["gc", "{}", "--yes"],
    "du": ["du", "{}"],
    "ls": ["ls", "{}"],
    "gc --quick": ["gc", "{}", "--quick", "--yes"],
    "top --once": ["top", "{}", "--once", "--interval", f"{INTERVAL_S}s"],
    "events": ["events", "{}", "--json"],
    "verify --sample 1%": ["verify", "{}", "--sample", "1%"],
}
TOP = "top --once"
SAMPLE: int = measure.__kwdefaults__["counted"]
FOLDERS = 256
PAGE, MOST_PARTS = 1000, 6
"""A bucket's listing of 64 pages or more goes by parts of 16 pages, at most so many at a time."""
KEPT_S = 30
"""An NFS client keeps a directory's attributes for so long at least: acdirmin in nfs(5)."""
USE = "an engine: store, look up, load"
SAMPLED = (USE, "gc --quick")
WITHIN = 0.25
"""By so much a prediction may be wrong."""
GOAL = 10**9
Line = Callable[[float], float]
"""What a number of chunks costs."""
BURST = 512
LATE_S = 0.0005


# -- children -------------------------------------------------------------------------------------


class Engine:
    """What an engine does with a cache."""

    def __init__(self, place: str, most: int) -> None:
        """Open it; ``most``: its limit in bytes."""
        bounds = Limits(max_bytes=most, min_free_bytes=0)
        at = BucketPath(Bucket.at(place)) if is_url(place) else Path(place)
        space = Namespace.create(at, IDENTITY, [LAYOUT], bounds=bounds)
        self.store = space.stores[0]
        memory = StagingBuffer(LAYOUT, LAYOUT.full, 1).memory
        self.saver, self.loader = EntryWriter(self.store, memory), Loader(self.store, memory)

    def save(self, prompt: int, places: Sequence[int]) -> list[float]:
        """Store chunks of a prompt; return what each took, in s. Those refused are inf."""
        keys, took = keys_of(prompt), []
        for place in places:
            began = time.perf_counter()
            done = self.saver.save([keys[place]]) == [WRITTEN]
            took.append(time.perf_counter() - began if done else float("inf"))
        return took


def work_use(place: str, most: int) -> dict[str, Any]:
    """Store a prompt, look it up, load it."""
    engine, prompt = Engine(place, most), NEW + random.randrange(NEW)
    stored = engine.save(prompt, range(PROMPT_CHUNKS))
    keys = keys_of(prompt)
    found = engine.store.lookup(keys)
    loaded = sum(engine.loader.load([keys[at]]).chunks for at in range(found))
    engine.store.close()
    return {"stored": sum(one < float("inf") for one in stored), "loaded": loaded}


def work_start(place: str, most: int, began_s: float) -> dict[str, Any]:
    """Return after how many seconds the first chunk is stored, and refusals before that."""
    ready_s, refused, cpu_s = time.monotonic(), 0, time.process_time()
    engine, prompt = Engine(place, most), NEW + random.randrange(NEW)
    while engine.save(prompt + refused, [0]) == [float("inf")]:
        refused += 1
        time.sleep(0.01)
    stored_s, cpu_s = time.monotonic(), time.process_time() - cpu_s
    engine.store.close()
    return {
        "s": stored_s - ready_s,
        "cpu_s": cpu_s,
        "with_imports_s": stored_s - began_s,
        "refused": refused,
        "evicted": engine.store.capacity.counts["chunks_evicted"] if engine.store.capacity else 0,
    }


def work_writer(place: str, most: int, prompts: int) -> dict[str, Any]:
    """Return what storing a chunk took, in ms."""
    engine, first = Engine(place, most), NEW + random.randrange(NEW)
    took: list[float] = []
    for prompt in range(first, first + prompts):
        engine.store.used(keys_of(prompt), 0)
        took += engine.save(prompt, range(PROMPT_CHUNKS))
    engine.store.close()
    stored = np.array([one for one in took if one < float("inf")]) * 1e3
    p50, p99, most_ms = np.percentile(stored, [50, 99, 100]).tolist()
    counts = engine.store.capacity.counts if engine.store.capacity else Counter[str]()
    return {
        "p50": p50,
        "p99": p99,
        "most": most_ms,
        "refused": len(took) - len(stored),
        "evicted": counts["chunks_evicted"],
    }


def work_calls(place: str) -> dict[str, Any]:
    """Evict a burst, which looks for victims, and when told so two more."""
    evictor, upkeep, looks = Evictor(place, policy=LRU()), upkeep_directory(place), 0
    real = spaces.Space.columns

    def columns(space: spaces.Space, fan: str) -> tuple[Sequence[str], spaces.Column]:
        nonlocal looks
        found = real(space, fan)
        looks += len(found[0])
        return found

    with mock.patch.object(spaces.Space, "columns", columns):
        gone = evictor.evict(BURST * CODEC.file_nbytes, next_tick_ns(upkeep)).chunks
    told = {"looks": looks / (gone + evictor.left)}
    print("ready", flush=True)
    sys.stdin.readline()
    told["gone"] = evictor.evict(2 * BURST * CODEC.file_nbytes, next_tick_ns(upkeep)).chunks
    print("done", flush=True)
    sys.stdin.readline()
    return told


LOCKED = ("held", "longest")


def work_lock(place: str, name: str, bursts: int) -> dict[str, Any]:
    """Evict bursts in a thread; return what they keep from another one, in ms for each burst.

    As in a new process of an engine: a writer waits for the first burst, which takes what a sample
    of the folders shows; then the process searches the others, ahead of need; then it evicts.

    ``held``: processor time of the evicting thread without what it ran while it had given up the
    lock. ``late`` and ``longest``: delays of a thread that sleeps for half a millisecond at a time.
    """
    policy = LRU() if name == "LRU" else LeastHitDensity(place)
    evictor, upkeep = Evictor(place, policy=policy), upkeep_directory(place)
    evictor.shares = True
    held_ns = held_clock()
    evicting, over = threading.Event(), threading.Event()
    late: list[float] = []

    def burst() -> int:
        nbytes = BURST * CODEC.file_nbytes
        return evictor.evict(nbytes, next_tick_ns(upkeep)).chunks

    def search() -> int:
        evictor.search(next_tick_ns(upkeep))
        return 0

    def measured(work: Callable[[], int]) -> dict[str, float]:
        late.clear()
        began_ns, ran_ns = held_ns(), time.thread_time_ns()
        evicting.set()
        gone = work()
        evicting.clear()
        times = {
            "ran": (time.thread_time_ns() - ran_ns) / 1e6,
            "held": (held_ns() - began_ns) / 1e6,
        }
        delays = [*late] or [0.0]
        time.sleep(0.02)
        return {**times, "late": sum(delays), "longest": max(delays), "gone": gone}

    found: dict[str, Any] = {}

    def evict() -> None:
        found["first"] = measured(burst)
        found["search"] = measured(search)
        found["bursts"] = [measured(burst) for _ in range(bursts)]
        over.set()

    thread = threading.Thread(target=evict)
    thread.start()
    while not over.is_set():
        began = time.perf_counter()
        time.sleep(LATE_S)
        delay_s = time.perf_counter() - began - LATE_S
        if evicting.is_set() and delay_s > LATE_S:
            late.append(1e3 * delay_s)
    thread.join()
    return found


WORK: dict[str, Callable[..., dict[str, Any]]] = {
    "use": work_use,
    "start": work_start,
    "writer": work_writer,
    "calls": work_calls,
    "lock": work_lock,
}


def child(place: str, name: str, *words: object) -> list[str]:
    """Return the command of a process that does one of :data:`WORK`, and prints a JSON object."""
    return [sys.executable, __file__, place, "--work", name, *map(json.dumps, words)]


def told_by(command: Sequence[str], **environment: str) -> dict[str, Any]:
    """Run a child; return what it says."""
    env = os.environ | environment
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# -- an engine beside eviction --------------------------------------------------------------------


def engine(root: Path, chunks: int, rounds: int, prompts: int) -> dict[str, Any]:
    """Measure an engine in a directory that is full."""
    nbytes, place = CODEC.file_nbytes, str(root)
    report: dict[str, Any] = {"chunks": chunks}

    def stored() -> int:
        """The bytes of all chunks now."""
        folders = (root / IDENTITY.namespace).glob("??")
        return nbytes * sum(1 for folder in folders for _ in os.scandir(folder))

    report["start"] = []
    for share in (1.0, 0.99):
        one = told_by(child(place, "start", int(share * stored()), time.monotonic()))
        report["start"].append({"limit_share": share, **one})
        print(
            f"a new process, limit {share:.0%} of what is stored: first chunk after {one['s']:.2f} "
            f"s ({one['cpu_s']:.2f} s of CPU), with imports {one['with_imports_s']:.2f} s; "
            f"refused before: {one['refused']}",
            flush=True,
        )
    writers: dict[str, list[dict[str, Any]]] = {"without": [], "beside": []}
    for turn in range(rounds):
        for name in sorted(writers, reverse=bool(turn % 2)):
            most = stored() if name == "beside" else 1 << 60
            writers[name].append(told_by(child(place, "writer", most, prompts)))
    ratios = [
        now["p99"] / before["p99"]
        for before, now in zip(writers["without"], writers["beside"], strict=True)
    ]
    p99 = {name: statistics.median(one["p99"] for one in found) for name, found in writers.items()}
    report["writers"] = writers | {"p99_ratio": statistics.median(ratios)}
    print(
        f"a chunk stored, p99: {p99['without']:.2f} ms without eviction, {p99['beside']:.2f} "
        f"beside it; {report['writers']['p99_ratio']:.2f} times, median of {rounds} turns",
        flush=True,
    )
    report["calls"] = calls(place)
    if report["calls"]:
        print(
            f"an evicted chunk: {report['calls']['own']:.1f} system calls of its own, "
            f"{report['calls']['looks']:.1f} looks",
            flush=True,
        )
    report["lock"] = locks(root, chunks)
    return report


def calls(place: str) -> dict[str, float]:
    """Count the system calls of an eviction whose victims are known; without strace nothing."""
    if shutil.which("strace") is None:
        print("no strace: system calls are not counted")
        return {}
    pipe = subprocess.PIPE
    with tempfile.NamedTemporaryFile() as counts, subprocess.Popen(
        child(place, "calls"), stdin=pipe, stdout=pipe, text=True
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        words = ["strace", "-f", "-qq", "-c", "-o", counts.name, "-p", str(process.pid)]
        with subprocess.Popen(words, stderr=subprocess.DEVNULL) as tracer:
            status = Path(f"/proc/{process.pid}/status")
            while "TracerPid:\t0\n" in status.read_text():
                time.sleep(0.01)
            process.stdin.write("go\n")
            process.stdin.flush()
            process.stdout.readline()
            tracer.send_signal(signal.SIGINT)
        told = json.loads(process.communicate("end\n")[0].splitlines()[-1])
        lines = Path(counts.name).read_text().splitlines()
    rows = [line.split() for line in lines if line[:1].isspace()]
    total = sum(int(row[3]) for row in rows if row[-1] != "total")
    return {"own": total / told["gone"], "looks": told["looks"]}


def locks(root: Path, chunks: int) -> dict[str, Any]:
    """Measure how long bursts hold the interpreter lock, by LRU and by a log of 8 MiB."""
    log = LeastHitDensity(root)
    some = range(0, chunks // PROMPT_CHUNKS, max(1, chunks // PROMPT_CHUNKS // 12_288))
    for prompt in (*some, *some[-4096:], *some[-4096:]):
        keys = keys_of(prompt)
        log.asked([keys[place].name for place in range(PROMPT_CHUNKS)])
    report = {}
    with tempfile.TemporaryDirectory() as folder:
        shim = library(Path(folder))
        if shim is None:
            print("no C compiler: the time of the interpreter lock is not measured")
            return {}
        for name in ("LRU", "hit density"):
            report[name] = told_by(child(str(root), "lock", name, 60), LD_PRELOAD=shim)
            ran, held, longest = (
                [one[what] for one in report[name]["bursts"]] for what in ("ran", "held", "longest")
            )
            print(
                f"a burst of {BURST} chunks, {name}: its thread runs "
                f"{statistics.median(ran):.0f} ms and holds the lock for "
                f"{statistics.median(held):.0f} ms, {max(held):.0f} at most; another thread is "
                f"late by {max(longest):.1f} ms at most. The first one: "
                + ", late by ".join(f"{report[name]['first'][what]:.0f} ms" for what in LOCKED)
                + "; the search for others, folder by folder: "
                + ", late by ".join(f"{report[name]['search'][what]:.0f} ms" for what in LOCKED),
                flush=True,
            )
    return report


# -- commands -------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Of one process."""

    cpu_s: float
    """On a core that runs a certain loop in :data:`LOOP_S`."""
    peak_mb: float
    requests: int
    wall_s: float


MEASURES = ("cpu_s", "peak_mb", "requests")

LOOP_S = 0.0045
"""What the loop below takes on a quiet core of the machine of the published numbers."""
FORKING = """
import json, os, sys, time
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
def loop():
    began_s, total = time.thread_time(), 0
    for number in range(100_000):
        total += number % 7
    return time.thread_time() - began_s
pid = os.fork()
if not pid:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.execv(sys.argv[1], sys.argv[1:])
loops, ended = [], 0
while not ended:
    loops.append(loop())
    time.sleep(0.1)
    ended, status, used = os.wait4(pid, os.WNOHANG)
took, peak_mb = (used.ru_utime + used.ru_stime) * len(loops) / sum(loops), used.ru_maxrss / 1024
print(json.dumps([os.waitstatus_to_exitcode(status), took, peak_mb]))
"""
"""Starts a command on one core and runs a loop there ten times a second: a core's speed changes by
half within seconds where others use its machine. Linux counts the memory of the process that forks
as the command's, too: this one is small."""


def cost_of(command: Sequence[str], requests: Callable[[], int]) -> Cost:
    """Run a command to its end."""
    before, began_s = requests(), time.monotonic()
    small = [sys.executable, "-I", "-S", "-c", FORKING, *command]
    done = subprocess.run(small, capture_output=True, text=True, check=True)
    code, loops, peak_mb = json.loads(done.stdout)
    if code:
        sys.exit(f"{' '.join(command)}: exit {code}\n{done.stderr[-2000:]}")
    return Cost(loops * LOOP_S, peak_mb, requests() - before, time.monotonic() - began_s)


def forget() -> None:
    """Let the kernel, if this is root's, keep no pages and inodes; an NFS client no attributes."""
    with contextlib.suppress(OSError):  # only root may write it, and in some containers nobody
        Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")


def crowd(root: Path, names: int) -> None:
    """Ask for names that are not there: the kernel remembers them before all that it knew."""
    for number in range(names):
        (root / f"none-{number}").exists()


def measured(place: str, kind: str, chunks: int, only: Sequence[str], requests: Callable[[], int],
             rounds: int, enough_s: float) -> dict[str, Cost]:  # fmt: skip
    """Measure all commands on a place of so many chunks, by turns: the median time, else the least.

    A short command runs again until it took so much processor time in all: most of it is its start,
    and what it adds by chunk is less than the noise of one run.
    """
    most, found = 2 * (chunks + 10_000) * CODEC.file_nbytes, {}
    runs: dict[str, list[Cost]] = {name: [] for name in only}
    while todo := [
        name for name in only
        if len(runs[name]) < rounds or sum(run.cpu_s for run in runs[name]) < enough_s
    ]:  # fmt: skip
        for name in todo:
            command = child(place, "use", most)
            if name != USE:
                command = [*VUA, *(word.format(place) for word in COMMANDS[name])]
            if kind.startswith("nfs"):
                forget()  # as on another host
            runs[name].append(cost_of(command, requests))
    for name in only:
        least = Cost(*map(min, zip(*runs[name], strict=True)))
        one = least._replace(cpu_s=statistics.median(run.cpu_s for run in runs[name]))
        found[name] = one
        print(
            f"{chunks:>11,} chunks  {name:32} {one.cpu_s:8.2f} s CPU {one.peak_mb:7.0f} MB "
            f"{one.requests:8,} requests {one.wall_s:8.2f} s",
            flush=True,
        )
    return found


def fitted(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return a line (at 0, per chunk), neither of them negative, of the least relative errors."""
    n, y = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    weight = 1 / np.maximum(y, 1e-9)
    columns = np.stack([np.ones_like(n), n], axis=1) * weight[:, None]
    best, least = (0.0, 0.0), float("inf")
    for used in ((0, 1), (0,), (1,)):
        found = np.zeros(2)
        found[[*used]] = np.linalg.lstsq(columns[:, [*used]], y * weight, rcond=None)[0]
        error = float(np.square(columns @ found - y * weight).sum())
        if (found >= 0).all() and error < least * (1 - 1e-9):
            best, least = (float(found[0]), float(found[1])), error
    return best


def looked_at(name: str, kind: str, chunks: float, measure: str) -> float:
    """Return by how many chunks a command's cost grows.

    A few look at a sample: at so many names of a directory, in whole folders of 256. `gc --quick`
    then lists the rest, which takes time and few requests.
    """
    if name not in SAMPLED or kind.startswith("bucket") or measure == "cpu_s":
        return chunks
    return min(chunks, max(SAMPLE, chunks / FOLDERS))


HELD_NBYTES = {"top --once": 16, "events": 24}
"""Bytes that these hold of each chunk, beside pages: docs/decisions/0060, and measured on ext4."""
NOISE = 1.25
"""Equal work differs by this factor in processor time here. A smaller growth counts as constant."""


def pages_held(chunks: float) -> float:
    """Return how many parts of a bucket's listing are asked for at a time: each holds a page."""
    pages = chunks / PAGE
    return min(MOST_PARTS, (pages - 1) // 16) if pages >= 64 else 1


def line_of(
    name: str, kind: str, points: Sequence[tuple[int, float]], measure: str = "requests"
) -> Line:
    """Return what a command costs by the number of chunks, from some measured sizes."""
    in_pages = measure == "peak_mb" and kind.startswith("bucket")
    held = HELD_NBYTES.get(name, 0) / 1e6 if in_pages else 0.0

    def grows_by(n: float) -> float:
        return pages_held(n) if in_pages else looked_at(name, kind, n, measure)

    costs = sorted(y for _, y in points)
    if measure == "cpu_s" and costs[-1] <= costs[0] * NOISE:
        return lambda _: costs[len(costs) // 2]
    base, slope = fitted([(grows_by(n), y - held * n) for n, y in points])
    return lambda n: base + slope * grows_by(n) + held * n


def rpcs_by(name: str, costs: dict[str, dict[str, Any]], sizes: Sequence[int]) -> Line:
    """Return a command's RPCs on a mount of NFS. Those of `top` do not grow by a line.

    A client asks again for each chunk that `top` saw in its first look if that took longer than the
    client keeps attributes of directories.
    """
    points = [(n, float(costs[name][str(n)]["requests"])) for n in sizes]
    if name == TOP:
        took_s = [(n, costs[name][str(n)]["wall_s"] - INTERVAL_S) for n in sizes]
        look_s = line_of(name, "nfs", took_s)
        again = {n for n, both_s in took_s if both_s / 2 > KEPT_S}
        listed = line_of(name, "nfs", [(n, y - n * (n in again)) for n, y in points])
        return lambda n: listed(n) + n * (look_s(n) / 2 > KEPT_S)
    return line_of(name, "nfs", points)


def predictions(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for each command and measure the largest size's prediction, and those beyond."""
    sizes, costs, kind = sorted(map(int, report["sizes"])), report["costs"], report["kind"]
    rows = []
    for name, by_size in costs.items():
        for what in MEASURES:
            points = [(n, float(by_size[str(n)][what])) for n in sizes]
            if not any(y for _, y in points):
                continue
            if what == "cpu_s" and kind.startswith("nfs"):
                continue  # a guest's processor time is the host's, too
            if kind.startswith("nfs") and what == "requests":
                earlier, beyond = (rpcs_by(name, costs, some) for some in (sizes[:-1], sizes))
            else:
                earlier, beyond = (
                    line_of(name, kind, some, what) for some in (points[:-1], points)
                )
            there = earlier(sizes[-1])
            rows.append({
                "what": name, "measure": what, "measured": [y for _, y in points],
                "predicted": there, "of_measured": there / points[-1][1] if points[-1][1] else 1.0,
                "goal": beyond(GOAL),
            })  # fmt: skip
    return rows


UNITS = {"cpu_s": "s", "peak_mb": "MB", "requests": "requests"}


def shown(value: float) -> str:
    """Return a number with two digits or so."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def table(*reports: dict[str, Any]) -> str:
    """Return what the largest size of each report cost, and what `GOAL` chunks would; Markdown.

    A cell holds a command's measures in the order that the report's head names. A prediction from
    a line that missed the largest size is a dash.
    """
    heads, cells = [""], dict[str, list[str]]()
    for report in reports:
        rows = predictions(report)
        units = ", ".join(dict.fromkeys(UNITS[row["measure"]] for row in rows))
        heads += [f"{report['kind']}, {max(map(int, report['sizes'])):,}: {units}", "10^9"]
        for name in dict.fromkeys(row["what"] for row in rows):
            some = [row for row in rows if row["what"] == name]
            cells.setdefault(name, []).extend((
                "; ".join(shown(row["measured"][-1]) for row in some),
                "; ".join(
                    shown(row["goal"]) if abs(row["of_measured"] - 1) <= WITHIN else "-"
                    for row in some
                ),
            ))  # fmt: skip
    lines = [heads, ["---", *["--:"] * (len(heads) - 1)], *([k, *row] for k, row in cells.items())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("|  ", "| ")


def summary(report: dict[str, Any]) -> str:
    """Say how many predictions are within the bounds."""
    rows = predictions(report)
    far = [one for one in rows if abs(one["of_measured"] - 1) > WITHIN]
    text = f"{len(rows) - len(far)} of {len(rows)} predictions of the largest size are within 25 %"
    if far:
        names = (f"{one['what']}, {UNITS[one['measure']]} {one['of_measured']:.2f}" for one in far)
        text += f"; not: {'; '.join(names)}"
    return f"{report['date']}: {text}."


# -- places ---------------------------------------------------------------------------------------


def rpcs_of(root: Path) -> Callable[[], int]:
    """Return a count of the RPCs of the mount that a directory lies on; of other mounts 0."""
    path = str(ROOT / "benchmarks" / "nfs")
    with mock.patch.object(sys, "path", [path, *sys.path]):
        from clients import rpcs
    return lambda: sum(rpcs(root).values())


def copy(root: Path, place: str) -> None:
    """Copy a directory into a bucket, where it is a cache, too."""
    target = BucketPath(Bucket.at(place))

    def put(path: Path) -> None:
        target.bucket.put((target / str(path.relative_to(root))).key, path.read_bytes())

    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(put, filter(Path.is_file, root.rglob("*"))):
            pass


def grown(
    place: str, kind: str, options: argparse.Namespace, requests: Callable[[], int]
) -> dict[str, Any]:
    """Fill a place to each size, and measure there."""
    sizes = sorted(-(-n // PROMPT_CHUNKS) * PROMPT_CHUNKS for n in options.sizes)
    only = options.only or [*COMMANDS, USE]
    report: dict[str, Any] = {"kind": kind, "sizes": sizes, "costs": {name: {} for name in only}}
    before = 0
    for chunks in sizes:
        with contextlib.ExitStack() as stack:
            root = Path(place)
            if options.bucket:
                root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vua-scale-")))
            elif options.served:
                root = options.served
            began_s = time.monotonic()
            fill(root, chunks, before)
            if options.bucket:
                copy(root, place)
            print(f"{chunks:>11,} chunks  made in {time.monotonic() - began_s:.0f} s", flush=True)
        before = chunks
        forget()  # where memory is full of others' pages, freeing them is the command's time
        if not kind.startswith(("bucket", "nfs")):
            # Inodes lie in memory in the order in which processes first asked for them. The writer
            # asks in the order of prompts, and `gc` folder by folder. After a writer alone, `top`
            # of 10^6 chunks takes twice as long as after `gc`.
            gc = [*VUA, "gc", place, "--yes", "--json"]
            done = subprocess.run(gc, stdout=subprocess.PIPE, text=True, check=True)
            if gone := json.loads(done.stdout)["deleted"]["chunks"]:
                sys.exit(f"{place}: `vua gc` deleted {gone} chunks; use a larger or emptier disk")
            # The kernel keeps names in lists, newest first. Where it has few lists
            # (`dhash_entries=`), a look takes longer the more names there are. These names make
            # the search equally long at each size.
            crowd(Path(place), sizes[-1] - chunks)
        for name, cost in measured(
            place, kind, chunks, only, requests, options.rounds, options.enough
        ).items():
            report["costs"][name][str(chunks)] = cost._asdict()
    report["date"] = time.strftime("%Y-%m-%d", time.gmtime())
    return report


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what is asked for."""
    if options.bucket:
        server = seaweedfs()
        with speaking_to(server.endpoint):
            return grown(server.place(), f"bucket, {options.bucket}", options, server.requests)
    root = Path(options.directory)
    if not options.use:
        root.mkdir()
    try:
        if not options.engine:
            kind = subprocess.run(
                ["df", "--output=fstype", root], stdout=subprocess.PIPE, text=True, check=True
            ).stdout.split()[-1]
            return grown(str(root), kind, options, rpcs_of(root))
        chunks = max(options.sizes) // PROMPT_CHUNKS * PROMPT_CHUNKS
        if not options.use:
            fill(root, chunks)
        return engine(root, chunks, options.rounds, options.prompts)
    finally:
        if not (options.keep or options.use):
            shutil.rmtree(root, ignore_errors=True)


def main() -> None:
    """Fill, measure, predict, remove."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?", help="a new one")
    parser.add_argument("--served", type=Path, help="its path on the NFS server, which fills it")
    parser.add_argument("--bucket", choices=("seaweedfs",), help="instead of a directory")
    parser.add_argument(
        "--sizes", type=lambda text: [int(one) for one in text.split(",")],
        default=[10_000, 30_000, 100_000, 300_000, 1_000_000], help="in chunks",
    )  # fmt: skip
    parser.add_argument("--only", type=lambda text: text.split(","), help="these commands")
    parser.add_argument("--rounds", type=int, default=3, help="of a command, at least; of writers")
    parser.add_argument("--enough", type=float, default=5, help="seconds of a command's processor")
    parser.add_argument("--engine", action="store_true", help="an engine beside eviction")
    parser.add_argument("--prompts", type=int, default=100, help="that a writer stores")
    parser.add_argument("--use", action="store_true", help="with --engine: it is there already")
    parser.add_argument("--keep", action="store_true", help="do not remove the directory")
    parser.add_argument("--out", type=Path, metavar="FILE", help="put the report there, by kind")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        name, *words = options.work
        print(json.dumps(WORK[name](options.directory, *map(json.loads, words))))
        return
    if (options.directory is None) == (options.bucket is None):
        parser.error("give the name of a new directory, or --bucket")
    report = run(options)
    if not options.engine:
        print(table(report), summary(report), sep="\n")
    if options.out:
        there = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
        there["engine" if options.engine else report["kind"]] = report
        options.out.write_text(json.dumps(there, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
