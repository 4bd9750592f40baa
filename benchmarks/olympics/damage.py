"""What happens to stored files between two lives of an engine, or within one. Needs no package."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LEAST_NBYTES = 8192
"""Smaller files hold descriptions and no K and V."""
FLIP_EVERY_NBYTES = 32768


def files_of(root: Path) -> dict[Path, int]:
    """Return all files below a directory, with their sizes; some may be vanishing meanwhile."""
    found = {}
    for folder, _, names in os.walk(root):
        for name in names:
            with suppress(OSError):
                path = Path(folder, name)
                found[path] = path.stat().st_size
    return found


def payloads(root: Path) -> list[Path]:
    """Return the files that hold K and V, in order."""
    skipped = (".sqlite", ".db", ".log", "-wal", "-shm")
    return sorted(
        path
        for path, size in files_of(root).items()
        if size >= LEAST_NBYTES and not any(part in path.name for part in skipped)
    )


def flip(root: Path, seed: int) -> int:
    """Flip one bit in each 32 KiB of a file's last three quarters: the top one of an exponent.

    (Of float32, float16 and bfloat16, where numbers lie at multiples of four bytes.)
    """
    chance = random.Random(seed)
    for path in payloads(root):
        size = path.stat().st_size
        with path.open("r+b") as stream:
            for start in range(size // 4, size - 64, FLIP_EVERY_NBYTES):
                at = chance.randrange(start, min(start + FLIP_EVERY_NBYTES, size - 64)) | 3
                stream.seek(at)
                byte = stream.read(1)[0]
                stream.seek(at)
                stream.write(bytes([byte ^ 0x40]))
    return len(payloads(root))


def swap(root: Path, seed: int) -> int:
    """Exchange the contents of files of one size, two by two."""
    chance, by_size = random.Random(seed), dict[int, list[Path]]()
    for path in payloads(root):
        by_size.setdefault(path.stat().st_size, []).append(path)
    swapped = 0
    for paths in by_size.values():
        chance.shuffle(paths)
        for one, other in zip(paths[::2], paths[1::2], strict=False):
            first, second = one.read_bytes(), other.read_bytes()
            one.write_bytes(second)
            other.write_bytes(first)
            swapped += 2
    return swapped


def cut(root: Path, seed: int) -> int:
    """Cut each file, somewhere between a quarter and three quarters of it."""
    chance, struck = random.Random(seed), payloads(root)
    for path in struck:
        size = path.stat().st_size
        os.truncate(path, chance.randrange(size // 4, size * 3 // 4))
    return len(struck)


def remove(root: Path, seed: int) -> int:  # noqa: ARG001 - all of it
    """Delete the directory."""
    many = len(payloads(root))
    shutil.rmtree(root)
    return many


DAMAGES: dict[str, Callable[[Path, int], int]] = {
    "flip": flip,
    "swap": swap,
    "cut": cut,
    "remove": remove,
}
"""By name; each returns how many files it has struck."""
