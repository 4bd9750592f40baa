"""How many chunks and bytes the namespaces of a directory had when all were last looked at.

Sweeps for victims and `vua gc`, which look at every chunk anyway, write ``.upkeep/census``. Tools,
and a process that starts, answer from it where counting would take long, and tools say its date. It
may be old, damaged or absent, so what it says of a namespace is compared with two of its parts, and
nothing is deleted because of it.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from vua.io.files import atomic_write
from vua.io.posix import closing_fd
from vua.storage.mark import UPKEEP

if TYPE_CHECKING:
    from vua.capacity.spaces import Column, Space
    from vua.native import ChunkNames

_NAME: Final = "census"
_FORMAT: Final = "vua.census.v1"
_MOST_NBYTES: Final = 16 << 20
"""A longer file is not read: some ten thousand namespaces."""
_SIZED: Final = 4
"""Chunks of each part whose files are measured for the mean size."""
_NEAR: Final = 1 / 4
"""A count further than this share from what two parts of the namespace say is too old."""


class Counted(NamedTuple):
    """What a namespace had."""

    chunks: int
    nbytes: int
    """Bytes of entries: the mean of some chunks for all."""
    at_s: float
    """When that was, in seconds since 1970 by the host that counted."""
    oldest_ns: int
    """When the chunk unused for longest was used, and then the last used one; by the server."""
    newest_ns: int

    def fits(self, about: int) -> bool:
        """Whether a namespace can still be so, of about so many chunks."""
        return abs(self.chunks - about) <= about * _NEAR


def read_census(root: str | os.PathLike[str]) -> dict[str, Counted]:
    """Return what was counted, by namespace; empty where there is no census, or a damaged one."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with closing_fd(os.open(Path(root) / UPKEEP / _NAME, flags)) as fd:
            found = json.loads(os.read(fd, _MOST_NBYTES))
        if found["format"] != _FORMAT:
            return {}
        at_s, rows = float(found["at_s"]), dict[str, Counted]()
        for name, (chunks, nbytes, oldest_ns, newest_ns) in found["namespaces"].items():
            rows[name] = Counted(int(chunks), int(nbytes), at_s, int(oldest_ns), int(newest_ns))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
    return rows if all(min(row) >= 0 for row in rows.values()) else {}


class Tally:
    """Counts namespaces part by part."""

    def __init__(self) -> None:
        self._rows: dict[str, list[int]] = {}
        """Chunks, measured chunks and their bytes, oldest and newest use in ns."""

    def add(self, space: Space, names: ChunkNames, mtimes_ns: Column) -> None:
        """Count some chunks, and measure a few."""
        from vua.native import chunk_sizes  # noqa: PLC0415 - what only reads goes without

        if not len(names):
            return
        row = self._rows.setdefault(space.name, [0, 0, 0, int(mtimes_ns[0]), 0])
        sizes = chunk_sizes(space.fd, names[:_SIZED])
        row[0] += len(names)
        row[1] += int((sizes >= 0).sum())
        row[2] += int(sizes[sizes >= 0].sum())
        row[3] = min(row[3], int(mtimes_ns.min()))
        row[4] = max(row[4], int(mtimes_ns.max()))

    def write(self, upkeep: int) -> None:
        """Replace the census below ``upkeep``, a descriptor; what fails leaves the old one."""
        rows = {
            name: (chunks, nbytes * chunks // max(1, sized), max(0, oldest), max(0, newest))
            for name, (chunks, sized, nbytes, oldest, newest) in self._rows.items()
        }
        from vua.capacity.lru import Bare  # noqa: PLC0415 - likewise

        text = json.dumps({"format": _FORMAT, "at_s": time.time(), "namespaces": rows})
        if isinstance(upkeep, Bare):  # a full disk
            return
        with suppress(OSError):
            mode = 0o600 | (os.fstat(upkeep).st_mode & 0o040)  # as the directory's group
            atomic_write(_NAME, text.encode(), dir_fd=upkeep, mode=mode)
