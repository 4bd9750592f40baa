"""How one rectangle of a chunk moves between a file and memory: reads, and what they must hash to.

A :class:`Recipe` is worked out once per rectangle, a :class:`Plan` once per memory map, and both
are used for every chunk. In Python everything that a load does per run of bytes happens in
:meth:`Plan.checksums`; the rest is per file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from vua import native
from vua.format.entry import EntryCodec
from vua.format.layout import MemoryMap, Shard
from vua.format.part import Part
from vua.io import posix
from vua.io.posix import IOV_MAX, Iovecs

__all__ = ["Digest", "Plan", "Recipe"]

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
    """One read: runs [run, run_stop), nbytes at offset, units [first, stop)."""

    run: int
    run_stop: int
    header: int
    """1 where the header is read along, else 0."""
    nbytes: int
    offset: int
    first: int
    stop: int


class Recipe:
    """How one rectangle of any chunk moves between files of a shard and memory of one kind.

    What does not depend on addresses, so that memory that is used once costs little. Immutable.
    """

    def __init__(self, codec: EntryCodec, taken: Shard, target: Shard, piece_tokens: int) -> None:
        """Prepare for memory that holds ``target`` in pieces of ``piece_tokens`` tokens."""
        self.codec = codec
        self.part = part = Part(codec.layout, codec.shard, taken, target)
        self.pieces = codec.layout.chunk_tokens // piece_tokens
        self.nbytes = int(part.nbytes.sum())
        edges = [*part.unit_start.tolist(), len(part.nbytes)]
        self.units = list(pairwise(edges))
        """The runs [start, stop) of each unit."""
        self.slices = self._slices()
        self.table_index = None if part.whole else part.unit_index
        self.native = self._native()

    def _slices(self) -> list[_Slice]:
        header, part, units = self.codec.header_nbytes, self.part, self.units
        limit = SLICE_NBYTES if header + self.nbytes > _SMALL_NBYTES else _SMALL_NBYTES
        rows = max(stop - start for start, stop in units) * self.pieces
        sizes = np.add.reduceat(part.nbytes, part.unit_start)
        limit = min(limit, max(1, (IOV_MAX - 1) // rows) * int(sizes.max()))
        slices = [
            _Slice(
                units[first][0],
                units[stop - 1][1],
                0,
                int(sizes[first:stop].sum()),
                header + int(part.offset[part.unit_start[first]]),
                first,
                stop,
            )
            for first, stop in part.slices(limit)
        ]
        first = slices[0]
        if first.offset == header:  # the header rides along with the first read
            nbytes = first.nbytes + header
            slices[0] = first._replace(header=1, nbytes=nbytes, offset=0)
        else:
            slices.insert(0, _Slice(0, 0, 1, header, 0, 0, 0))
        return slices

    def _native(self) -> native.Recipe:
        part, arrays = self.part, len(self.codec.layout.dims)
        runs = np.empty((len(part.nbytes), 5), dtype=np.uint64)
        runs[:, 0] = np.where(part.space < arrays, part.space, native.ARRAYS_MAX)
        runs[:, 1], runs[:, 2] = part.head, part.layer
        runs[:, 3] = part.sink_place // np.uint64(self.pieces)
        runs[:, 4] = part.nbytes // self.pieces
        return native.Recipe(
            file_nbytes=self.codec.file_nbytes,
            header_nbytes=self.codec.header_nbytes,
            table_offset=self.codec.table_offset,
            slices=np.array(self.slices, dtype=np.uint64),
            runs=runs,
            unit_nbytes=np.add.reduceat(part.nbytes, part.unit_start).astype(np.uint64),
            unit_place=part.unit_index.astype(np.uint64),
            pieces=self.pieces,
            sink_nbytes=part.sink_nbytes,
        )


class Plan:
    """A recipe with the memory to use: how to move any chunk there and back. One thread at a time.

    What only the path in Python needs is worked out when it is first used.
    """

    def __init__(self, recipe: Recipe, memory: MemoryMap) -> None:
        """Use ``recipe`` for ``memory``, which has the pieces that it was made for."""
        self.recipe, self.codec, self.memory = recipe, recipe.codec, memory
        self.batch = native.Batch(
            recipe.native, memory.base, memory.head_stride, memory.piece_offset
        )
        """The same for :func:`vua.native.load`."""

    @cached_property
    def _sink(self) -> npt.NDArray[np.uint8]:
        return np.empty(self.recipe.part.sink_nbytes, dtype=np.uint8)

    @cached_property
    def _runs(self) -> Iovecs:
        return self.recipe.part.addresses(self.memory, self._sink.ctypes.data)

    @cached_property
    def _views(self) -> _Views:
        return _Views(self.recipe.part, self._runs, self.memory)

    def iovecs(self, chunks: range, headers: npt.NDArray[np.uint8]) -> Iovecs:
        """Iovecs ``[chunks, 1 + runs * pieces, 2]``; row 0 is the chunk's row of ``headers``."""
        part, pieces = self.recipe.part, self.recipe.pieces
        table = np.empty((len(chunks), 1 + len(self._runs) * pieces, 2), dtype=np.uint64)
        table[:, 0, 0] = headers.ctypes.data + np.arange(len(chunks)) * headers.strides[0]
        table[:, 0, 1] = self.codec.header_nbytes
        table[:, 1:] = part.iovecs(self._runs, part.piece_offsets(self.memory, chunks))
        return table

    def rows(self, cut: _Slice) -> range:
        """Which of a chunk's iovecs one read of :attr:`Recipe.slices` takes."""
        pieces = self.recipe.pieces
        return range(0 if cut.header else 1 + cut.run * pieces, 1 + cut.run_stop * pieces)

    def windows(self, chunks: range) -> list[list[list[memoryview]]]:
        """Windows ``[chunk][space][piece]`` for :meth:`checksums`."""
        return self._views.windows(self.recipe.part.piece_offsets(self.memory, chunks))

    def sums(self, place: int) -> npt.NDArray[np.uint64]:
        """Return the table of checksums of the chunk at ``place``, for a plan of whole files."""
        table = native.checksums(self.batch, place)
        if table is None:
            windows = self.windows(range(place, place + 1))[0]
            sums = self.checksums(windows, 0, len(self.recipe.units))
            table = np.array(sums, dtype=np.uint64)
        return table

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
        return self._views.checksums(windows, self.recipe.units[first:stop], new)


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
                    [posix.memory_at(low + offset, reach) for offset in pieces] if reach else []
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
