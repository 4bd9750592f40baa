"""A plan and the memory it is for, as C wants them and as Python does; and the hash of blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from vua.errors import LayoutError
from vua.io import posix
from vua.io.plain import Uids
from vua.io.plan import ARRAYS_MAX, EntryPlan
from vua.io.posix import Iovecs
from vua.native.bindings import xxh3

__all__ = [
    "FAILED",
    "NOWHERE",
    "PRESENT",
    "WRITTEN",
    "Digest",
    "Headers",
    "Spread",
    "Transfer",
    "WriteOptions",
    "digests_of",
    "fill_check",
]

CHECK_DIGITS: Final = 16
NOWHERE: Final = (1 << 64) - 1
"""Of spread memory the offset of a segment that is not wanted: it is hashed, and not copied."""
FAILED, PRESENT, WRITTEN = 0, 1, 2
"""What became of a file: it could not be written, or not be tried; was there before; is there."""


_KEPT_ROWS: Final = 1 << 14
"""Addresses that a transfer keeps for Python, which takes as long to work them out as to read."""


class Digest(Protocol):
    """What the bytes of one block are fed to: a hash, or one block's seal."""

    def update(self, view: memoryview, /) -> object:
        """Take the next bytes."""
        ...

    def intdigest(self) -> int:
        """Return the result as a number."""
        ...


class Read(NamedTuple):
    """What one system call reads of a file."""

    rows: Iovecs
    """Where the bytes go, ``[n, 2]``."""
    nbytes: int
    offset: int
    """Of the first of them in the file."""
    blocks: Sequence[Sequence[memoryview]]
    """The checksum blocks that they are, in parts; the header before them is none."""


class Headers(ctypes.Structure):
    """Memory for what is read of files beside their K and V: a row for each of up to some files.

    The fields are `load.h`'s ``struct tables``.
    """

    _fields_ = (
        ("header_rows", ctypes.c_void_p),
        ("digest_rows", ctypes.c_void_p),
        ("inode_rows", ctypes.c_void_p),
        ("discard_rows", ctypes.c_void_p),
    )

    def __init__(self, plan: EntryPlan, files: int, *, keep_discarded: bool = False) -> None:
        """Take memory for ``files`` files, with ``keep_discarded`` for what is discarded, too."""
        nbytes = plan.header_nbytes
        self.headers = posix.page_aligned(files * nbytes).reshape(files, nbytes)
        """``[files, header_nbytes]``, without gaps."""
        self.digests = np.zeros((files, plan.blocks), dtype=np.uint64)
        """The xxh3-64 of each block, ``[files, blocks]``."""
        self.inodes = np.zeros((files, 2), dtype=np.uint64)
        """Device and inode, ``[files, 2]``; zeros until a file is open."""
        self.discard: npt.NDArray[np.uint8] | None = None
        """What is read only to be verified, ``[files, discard_nbytes]``; None: nobody looks."""
        if keep_discarded:
            self.discard = np.empty((files, plan.discard_nbytes), dtype=np.uint8)
        tables = (self.headers, self.digests, self.inodes, self.discard)
        super().__init__(*(None if table is None else table.ctypes.data for table in tables))

    def clear(self, files: int) -> None:
        """Forget what was found of the first files, so that nothing of it can pass for new."""
        self.digests[:files] = 0
        self.inodes[:files] = 0

    def version(self, file: int) -> bytes | None:
        """Return what tells an opened file from any other that ever has its name, else None."""
        inode = self.inodes[file]
        return inode.tobytes() if inode[1] else None


class Spread(ctypes.Structure):
    """How elements lie in memory whose tokens are no rows without gaps: an engine's own pages.

    Such memory is only read into, by :func:`vua.native.read_entries`. Immutable.
    """

    _fields_ = (
        ("item", ctypes.c_uint64),
        ("dims", ctypes.c_uint64 * ARRAYS_MAX),
        ("token", ctypes.c_uint64 * ARRAYS_MAX),
        ("dim", ctypes.c_uint64 * ARRAYS_MAX),
    )

    def __init__(self, item: int, arrays: Sequence[tuple[int, int, int]]) -> None:
        """Describe elements of ``item`` bytes (1, 2, 4 or 8).

        ``arrays``: for K, and V, elements of a token, and bytes from one token and one element to
        the next.
        """
        super().__init__(item)
        for array, (dims, token, dim) in enumerate(arrays):
            self.dims[array], self.token[array], self.dim[array] = dims, token, dim


