"""How one rectangle of a chunk moves between a file and memory: reads, and what they must hash to.

Worked out once per rectangle and memory map, then used for every chunk. Everything that a load does
per run of bytes happens in :meth:`Plan.checksums`; the rest is per file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from vua import _linux
from vua._linux import IOV_MAX, Iovecs
from vua.entry import EntryCodec
from vua.layout import MemoryMap, Part, Shard
from vua.native import Batch

__all__ = ["Digest", "Plan"]

SLICE_NBYTES: Final = 256 << 10
"""Bytes read before they are verified: they are still in cache then, see docs/performance.md."""
_SMALL_NBYTES: Final = 512 << 10
"""Files up to this size are read by one call."""
_VIEW_NBYTES: Final = 64 << 10
"""Bytes given to xxhash at once: for much longer inputs it releases the GIL."""


class Digest(Protocol):
    """What runs of bytes are fed to: a hash, or one unit's seal."""

    def update(self, view: memoryview, /) -> object:
        """Take the next bytes."""
        ...

    def intdigest(self) -> int:
        """Return the result as a number."""
        ...


class _Slice(NamedTuple):
    """One read: iovec rows [row_start, row_stop), nbytes at offset, units [first, stop)."""

    row_start: int
    row_stop: int
    nbytes: int
    offset: int
    first: int
    stop: int


