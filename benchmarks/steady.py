"""Run a command while this virtual machine's free memory stays with it.

    python benchmarks/steady.py vua bench --only C3

A host may take back what a guest does not use: Linux reports free blocks of 2 MiB and more to it
(free page reporting), and the next write into the page cache waits for the host to give memory
again, for ten times as long as the write itself takes. A benchmark of writes measures the host
then. This takes the free memory and gives every other piece of 256 KiB of it back, which the host
backs already and which is too small to be reported; then it takes the large blocks that are left.
So half of the free memory is missing meanwhile.
"""

from __future__ import annotations

import argparse
import mmap
import subprocess
import sys
from pathlib import Path

PAGE = mmap.PAGESIZE
PIECE = 256 << 10
BLOCK = 2 << 20
"""The smallest that is reported."""
ROUNDS = 6
"""Taking large blocks sets others free."""


def free_nbytes() -> int:
    """What the system has free, without its page cache."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemFree:"))


def in_blocks_nbytes() -> int:
    """What of it lies in blocks that are reported."""
    zones = Path("/proc/buddyinfo").read_text(encoding="ascii").splitlines()
    counts = [list(map(int, zone.split()[4:])) for zone in zones]
    sizes = [[count * PAGE << order for order, count in enumerate(zone)] for zone in counts]
    return sum(sum(zone[(BLOCK // PAGE).bit_length() - 1 :]) for zone in sizes)


def take(nbytes: int, advice: int) -> mmap.mmap:
    """Return memory of its own for every page."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    for at in range(0, nbytes, PAGE):
        memory[at] = 1
    return memory


def hold(nbytes: int) -> list[mmap.mmap]:
    """Take ``nbytes``, give every other piece back, and take what lies in large blocks."""
    memory = take(nbytes // (2 * PIECE) * 2 * PIECE, mmap.MADV_NOHUGEPAGE)
    for at in range(0, len(memory), 2 * PIECE):
        memory.madvise(mmap.MADV_DONTNEED, at, PIECE)
    held, left = [memory], nbytes // 2
    for _ in range(ROUNDS):
        large = min(in_blocks_nbytes(), left) // BLOCK * BLOCK
        if large == 0:
            break
        held.append(take(large, mmap.MADV_HUGEPAGE))
        left -= large
    return held


def main() -> int:
    """Hold memory, run the command, and return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hold", type=float, help="GiB, by default all that is free but 0.3")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[options.command[:1] == ["--"] :]
    if not command:
        parser.error("no command; what is to be run while memory is held?")
    free = free_nbytes()
    nbytes = free - (300 << 20) if options.hold is None else int(options.hold * (1 << 30))
    if not 2 * PIECE <= nbytes < free:
        parser.error(f"cannot hold {nbytes >> 20} MiB: {free >> 20} MiB are free")
    held = hold(nbytes)
    print(
        f"{free >> 20} MiB were free, {free_nbytes() >> 20} MiB are left, "
        f"{in_blocks_nbytes() >> 20} MiB of that in large blocks",
        file=sys.stderr,
    )
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        for memory in held:
            memory.close()


if __name__ == "__main__":
    sys.exit(main())