class Transfer(ctypes.Structure):
    """Between files of one plan and one memory, for any number of chunks. Immutable.

    Token ``t`` of head ``h`` of layer ``l`` of array ``a`` lies at ``base[a][l] + h *
    head_stride[a] + segment_offset[a][s]``, where ``s`` is the segment that ``t`` is in, plus its
    place inside the segment. The first fields are `load.h`'s ``struct transfer``.
    """

    _fields_ = (
        ("reset", ctypes.c_void_p),
        ("update", ctypes.c_void_p),
        ("digest", ctypes.c_void_p),
        ("file_nbytes", ctypes.c_uint64),
        ("header_nbytes", ctypes.c_uint64),
        ("table_offset", ctypes.c_uint64),
        ("reads", ctypes.c_void_p),
        ("read_count", ctypes.c_uint64),
        ("extents", ctypes.c_void_p),
        ("block_nbytes", ctypes.c_void_p),
        ("block_place", ctypes.c_void_p),
        ("block_count", ctypes.c_uint64),
        ("segments", ctypes.c_uint64),
        ("discard_nbytes", ctypes.c_uint64),
        ("base", ctypes.c_void_p * ARRAYS_MAX),
        ("head_stride", ctypes.c_uint64 * ARRAYS_MAX),
        ("segment_offset", ctypes.c_void_p * ARRAYS_MAX),
        ("spread_at", ctypes.c_void_p),
    )

    def __init__(
        self,
        plan: EntryPlan,
        base: Sequence[npt.NDArray[np.uint64]],
        head_stride: Sequence[int],
        segment_offset: Sequence[npt.NDArray[np.uint64]],
        owner: object = None,
        spread: Spread | None = None,
    ) -> None:
        """Use ``plan`` for memory.

        Args:
            plan: made for segments of this length.
            base: per array, addresses of head 0 of each layer, ``[layers]``.
            head_stride: per array, bytes from one head to the next.
            segment_offset: per array, ``[segments of all chunk places]``, in bytes.
            owner: whatever keeps the memory alive.
            spread: how elements lie apart; None: tokens are rows without gaps.
        """
        u64 = np.uint64
        self.plan, self.owner, self.spread = plan, owner, spread
        self._base = [np.ascontiguousarray(array, dtype=u64) for array in base]
        self._stride = list(head_stride)
        self._offset = [np.ascontiguousarray(array, dtype=u64) for array in segment_offset]
        self._starts: npt.NDArray[np.uint64] | None = None
        self._reads: dict[int, tuple[Iovecs, list[Read]]] = {}
        super().__init__(*(xxh3 or (0, 0, 0)), *plan.tables)
        memory = zip(self._base, self._stride, self._offset, strict=True)
        for array, (first, stride, offset) in enumerate(memory):
            self.base[array] = first.ctypes.data
            self.head_stride[array] = stride
            self.segment_offset[array] = offset.ctypes.data
        self.spread_at = None if spread is None else ctypes.addressof(spread)

    def _extent_starts(self) -> npt.NDArray[np.uint64]:
        """Return the addresses of extents, without their segments' offsets."""
        if self._starts is not None:
            return self._starts
        extents = self.plan.extents
        starts = extents["discard"].copy()
        for array, (base, stride) in enumerate(zip(self._base, self._stride, strict=True)):
            mine = extents["array"] == array
            heads = extents["head"][mine] * np.uint64(stride)
            starts[mine] = base[extents["layer"][mine]] + heads
        self._starts = starts  # two threads may both compute it; a lock would not survive a fork
        return starts

    def rows(self, place: int, discard: int = 0) -> Iovecs:
        """Return where a chunk's extents lie: ``[extents * segments, 2]``, in file order.

        Args:
            place: the chunk place in memory.
            discard: address of the discard buffer.

        Raises LayoutError for spread memory: it has no such rows.
        """
        plan = self.plan
        if self.spread is not None:
            raise LayoutError("elements that lie apart are no rows")
        segments, extents = plan.segments, plan.extents
        offsets = np.empty((ARRAYS_MAX + 1, segments), dtype=np.uint64)
        for array, offset in enumerate(self._offset):
            offsets[array] = offset[place * segments : (place + 1) * segments]
        step = plan.discard_nbytes // segments
        offsets[ARRAYS_MAX] = discard + np.arange(segments, dtype=np.uint64) * np.uint64(step)
        rows = np.empty((len(extents), segments, 2), dtype=np.uint64)
        rows[..., 0] = self._extent_starts()[:, None] + offsets[extents["array"].astype(np.intp)]
        rows[..., 1] = extents["nbytes"][:, None]
        return rows.reshape(-1, 2)

    def reads_of(self, place: int, into: Headers, file: int) -> Iterator[Read]:
        """Yield what is to be read of a file, for Python; for one thread at a time.

        Args:
            place: the chunk place in memory.
            into: memory for the header, and for what is discarded.
            file: the row of it.
        """
        plan, kept = self.plan, self._reads.get(place)
        if kept is None:
            discard = np.empty(plan.discard_nbytes, np.uint8)
            if into.discard is not None:
                discard = into.discard[file]
            payload = self.rows(place, discard.ctypes.data)
            rows = np.concatenate([np.array([[0, plan.header_nbytes]], np.uint64), payload])
            blocks, reads = list(self.blocks(payload)), []
            for extent, extent_stop, header, nbytes, offset, block, stop in plan.reads.tolist():
                first = 0 if header else 1 + extent * plan.segments
                part = rows[first : 1 + extent_stop * plan.segments]
                reads.append(Read(part, nbytes, offset, blocks[block:stop]))
            kept = (rows, reads)
            if not plan.discard_nbytes:
                if len(self._reads) * len(rows) > _KEPT_ROWS:
                    self._reads.clear()
                self._reads[place] = kept
        kept[0][0, 0] = into.headers[file].ctypes.data
        yield from kept[1]

    def blocks(self, rows: Iovecs) -> Iterator[list[memoryview]]:
        """Yield the bytes of each checksum block, piece by piece.

        Args:
            rows: what :meth:`rows` returned; its memory may be read and written.
        """
        if not len(rows):
            return
        low, stops = int(rows[:, 0].min()), rows.sum(axis=1)
        view = posix.memory_at(low, int(stops.max()) - low)  # only what rows name is touched
        starts = rows[:, 0] - np.uint64(low)
        pieces = list(map(slice, starts.tolist(), (stops - np.uint64(low)).tolist()))
        edges = self.plan.block_extent * np.uint64(self.plan.segments)
        for first, stop in pairwise(edges.tolist()):
            yield [view[piece] for piece in pieces[first:stop]]


