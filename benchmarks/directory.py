"""Times the tools on a directory of very many chunks, and lets three passes meet traffic there.

    python benchmarks/directory.py /mnt/disk/big 1000000

One command: makes a cache of that many tiny chunks (valid entries of 4.2 KiB in prompts of 32
chunks; on ext4 each takes 12 KiB of the disk and two inodes), times the commands on it, runs the
campaign (three `vua gc` at once on the full directory, beside writers and readers), and removes it
again. Before that it takes turns between this directory and one of 1,024 chunks: what an engine
does there should take no longer. `--use` takes a directory that an earlier run with `--keep` left
behind, `--serving` ends after the turns, `--eviction` after a few evictions. Prints lines for
people and, with `--out`, JSON.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from house import archived
from vua.capacity.evictor import Evictor
from vua.capacity.limits import Limits
from vua.capacity.listing import read_listing
from vua.capacity.lru import LRU, LeastHitDensity
from vua.capacity.spaces import spaces
from vua.capacity.upkeep import next_tick_ns, upkeep_directory
from vua.capacity.usage import measure
from vua.cli import main as vua
from vua.device.buffers import StagingBuffer
from vua.format.entry import EntryCodec
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout
from vua.format.parse import encode_header
from vua.storage.base import WRITTEN
from vua.store.namespace import Namespace
from vua.store.store import Loader
from vua.store.writer import EntryWriter

LAYOUT = KVLayout(layers=1, kv_heads=1, k_dim=16, v_dim=16, dtype="BF16", chunk_tokens=4)
IDENTITY = Identity(model="benchmark", kv_dtype="BF16", chunk_tokens=4, name="benchmark")
CODEC = EntryCodec(IDENTITY.namespace, LAYOUT, LAYOUT.full)
PROMPT_CHUNKS = 32
SMALL, HOT, TURNS = 1024, 15, 330
"""Chunks of the small directory; prompts that are used in each, and how often in all."""
LOGGED, AGAIN, EVICTIONS = 16384, 4096, 5
"""Prompts in the log: some 8 MB; so many are asked for again, before others; evictions of each
kind."""
BEFORE = """
import sys, time
from vua.capacity.evictor import Evictor
victims, now_ns = Evictor(sys.argv[1]), server_now_ns(upkeep_directory(sys.argv[1]))
began = time.monotonic()
freed = victims.evict(int(sys.argv[2]), now_ns)
print(time.monotonic() - began, freed.chunks)
"""
"""What evicts by the mtimes, in any commit's words."""
DISK_NBYTES, INODES = 12288, 2
"""What ext4 needs per chunk."""


def keys_of(prompt: int) -> KeyChain:
    """The chunks of a prompt."""
    return KeyChain(token_ids([prompt, *range(1, 4 * PROMPT_CHUNKS)]), 4)


def content_of(prompt: int, place: int) -> int:
    """What a chunk's K and V hold, in each byte: depends on nothing but the tokens before it."""
    return (prompt * 31 + place * 7) % 255 + 1


