"""How one load scales with its threads, over a storage that answers each request in its own time.

    python benchmarks/scaling.py [--mib 256] [--mb-per-s 100] [--latency-ms 0] [--json FILE]

A prompt is loaded with 1, 2, 4 and 8 threads of the native loop. Each of its reads takes as long as
one stream of so many MB/s takes, and the latency: a library that is loaded before all others makes
`pread`, `preadv` and `preadv2` last so long. So the storage takes as many streams as ask, the bytes
are those of real files in the page cache, and all that is verified and copied is verified and
copied. Sleeping threads need no core: two cores show how many streams a load keeps busy, as far as
they can copy what arrives out of the page cache (eight streams of 1 GB/s, by `--mb-per-s 1000`,
take most of two). *of streams* is the rate over that of as many streams that never wait. *of plain
reads* is the rate over that of as many threads which read the same files into the same memory in
pieces of 256 KiB, by turns, and verify nothing. Needs a C compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from vua import native
from vua.device.buffers import StagingBuffer
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout
from vua.store.namespace import Namespace
from vua.store.store import Loader
from vua.store.writer import EntryWriter

THREADS = (1, 2, 4, 8)
LAYOUT = KVLayout(32, 8, 128, 128, "BF16", 64)
"""Llama 3.1 8B's: chunks of 8 MiB."""
SLOW = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void rest(double seconds)
{
    static __thread int punctual;
    if (!punctual) /* by default Linux wakes up to 50 us late, a fifth of 256 KiB at 1 GB/s */
        punctual = prctl(PR_SET_TIMERSLACK, 1L) == 0;
    struct timespec t = {(time_t)seconds, (long)(1e9 * (seconds - (double)(time_t)seconds))};
    nanosleep(&t, NULL);
}

static double latency_s, bytes_per_s, late_s;

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* How late a thread of an idle machine wakes: some 20 us, which are none of the storage's. */
__attribute__((constructor)) static void measure(void)
{
    enum { SLEEPS = 201 };
    double late[SLEEPS];
    bytes_per_s = atof(getenv("SLOW_BYTES_PER_S"));
    latency_s = atof(getenv("SLOW_LATENCY_S"));
    for (int n = 0; n < SLEEPS; n++) {
        double start = now();
        rest(2e-4);
        late[n] = now() - start - 2e-4;
    }
    qsort(late, SLEEPS, sizeof *late, by_size);
    late_s = late[SLEEPS / 2];
}

/* Let a read that began at `start` last as long as a stream would take. Small ones pass. */
static ssize_t pay(double start, ssize_t got)
{
    double left = start + latency_s + (double)got / bytes_per_s - late_s - now();
    if (got >= 1 << 14 && left > 0)
        rest(left);
    return got;
}

ssize_t preadv(int fd, const struct iovec *rows, int count, off_t offset)
{
    ssize_t (*real)(int, const struct iovec *, int, off_t) = dlsym(RTLD_NEXT, "preadv");
    double start = now();
    return pay(start, real(fd, rows, count, offset));
}

ssize_t pread(int fd, void *to, size_t nbytes, off_t offset)
{
    ssize_t (*real)(int, void *, size_t, off_t) = dlsym(RTLD_NEXT, "pread");
    double start = now();
    return pay(start, real(fd, to, nbytes, offset));
}