def digests_of(blocks: Iterable[Iterable[memoryview]]) -> list[int]:
    """Return the xxh3-64 of each block: the only place where Python hashes K and V."""
    digests = []
    for block in blocks:
        digest = xxhash.xxh3_64()
        for piece in block:
            digest.update(piece)
        digests.append(digest.intdigest())
    return digests


def fill_check(header: npt.NDArray[np.uint8], check_offset: int) -> None:
    """Complete a header by its check of itself: taken with zeros for the check's own digits."""
    check = header[check_offset : check_offset + CHECK_DIGITS]
    check[:] = ord("0")
    digits = xxhash.xxh3_64_hexdigest(header.data).encode()
    check[:] = np.frombuffer(digits, dtype=np.uint8)


class WriteOptions(ctypes.Structure):
    """How files are written, as `save.c` wants it. Immutable."""

    _fields_ = (
        ("file_name", ctypes.c_char_p),
        ("temporary", ctypes.c_char_p),
        ("check_offset", ctypes.c_uint64),
        ("allocate_nbytes", ctypes.c_uint64),
        ("directory_mode", ctypes.c_uint64),
        ("file_mode", ctypes.c_uint64),
        ("uid_table", ctypes.c_void_p),
        ("uid_count", ctypes.c_uint64),
    )

    def __init__(
        self,
        file_name: str,
        temporary: str,
        *,
        check_offset: int,
        allocate_nbytes: int,
        directory_mode: int,
        file_mode: int,
        uids: Uids | None,
        durable: bool = False,
    ) -> None:
        """Describe it.

        Args:
            file_name: of a file in its chunk's directory.
            temporary: what its name begins with until it is complete; no other call uses it.
            check_offset: where in the header its check of itself stands; 0: headers are complete.
            allocate_nbytes: files of so many bytes and more get their room on the disk first.
            directory_mode: of directories that are made.
            file_mode: of files.
            uids: whose files count as present; None: anybody's.
            durable: fsync each file, and the directories that lead to it.
        """
        self.uids, self.durable = uids, durable
        whose = (None, 0) if uids is None else (ctypes.addressof(uids), len(uids))
        super().__init__(
            *(file_name.encode(), temporary.encode(), check_offset, allocate_nbytes),
            *(directory_mode, file_mode, *whose),
        )