def fill(root: Path, chunks: int) -> None:
    """Write the entries, without the bookkeeping that a store does for each."""
    Namespace.create(root, IDENTITY, [LAYOUT]).stores[0]
    nbytes, blocks = CODEC.file_nbytes - CODEC.header_nbytes, CODEC.block_nbytes()
    base = root / IDENTITY.namespace
    for fan in range(256):
        (base / f"{fan:02x}").mkdir(exist_ok=True)
    sums = [[xxhash.xxh3_64_intdigest(bytes([byte]) * n) for n in blocks] for byte in range(256)]
    tables = [np.array(one, dtype=np.uint64) for one in sums]
    for prompt in range(-(-chunks // PROMPT_CHUNKS)):
        keys, stamp = keys_of(prompt), time.time_ns()
        for place in range(PROMPT_CHUNKS):
            key, byte = keys[place], content_of(prompt, place)
            chunk = f"{base}/{key.name[:2]}/{key.name}"
            Path(chunk).mkdir(0o700)
            fd = os.open(f"{chunk}/{LAYOUT.full.name}.safetensors", os.O_WRONLY | os.O_CREAT, 0o600)
            header = encode_header(CODEC, key, tables[byte], writer="benchmark")
            os.write(fd, header + bytes([byte]) * nbytes)
            os.close(fd)
            os.utime(chunk, ns=(stamp - 1000 * place, stamp - 1000 * place))
        if prompt % 256 == 0 and sys.stderr.isatty():
            print(f"\r{prompt * PROMPT_CHUNKS} chunks", end="", file=sys.stderr)


def timed(report: dict[str, Any], *arguments: str) -> None:
    """Run one command, note its time and exit status, print the end of what it says."""
    out, began = io.StringIO(), time.monotonic()
    with redirect_stdout(out):
        code = vua(arguments)
    took = time.monotonic() - began
    shown = " ".join(part for part in arguments if not part.startswith("/"))
    last = out.getvalue().strip().splitlines()[-1][:110]
    print(f"{took:8.2f} s  exit {code}  vua {shown}\n            {last}", flush=True)
    report.setdefault("commands", []).append({"what": shown, "seconds": took, "exit": code})


class Serving:
    """A directory as an engine uses it; times what it does."""

    def __init__(self, root: Path, chunks: int) -> None:
        """Open it."""
        self.root, self.prompts = root, chunks // PROMPT_CHUNKS
        bounds = Limits(max_bytes=1 << 50, min_free_bytes=0)
        self.store = Namespace.create(root, IDENTITY, [LAYOUT], bounds=bounds).stores[0]
        self.buffer = StagingBuffer(LAYOUT, LAYOUT.full, PROMPT_CHUNKS)
        self.saver = EntryWriter(self.store, self.buffer.memory)
        self.loader = Loader(self.store, self.buffer.memory)

    def turn(self, prompt: int, new: int, times: dict[str, list[float]], told: str) -> None:
        """Do everything once, with a stored prompt and one that is not."""

        def clocked(what: str, do: Callable[[], int], expected: int) -> None:
            began = time.perf_counter()
            found = do()
            times.setdefault(what + told, []).append(time.perf_counter() - began)
            if found != expected:
                sys.exit(f"{self.root}: {what}: {found}, expected {expected}")

        self.buffer.bytes[:] = 0
        clocked("lookup", lambda: self.store.lookup(keys_of(prompt)), PROMPT_CHUNKS)
        clocked("lookup, nothing stored", lambda: self.store.lookup(keys_of(new)), 0)
        clocked("load", lambda: self.loader.load(keys_of(prompt)).chunks, PROMPT_CHUNKS)
        last = self.buffer.bytes.reshape(PROMPT_CHUNKS, -1)[-1]
        if int(last[-1]) != content_of(prompt, PROMPT_CHUNKS - 1):
            sys.exit(f"{self.root}: wrong bytes")
        key = keys_of(new)[0]
        clocked("save", lambda: self.saver.save([key]).count(WRITTEN), 1)
        shutil.rmtree(self.root / self.store.namespace / key.name[:2] / key.name)

    def hot(self, prompts: int) -> list[int]:
        """Some of the prompts of the later half: old ones may have been evicted."""
        return random.sample(range(self.prompts // 2, self.prompts), prompts)


def serving(root: Path, chunks: int, report: dict[str, Any]) -> None:
    """Take turns between the directory and a small one."""
    with tempfile.TemporaryDirectory(prefix="vua-small-", dir=root.parent) as name:
        small = Path(name, "small")
        small.mkdir()
        fill(small, SMALL)
        both = [Serving(root, chunks), Serving(small, SMALL)]
        times: list[dict[str, list[float]]] = [{}, {}]
        prompts = list(zip(*(one.hot(HOT) for one in both), strict=True))
        for turn in range(TURNS):
            told = ", first time" if turn < HOT else ""
            if HOT <= turn < 3 * HOT:
                told = ", next times"  # what was read past the page cache comes into it
            for at in random.sample(range(2), 2):
                both[at].turn(prompts[turn % HOT][at], 10**9 + turn, times[at], told)
        for one in both:
            one.store.close()
    for what, ours in times[0].items():
        low, ratio, high = np.percentile(np.divide(ours, times[1][what]), [25, 50, 75])
        row = {"what": what, "ratio": float(ratio), "low": float(low), "high": float(high)}
        report.setdefault("serving", []).append(row)
        text = f"of the time in one of {SMALL}: {what} ({low:.2f} to {high:.2f})"
        print(f"{ratio:8.2f} {text}", flush=True)


def eviction(root: Path, chunks: int, before: Path | None, report: dict[str, Any]) -> None:
    """Let new processes evict a thousandth: least recently used, and by a log of requests.

    By turns, also as an earlier commit (the checkout ``before``) evicts by the mtimes.
    """
    some = range(0, chunks // PROMPT_CHUNKS, 1 + chunks // PROMPT_CHUNKS // LOGGED)
    log = LeastHitDensity(root)
    for prompt in [one for at in range(0, LOGGED, AGAIN) for one in 2 * [*some[at : at + AGAIN]]]:
        keys = keys_of(prompt)
        log.asked([keys[place].name for place in range(PROMPT_CHUNKS)])
    most, times = max(1, chunks // 1000), {"LRU": list[float](), "hit density": list[float]()}
    if before:
        times["before"] = []
    upkeep, nbytes = upkeep_directory(root), most * CODEC.file_nbytes
    for turn in range(EVICTIONS):
        for name in sorted(times, reverse=bool(turn % 2)):
            if name == "before":
                command = [sys.executable, "-c", BEFORE, str(root), str(nbytes)]
                environment = {**os.environ, "PYTHONPATH": f"{before}/src"}
                told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
                took_s, evicted = map(float, told.stdout.split())
            else:
                policy = LRU() if name == "LRU" else LeastHitDensity(root)
                victims = Evictor(root, policy=policy)
                began = time.monotonic()
                evicted = victims.evict(nbytes, next_tick_ns(upkeep)).chunks
                took_s = time.monotonic() - began
            times[name].append(took_s)
            if evicted < most:
                sys.exit(f"{root}: {evicted} chunks evicted, expected {most}")
    os.close(upkeep)
    medians = {name: statistics.median(found) for name, found in times.items()}
    report["eviction"] = {"chunks": most, "seconds": times, "median_s": medians}
    print(f"{medians['LRU']:8.2f} s  {most} chunks evicted by a new process, least recently used")
    for other in sorted({*times} - {"hit density"}):
        ratio = medians["hit density"] / medians[other]
        print(
            f"{ratio:8.2f} of that of {other}: by hit density, from a log of requests", flush=True
        )


def work(root: Path, kind: str, seed: int, seconds: float, most: int, prompts: int) -> None:
    """Write or read prompts for a while; a process of the campaign. Prints what it did."""
    chance = random.Random(seed)
    store = Namespace.create(
        root, IDENTITY, [LAYOUT], bounds=Limits(max_bytes=most, min_free_bytes=0)
    ).stores[0]
    buffer = StagingBuffer(LAYOUT, LAYOUT.full, PROMPT_CHUNKS)
    saver, loader = EntryWriter(store, buffer.memory), Loader(store, buffer.memory)
    bytes_ = buffer.bytes.reshape(PROMPT_CHUNKS, -1)
    done = wrong = refused = 0
    slowest_s = 0.0
    print("ready", flush=True)
    sys.stdin.readline()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        # new prompts, those stored lately, and those that go first
        prompt = chance.choice([prompts + chance.randrange(4000), chance.randrange(prompts)])
        keys = keys_of(prompt)
        found = store.lookup(keys)
        if kind == "read":
            loaded = loader.load(keys.first(found)).chunks
            expected = [content_of(prompt, place) for place in range(loaded)]
            wrong += int((bytes_[:loaded] != np.array(expected)[:, None]).any())
            done += loaded
            store.used(keys, loaded)
            continue
        store.used(keys, found, wait=True)
        for place in range(found, PROMPT_CHUNKS):
            bytes_[place] = content_of(prompt, place)
            began = time.monotonic()
            if saver.save([keys[place]], place) == [WRITTEN]:
                done += 1
            elif not store.holds(keys[place], [LAYOUT.full]):
                refused += 1
                break
            slowest_s = max(slowest_s, time.monotonic() - began)
    store.close()
    print(json.dumps({"kind": kind, "chunks": done, "wrong": wrong, "refused": refused,
                      "slowest_save_s": slowest_s}))  # fmt: skip


def campaign(root: Path, seconds: float, report: dict[str, Any]) -> None:
    """Three passes at once on a directory in use that holds 1 % too much; what came of it."""
    before = measure(root)
    most, prompts = int(before.nbytes * 0.99), before.chunks // PROMPT_CHUNKS
    processes = []
    for seed, kind in enumerate(("write", "write", "read", "read")):
        numbers = [str(one) for one in (seed, seconds, most, prompts)]
        command = [sys.executable, __file__, str(root), "0", "--work", kind, *numbers]
        processes.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
    passes: list[subprocess.Popen[bytes]] = []
    highest, began = 0, time.monotonic()
    try:
        for one in processes:
            one.stdout.readline()
        for one in processes:
            one.stdin.write("go\n")
            one.stdin.flush()
        for _ in range(3):
            command = [sys.executable, "-m", "vua", "gc", str(root), "--json"]
            bounds = ["--max-bytes", str(most), "--min-free", "0"]
            passes.append(subprocess.Popen([*command, *bounds], stdout=subprocess.PIPE))
        while any(one.poll() is None for one in (*processes, *passes)):
            highest = max(highest, measure(root).nbytes)
            time.sleep(0.5)
        results = [json.loads(one.communicate()[0].splitlines()[-1]) for one in processes]
        told = [json.loads(one.communicate()[0]) for one in passes]
    finally:
        for one in (*processes, *passes):
            one.kill()
            one.wait()
    with spaces(root) as found:
        listings = [read_listing(space) for space in found]
    orphans = sum(
        1 for one in listings for _, before in one.befores() if before and one.get(before) is None
    )
    nbytes = sum(one.totals().nbytes for one in listings)
    report["campaign"] = {
        "seconds": time.monotonic() - began,
        "limit": most,
        "highest_of_limit": highest / most,
        "end_of_limit": nbytes / most,
        "wrong_reads": sum(one["wrong"] for one in results),
        "orphans": orphans,
        "processes": results,
        "passes": [
            {name: one[name] for name in ("seconds", "within", "deleted", "problems")}
            for one in told
        ],
    }
    print(json.dumps(report["campaign"], indent=1), flush=True)


def room_for(directory: Path, chunks: int) -> int:
    """As many chunks as disk and inodes allow, leaving a tenth of both free."""
    status = os.statvfs(directory)
    disk = status.f_bavail * status.f_frsize * 0.9 // DISK_NBYTES
    inodes = status.f_favail * 0.9 // INODES if status.f_files else chunks
    return int(min(chunks, disk, inodes))


def run(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Fill, time, campaign."""
    report: dict[str, Any] = {"version": 1}
    chunks = options.chunks
    if not options.use:
        chunks = room_for(root.parent, options.chunks)
        if chunks < options.chunks:
            print(f"only {chunks} of {options.chunks}: disk or inodes do not allow more")
        root.mkdir()
        began = time.monotonic()
        fill(root, chunks)
        report["fill_s"] = time.monotonic() - began
        print(f"{report['fill_s']:8.2f} s  made {chunks} chunks", flush=True)
    where, nbytes = str(root), chunks * CODEC.file_nbytes
    report["chunks"] = chunks
    serving(root, chunks, report)
    if options.serving:
        return report
    with tempfile.TemporaryDirectory(prefix="vua-before-") as name:
        before = archived(options.before, Path(name, "before")) if options.before else None
        eviction(root, chunks, before, report)
    if options.eviction:
        return report
    free = ("--min-free", "0", "--max-bytes")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as stored, \
            tempfile.NamedTemporaryFile("w", suffix=".json") as other:  # fmt: skip
        json.dump([chunks // 64, *range(1, 4 * PROMPT_CHUNKS)], stored)
        json.dump([chunks // 64, *range(1, 64), *range(9, 73)], other)
        stored.flush()
        other.flush()
        timed(report, "du", where)
        timed(report, "ls", where)
        timed(report, "explain", where, "--tokens", stored.name)
        timed(report, "explain", where, "--tokens", other.name)
    timed(report, "gc", where, "--quick", *free, str(nbytes))
    timed(report, "gc", where, *free, str(nbytes))
    timed(report, "gc", where, "--quick", *free, str(int(nbytes * 0.999)))
    campaign(root, options.seconds, report)
    timed(report, "verify", where)
    return report


def main() -> None:
    """Fill, time, remove."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("chunks", type=int)
    parser.add_argument("--keep", action="store_true", help="do not remove it")
    parser.add_argument("--use", action="store_true", help="the directory is there already")
    parser.add_argument("--serving", action="store_true", help="leave the tools out")
    parser.add_argument("--eviction", action="store_true", help="end after the evictions")
    parser.add_argument("--before", metavar="COMMIT", help="let this one evict, too")
    parser.add_argument("--seconds", type=float, default=60.0, help="of traffic in the campaign")
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    parser.add_argument("--work", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        kind, seed, seconds, most, prompts = options.work
        work(options.directory, kind, int(seed), float(seconds), int(most), int(prompts))
        return
    if not options.use and options.directory.exists():
        parser.error(f"{options.directory} exists; give the name of a new directory, or --use")
    try:
        report = run(options.directory, options)
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    finally:
        if not options.keep and not options.use:
            shutil.rmtree(options.directory, ignore_errors=True)


if __name__ == "__main__":
    main()