long syscall(long number, ...)
{
    long (*real)(long, ...) = dlsym(RTLD_NEXT, "syscall"), a[6];
    va_list given;
    va_start(given, number);
    for (int n = 0; n < 6; n++)
        a[n] = va_arg(given, long);
    va_end(given);
    double start = now();
    if (number == SYS_preadv2) /* without flags: a cold file would get more threads */
        return pay(start, real(number, a[0], a[1], a[2], a[3], a[4], 0L));
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
"""


def plain_read_s(files: list[Path], into: np.ndarray, threads: int) -> float:
    """Read as much of each file as it has room in ``into``, and verify nothing; the seconds."""
    each, piece, address = into.nbytes // len(files), 1 << 18, into.ctypes.data
    pread = ctypes.CDLL(None).pread
    pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long]
    pread.restype = ctypes.c_ssize_t
    with contextlib.ExitStack() as stack:
        fds = [stack.enter_context(path.open("rb", buffering=0)).fileno() for path in files]
        pieces = [(place, at) for place in range(len(fds)) for at in range(0, each, piece)]
        short: list[int] = []
        start, wanted = time.perf_counter(), iter(pieces)

        def read() -> None:
            for place, at in wanted:  # shared: each piece is read once
                wanted_nbytes = min(piece, each - at)
                to = address + place * each + at
                if pread(fds[place], to, wanted_nbytes, at) != wanted_nbytes:
                    short.append(place)

        readers = [threading.Thread(target=read) for _ in range(threads)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        took_s = time.perf_counter() - start
    if short:
        sys.exit(f"{len(short)} plain reads were short")
    return took_s


def measure(mib: int, rounds: int, place: str | None) -> list[dict[str, float]]:
    """Load with each number of threads, in turns; the medians."""
    stream = float(os.environ["SLOW_BYTES_PER_S"])
    payload = LAYOUT.full.payload_nbytes(LAYOUT)
    count = max(1, (mib << 20) // payload)
    with tempfile.TemporaryDirectory(prefix="vua-scaling-", dir=place) as directory:
        identity = Identity(model="scaling", kv_dtype="BF16", chunk_tokens=64)
        store = Namespace.create(Path(directory), identity, [LAYOUT]).stores[0]
        keys = KeyChain(token_ids(list(range(64 * count))), 64).first(count)
        buffer, into = (
            StagingBuffer(LAYOUT, LAYOUT.full, 1),
            StagingBuffer(LAYOUT, LAYOUT.full, count),
        )
        buffer.bytes[:] = np.random.default_rng(1).integers(0, 256, buffer.bytes.size, np.uint8)
        for key in keys:
            EntryWriter(store, buffer.memory).save([key])
        loader = Loader(store, into.memory)
        files = [path for path in Path(directory).rglob("*") if path.stat().st_size > payload]
        took: dict[int, list[float]] = {threads: [] for threads in THREADS}
        plain: dict[int, list[float]] = {threads: [] for threads in THREADS}
        for turn in range(rounds + 1):
            for threads in THREADS:
                into.bytes[:] = 0
                with native.crew.fixed(threads):
                    start = time.perf_counter()
                    loaded = loader.load(keys)
                    took[threads] += [time.perf_counter() - start] if turn else []
                same = (into.bytes.reshape(count, -1) == buffer.bytes).all()
                if loaded.chunks != count or not same:
                    sys.exit(f"{loaded} of {count} chunks were loaded, or not what was stored")
                plain[threads] += [plain_read_s(files, into.bytes, threads)] if turn else []
    rows = []
    for threads, seconds in took.items():
        rate = count * payload / statistics.median(seconds)
        row = {"threads": threads, "MB/s": round(rate / 1e6, 1)}
        row["of streams"] = round(rate / threads / stream, 3)
        ratios = [theirs / ours for theirs, ours in zip(plain[threads], seconds, strict=True)]
        rows.append(row | {"of plain reads": round(statistics.median(ratios), 3)})
    return rows


def main() -> None:
    """Build the slow library, and measure in a process that has it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--mb-per-s", type=float, default=100.0, help="of one stream")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="of each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", help="where the files lie for a while")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if "SLOW_BYTES_PER_S" in os.environ:
        rows = measure(asked.mib, asked.rounds, asked.dir)
        for row in rows:
            print(*(f"{name}: {value}" for name, value in row.items()), sep=", ")
        if asked.json:
            asked.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        return
    with tempfile.TemporaryDirectory(prefix="vua-slow-") as directory:
        source, library = Path(directory, "slow.c"), Path(directory, "slow.so")
        source.write_text(SLOW, encoding="utf-8")
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        slow = {
            "LD_PRELOAD": str(library),
            "SLOW_BYTES_PER_S": str(1e6 * asked.mb_per_s),
            "SLOW_LATENCY_S": str(1e-3 * asked.latency_ms),
        }
        done = subprocess.run([sys.executable, *sys.argv], env=os.environ | slow, check=False)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
