"""Measures the memory and the time of the tools on a directory of very many chunks.

    python benchmarks/tools.py /mnt/disk/big 100000 200000

For each number it fills the directory up to so many chunks (valid entries whose K and V are zeros,
in prompts of 32 chunks; sparse, so that ext4 needs 8 KiB for each), runs each tool in a process of
its own, and removes the directory at the end. Prints for each tool the seconds, the peak resident
memory in MB of its process and of the largest child, and how many bytes it grew per chunk since the
start; from the second number on also the bytes per chunk between the numbers, and what 10^6 to 10^9
need by that. `--tools gc,events` takes some of them, `--keep` leaves the directory, `--json FILE`
writes the numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import xxhash

from directory import CODEC, IDENTITY, LAYOUT, PROMPT_CHUNKS, keys_of
from vua.format.parse import encode_header
from vua.store.namespace import Namespace

RUN = """
import os, resource, sys, time
import vua.cli.events, vua.cli.ui, vua.catalog.directory
from vua.cli import main

def memory(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) * 1024

tool, root, rest = sys.argv[1], sys.argv[2], sys.argv[3:]
said = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
start, began_s, code = memory("VmRSS"), time.monotonic(), 0
if tool == "ui":
    from vua.catalog import open_catalog
    catalog, files = open_catalog(root), vua.cli.ui.Files()
    for _ in range(2):
        files.read(catalog)
        vua.cli.ui.overview(catalog, files)
elif tool == "events-2":
    from vua.catalog import open_catalog
    catalog, seen = open_catalog(root), {}
    for _ in range(2):
        now = vua.cli.events.content(catalog, seen)
        for one in vua.cli.events.changes(seen, now, "LOCAL"):
            pass
        seen = now
else:
    code = main([tool, root, *rest])
took_s = time.monotonic() - began_s
children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
line = f"{code} {took_s} {start} {memory('VmHWM')} {children}\\n"
os.write(said, line.encode())
"""
"""Runs a tool, and prints its exit status, seconds, and bytes of memory."""
TOOLS = {
    "du": ["du"],
    "ls": ["ls"],
    "ls --long": ["ls", "--long"],
    "ls --long --json": ["ls", "--long", "--json"],
    "top": ["top", "--once", "--interval", "0.1"],
    "gc": ["gc", "--yes"],
    "gc --max-per-salt": ["gc", "--yes", "--max-per-salt", "1T"],
    "gc --quick": ["gc", "--yes", "--quick"],
    "verify": ["verify"],
    "events": ["events"],
    "events twice": ["events-2"],
    "ui": ["ui"],
}
"""What is run, by the name that is printed."""


def fill(root: Path, chunks: int, already: int = 0) -> None:
    """Add prompts until there are so many chunks."""
    Namespace.create(root, IDENTITY, [LAYOUT]).stores[0].storage.close()
    table = np.array(
        [xxhash.xxh3_64_intdigest(bytes(nbytes)) for nbytes in CODEC.block_nbytes()],
        dtype=np.uint64,
    )
    base, name = root / IDENTITY.namespace, f"{LAYOUT.full.name}.safetensors"
    for fan in range(256):
        (base / f"{fan:02x}").mkdir(exist_ok=True)
    for prompt in range(-(-already // PROMPT_CHUNKS), -(-chunks // PROMPT_CHUNKS)):
        keys, stamp = keys_of(prompt), time.time_ns()
        for place in range(PROMPT_CHUNKS):
            key = keys[place]
            chunk = f"{base}/{key.name[:2]}/{key.name}"
            Path(chunk).mkdir(0o700)
            fd = os.open(f"{chunk}/{name}", os.O_WRONLY | os.O_CREAT, 0o600)
            os.write(fd, encode_header(CODEC, key, table, writer="benchmark"))
            os.ftruncate(fd, CODEC.file_nbytes)
            os.close(fd)
            os.utime(chunk, ns=(stamp - 1000 * place, stamp - 1000 * place))
        if prompt % 256 == 0 and sys.stderr.isatty():
            print(f"\r{prompt * PROMPT_CHUNKS} chunks", end="", file=sys.stderr)


def measured(root: Path, words: list[str]) -> dict[str, float]:
    """Run a tool once."""
    tool, *rest = words
    done = subprocess.run(
        [sys.executable, "-c", RUN, tool, str(root), *rest], stdout=subprocess.PIPE, check=True
    )
    code, took_s, start, peak, children = done.stdout.split()
    if int(code):
        raise SystemExit(f"{words} ended with {code.decode()}")
    return {
        "seconds": float(took_s), "start": int(start), "peak": int(peak), "child": int(children)
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("root", type=Path)
    parser.add_argument("chunks", type=int, nargs="+")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    names = [name for name in TOOLS if name in args.tools.split(",")]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    already = 0
    if args.root.exists():
        already = sum(1 for _ in args.root.glob("?" * 64 + "/??/" + "?" * 64))
    try:
        for chunks in sorted(args.chunks):
            fill(args.root, chunks, already)
            already = max(already, chunks)
            print(f"{chunks} chunks")
            for name in names:
                one = measured(args.root, TOOLS[name])
                found[name].append(one | {"chunks": chunks})
                grown = (one["peak"] - one["start"]) / chunks
                print(
                    f"  {name:18} {one['seconds']:8.1f} s  peak {one['peak'] / 1e6:6.1f} MB, "
                    f"a child {one['child'] / 1e6:6.1f} MB, {grown:7.1f} B per chunk since start",
                    flush=True,
                )
    finally:
        if not args.keep:
            shutil.rmtree(args.root, ignore_errors=True)
    if len(args.chunks) > 1:
        print("tool                B per chunk   MB at 10^6     10^7      10^8      10^9")
        for name, (first, *_, last) in found.items():
            each = (last["peak"] - first["peak"]) / (last["chunks"] - first["chunks"])
            rest = last["peak"] - each * last["chunks"]
            row = [f"{(rest + each * 10**power) / 1e6:9.0f}" for power in range(6, 10)]
            print(f"{name:18} {each:12.1f}   {' '.join(row)}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