class Plan:
    """How to move one rectangle of any chunk between files of one shard and one memory map."""

    def __init__(self, codec: EntryCodec, taken: Shard, target: Shard, memory: MemoryMap) -> None:
        self.codec, self.memory = codec, memory
        self.part = part = Part(codec.layout, codec.shard, taken, target)
        self.pieces = codec.layout.chunk_tokens // memory.piece_tokens
        self.nbytes = int(part.nbytes.sum())
        self._runs = part.addresses(memory)
        edges = [*part.unit_start.tolist(), len(self._runs)]
        self.units = list(pairwise(edges))
        """The runs [start, stop) of each unit."""
        self.slices = self._slices()
        self.views = _Views(part, self._runs, memory)
        self.table_index = None if part.whole else part.unit_index

    def _slices(self) -> list[_Slice]:
        header, part, units = self.codec.header_nbytes, self.part, self.units
        limit = SLICE_NBYTES if header + self.nbytes > _SMALL_NBYTES else _SMALL_NBYTES
        pieces = self.pieces
        rows = max(stop - start for start, stop in units) * pieces
        sizes = np.add.reduceat(part.nbytes, part.unit_start)
        limit = min(limit, max(1, (IOV_MAX - 1) // rows) * int(sizes.max()))
        slices = [
            _Slice(
                1 + units[first][0] * pieces,
                1 + units[stop - 1][1] * pieces,
                int(sizes[first:stop].sum()),
                header + int(part.offset[part.unit_start[first]]),
                first,
                stop,
            )
            for first, stop in part.slices(limit)
        ]
        first = slices[0]
        if first.offset == header:  # the header rides along with the first read
            slices[0] = first._replace(row_start=0, nbytes=first.nbytes + header, offset=0)
        else:
            slices.insert(0, _Slice(0, 1, header, 0, 0, 0))
        return slices

    def batch(self) -> Batch:
        """What :func:`vua.native.load` has to know to read files by this plan."""
        edges = [start for start, _ in self.units] + [len(self._runs)]
        return Batch(
            file_nbytes=self.codec.file_nbytes,
            header_nbytes=self.codec.header_nbytes,
            table_offset=self.codec.table_offset,
            slices=self.slices,
            unit_row=1 + np.array(edges, dtype=np.uint64) * np.uint64(self.pieces),
            unit_place=self.part.unit_index.astype(np.uint64),
        )

    def iovecs(self, chunks: range, headers: npt.NDArray[np.uint8]) -> Iovecs:
        """Iovecs ``[chunks, 1 + runs * pieces, 2]``; row 0 is the chunk's row of ``headers``."""
        table = np.empty((len(chunks), 1 + len(self._runs) * self.pieces, 2), dtype=np.uint64)
        table[:, 0, 0] = headers.ctypes.data + np.arange(len(chunks)) * headers.strides[0]
        table[:, 0, 1] = self.codec.header_nbytes
        offsets = self.part.piece_offsets(self.memory, chunks)
        table[:, 1:] = self.part.iovecs(self._runs, offsets)
        return table

    def windows(self, chunks: range) -> list[list[list[memoryview]]]:
        """Windows ``[chunk][space][piece]`` for :meth:`checksums`."""
        return self.views.windows(self.part.piece_offsets(self.memory, chunks))

    def checksums(
        self,
        windows: list[list[memoryview]],
        first: int,
        stop: int,
        new: Callable[[], Digest] = xxhash.xxh3_64,
    ) -> list[int]:
        """Return the xxh3-64 of units [first, stop) of the chunk that ``windows`` belong to.

        Or what else ``new``, called for each unit in order, makes of its bytes.
        """
        return self.views.checksums(windows, self.units[first:stop], new)


class _Views:
    """Cuts runs out of memory as views, cheaply: a run lies in every piece's window alike."""

    def __init__(self, part: Part, runs: Iovecs, memory: MemoryMap) -> None:
        spaces = len(memory.base) + 1
        pieces = np.uint64(part.layout.chunk_tokens // memory.piece_tokens)
        nbytes = part.nbytes.astype(np.uint64) // pieces
        self._low = [0] * spaces
        self._reach = [0] * spaces
        starts = runs.copy()
        for space in range(spaces):
            mine = part.space == space
            if mine.any():
                self._low[space] = int(runs[mine].min())
                starts[mine] -= np.uint64(self._low[space])
                self._reach[space] = int((starts[mine] + nbytes[mine]).max())
        self._slices = list(map(slice, starts.tolist(), (starts + nbytes).tolist()))
        self._space: list[int] = part.space.tolist()
        low, high = (f.reduceat(part.space, part.unit_start) for f in (np.minimum, np.maximum))
        self._mixed = frozenset(part.unit_start[low != high].tolist())
        joined = starts[1:] == starts[:-1] + nbytes[:-1]
        self._runs_at_once = 1
        """Runs that one view covers: more than one where they follow each other in memory."""
        if pieces == 1 and not self._mixed:
            inside = np.ones(len(starts), dtype=bool)
            inside[part.unit_start] = False
            if bool(joined[inside[1:]].all()):
                self._runs_at_once = max(1, _VIEW_NBYTES // int(nbytes.max()))

    def windows(self, offsets: Iovecs) -> list[list[list[memoryview]]]:
        """Return ``[chunk][space][piece]``; only the runs in a window may be touched."""
        chunks = []
        for chunk in offsets.transpose(1, 0, 2).tolist():
            spaces = zip(self._low, self._reach, chunk, strict=True)
            chunks.append(
                [
                    [_linux.memory_at(low + offset, reach) for offset in pieces] if reach else []
                    for low, reach, pieces in spaces
                ]
            )
        return chunks

    def checksums(
        self,
        windows: list[list[memoryview]],
        units: Sequence[tuple[int, int]],
        new: Callable[[], Digest],
    ) -> list[int]:
        """Return the digest of each unit, given as runs [start, stop). The hot loop of a load."""
        slices, spaces, sums = self._slices, self._space, []
        for start, stop in units:
            digest = new()
            pieces = windows[spaces[start]]
            if self._runs_at_once > 1:
                for run in range(start, stop, self._runs_at_once):
                    last = min(run + self._runs_at_once, stop) - 1
                    digest.update(pieces[0][slices[run].start : slices[last].stop])
            elif len(pieces) == 1 and start not in self._mixed:
                _consume(map(digest.update, map(pieces[0].__getitem__, slices[start:stop])))
            else:
                update = digest.update
                for run in range(start, stop):
                    part = slices[run]
                    for window in windows[spaces[run]]:
                        update(window[part])
            sums.append(digest.intdigest())
        return sums


_consume = deque[object](maxlen=0).extend
