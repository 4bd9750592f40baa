"""A plan and its memory: as the C functions take them, and as views for seals and the fallback."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from vua.errors import LayoutError
from vua.io.files import Uids
from vua.io.memory import ARRAYS_MAX, EntryPlan, memory_at
from vua.io.posix import page_aligned
from vua.native.bindings import xxh3

NOWHERE: Final = (1 << 64) - 1
"""Offset of an unwanted segment of spread memory: it is hashed, but not copied."""
KINDS: Final = 0x80
"""Marks a byte of :attr:`HeaderForm.variable` that stands for kinds of bytes."""
FAILED, PRESENT, WRITTEN = 0, 1, 2
"""Outcome per file: not written or not tried; existed before; written now."""


class Cuts(NamedTuple):
    """Where the parts of checksum blocks lie, without a segment's offset."""

    windows: dict[int, tuple[int, int]]
    """By array the first address and the bytes of all parts."""
    blocks: list[list[tuple[int, slice]]]
    """Per block the array of each part, and which of these bytes it is."""
    parts: npt.NDArray[np.uint64]
    """The parts of all blocks: array, address and bytes, ``[parts, 3]``."""
    edges: list[int]
    """The first row of each block in :func:`rows_of`, and the end."""


class Headers(ctypes.Structure):
    """Memory for what is read of files beside K and V: one row per file.

    The fields are `load.h`'s ``struct tables``.
    """

    _fields_ = (
        ("header_rows", ctypes.c_void_p),
        ("digest_rows", ctypes.c_void_p),
        ("inode_rows", ctypes.c_void_p),
        ("discard_rows", ctypes.c_void_p),
    )

    def __init__(
        self,
        plan: EntryPlan,
        files: int,
        *,
        keep_discarded: bool = False,
        headers: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        """Allocate memory for ``files`` files; with ``keep_discarded`` also for discarded extents.

        ``headers``: page aligned memory, ``[files * header_nbytes]``; by default it is allocated.
        """
        nbytes = plan.header_nbytes
        headers = page_aligned(files * nbytes) if headers is None else headers
        self.headers = headers.reshape(files, nbytes)
        """``[files, header_nbytes]``, without gaps."""
        self.digests = np.zeros((files, plan.blocks), dtype=np.uint64)
        """The xxh3-64 of each block, ``[files, blocks]``."""
        self.inodes = np.zeros((files, 2), dtype=np.uint64)
        """Device and inode, ``[files, 2]``; zeros until a file is open."""
        self.form: HeaderForm | None = None
        """What the headers of plain files must be, a middle for each path."""
        self.judged = np.zeros(files, dtype=np.bool_)
        """Whether C has compared header and digests with that, ``[files]``."""
        self.discard: npt.NDArray[np.uint8] | None = None
        """What is read only to be verified, ``[files, discard_nbytes]``; None if not wanted."""
        if keep_discarded:
            self.discard = np.empty((files, plan.discard_nbytes), dtype=np.uint8)
        tables = (self.headers, self.digests, self.inodes, self.discard)
        super().__init__(*(None if table is None else table.ctypes.data for table in tables))

    def clear(self, files: int) -> None:
        """Zero the first rows, so that no earlier result can pass for a new one."""
        self.digests[:files] = 0
        self.inodes[:files] = 0
        self.judged[:files] = False

    def version(self, file: int) -> bytes | None:
        """Return bytes that tell an opened file from any other of its name; None if unknown."""
        inode = self.inodes[file]
        return inode.tobytes() if inode[1] else None


class HeaderForm(ctypes.Structure):
    """What the headers of some files must be, byte for byte. Immutable.

    A header is ``start``, the file's own middle, the variable part, ``end`` and the checksums. It
    hashes to the self-check in its variable part. The fields are `load.h`'s ``struct form``.
    """

    _fields_ = (
        ("start", ctypes.c_char_p),
        ("middles", ctypes.c_char_p),
        ("end", ctypes.c_char_p),
        ("variable", ctypes.c_char_p),
        ("kinds", ctypes.c_char_p),
        ("start_nbytes", ctypes.c_uint64),
        ("middle_nbytes", ctypes.c_uint64),
        ("end_nbytes", ctypes.c_uint64),
        ("variable_nbytes", ctypes.c_uint64),
        ("check_offset", ctypes.c_uint64),
    )

    def __init__(
        self,
        start: bytes,
        middles: Sequence[str],
        end: bytes,
        *,
        variable: bytes,
        kinds: bytes,
        check_offset: int,
    ) -> None:
        """Describe the headers of ``len(middles)`` files.

        Args:
            middles: what follows in each file, of equal length.
            end: what follows the variable part, up to the checksums.
            variable: each byte of the variable part, or :data:`KINDS` and the bits of some kinds.
            kinds: ``[256]``, the bits of the kinds that a byte is of.
        """
        text = "".join(middles).encode()
        sizes = len(start), len(text) // len(middles), len(end), len(variable)
        super().__init__(start, text, end, variable, kinds, *sizes, check_offset)


class Spread(ctypes.Structure):
    """How elements lie in memory whose tokens are not contiguous rows: an engine's own pages.

    Such memory can only be read into, by :func:`vua.native.read_entries`. Immutable.
    """

    _fields_ = (
        ("item", ctypes.c_uint64),
        ("dims", ctypes.c_uint64 * ARRAYS_MAX),
        ("token", ctypes.c_uint64 * ARRAYS_MAX),
        ("dim", ctypes.c_uint64 * ARRAYS_MAX),
    )

    def __init__(self, item: int, arrays: Sequence[tuple[int, int, int]]) -> None:
        """Describe elements of ``item`` bytes (1, 2, 4 or 8).

        ``arrays``: for K, and V, elements per token, and bytes from one token and one element to
        the next.
        """
        super().__init__(item)
        for array, (dims, token, dim) in enumerate(arrays):
            self.dims[array], self.token[array], self.dim[array] = dims, token, dim


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """Where the tokens of one shard lie in memory, as segments of whole tokens.

    Token ``t`` of head ``h`` of layer ``l`` of array ``a`` (0: K, 1: V) lies at ``base[a][l] + h *
    head_stride[a] + segment_offset[a][t // segment_tokens]`` plus its offset inside the segment,
    where tokens follow each other without gaps. A dense tensor is one segment per chunk, a paged
    cache one segment per cache block. Layers and heads count from the start of the shard.

    With ``spread`` a token's elements are not contiguous: it gives the distance between them. Such
    a map can only be loaded into; an unwanted segment has the offset :data:`NOWHERE`.

    With ``cached`` only files that a local page cache holds are read into it: nothing waits.
    """

    base: tuple[npt.NDArray[np.uint64], ...]
    """Per array: addresses of head 0, one per layer, ``[layers]``."""
    head_stride: tuple[int, ...]
    """Per array: bytes from one head to the next."""
    segment_offset: tuple[npt.NDArray[np.uint64], ...]
    """Per array: byte offset of each segment, ``[segments]``."""
    segment_tokens: int
    """Tokens per segment; divides the chunk length."""
    owner: object
    """Keeps the memory alive."""
    spread: Spread | None = None
    cached: bool = False

    def chunks(self, chunk_tokens: int) -> int:
        """Return how many whole chunks of so many tokens the map has space for."""
        return len(self.segment_offset[0]) * self.segment_tokens // chunk_tokens


class Transfer(ctypes.Structure):
    """Moves between files of one plan and one memory, for any number of chunks. Immutable.

    The first fields are `load.h`'s ``struct batch``.
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

    def __init__(self, plan: EntryPlan, memory: MemoryMap | None = None) -> None:
        """Use ``plan``, which is made for segments of ``memory``; None: of headers alone."""
        memory = memory or MemoryMap((), (), (), 1, None)
        self.plan, self.memory, self.spread = plan, memory, memory.spread
        self.bases = [np.ascontiguousarray(array, dtype=np.uint64) for array in memory.base]
        self.offsets = [
            np.ascontiguousarray(array, dtype=np.uint64) for array in memory.segment_offset
        ]
        self.cuts: Cuts | None = None
        """What :func:`blocks_of` computes once per transfer."""
        self.rows: tuple[range, npt.NDArray[np.uint64]] | None = None
        """What :func:`rows_of` has computed, and of which chunks."""
        super().__init__(*(xxh3 or (0, 0, 0)), *plan.tables)
        arrays = zip(self.bases, memory.head_stride, self.offsets, strict=True)
        for array, (first, stride, offset) in enumerate(arrays):
            self.base[array] = first.ctypes.data
            self.head_stride[array] = stride
            self.segment_offset[array] = offset.ctypes.data
        self.spread_at = None if self.spread is None else ctypes.addressof(self.spread)


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
        """Describe the writes.

        Args:
            file_name: name of each file in its chunk's directory.
            temporary: prefix of the name until the file is complete; unique to this call.
            check_offset: offset of the header's self-check; 0: headers are complete.
            allocate_nbytes: files of this size and more get their disk space first.
            uids: owners whose files count as present; None: all.
        """
        self.uids, self.durable = uids, durable
        whose = (None, 0) if uids is None else (ctypes.addressof(uids), len(uids))
        super().__init__(
            *(file_name.encode(), temporary.encode(), check_offset, allocate_nbytes),
            *(directory_mode, file_mode, *whose),
        )


_DISCARDED: Final = ARRAYS_MAX
_ROWS_AT_ONCE: Final = 1 << 14
"""256 KiB of rows."""


def blocks_of(transfer: Transfer, place: int, discard: int = 0) -> Iterator[list[memoryview]]:
    """Yield the bytes of each checksum block of a chunk, in parts, to be read or written.

    Raises LayoutError for spread memory: it has no rows.
    """
    if transfer.spread is not None:
        raise LayoutError("elements that lie apart are no rows")
    plan, segments = transfer.plan, transfer.plan.segments
    cuts = cuts_of(transfer)
    cut, step = slice(place * segments, (place + 1) * segments), plan.discard_nbytes // segments
    offsets = {array: offset[cut].tolist() for array, offset in enumerate(transfer.offsets)}
    offsets[_DISCARDED] = [discard + segment * step for segment in range(segments)]
    views = {  # only what the extents are is touched
        array: [memory_at(at + low, nbytes) for at in offsets[array]]
        for array, (low, nbytes) in cuts.windows.items()
    }
    for block in cuts.blocks:
        yield [view[cut] for array, cut in block for view in views[array]]


def rows_of(transfer: Transfer, place: int, discard: int = 0) -> npt.NDArray[np.uint64]:
    """Return the address and length of each part of :func:`blocks_of`, ``[1 + n, 2]``.

    The first row is free for a header. Computed for many chunks at once: alone that takes as long
    as reading a small one. Two threads may not use the same ``place``.
    """
    plan, segments, cuts = transfer.plan, transfer.plan.segments, cuts_of(transfer)
    places, rows = transfer.rows or (range(0), None)  # race: another thread may replace both
    if rows is None or place not in places or plan.discard_nbytes:
        stop = len(transfer.offsets[0]) // segments if transfer.offsets else place + 1
        most = 1 if plan.discard_nbytes else max(1, _ROWS_AT_ONCE // cuts.edges[-1])
        places = range(place, min(stop, place + most))
        at = np.zeros((ARRAYS_MAX + 1, len(places), segments), dtype=np.uint64)
        for array, offset in enumerate(transfer.offsets):
            cut = offset[places.start * segments : places.stop * segments]
            at[array] = cut.reshape(len(places), segments)
        at[_DISCARDED] = discard + np.arange(segments) * (plan.discard_nbytes // segments)
        rows = np.empty((len(places), cuts.edges[-1], 2), dtype=np.uint64)
        parts = rows[:, 1:].reshape(len(places), -1, segments, 2)
        of_parts = at[cuts.parts[:, 0].astype(np.intp)].swapaxes(0, 1)
        parts[..., 0] = cuts.parts[:, 1, None] + of_parts
        parts[..., 1] = cuts.parts[:, 2, None]
        transfer.rows = places, rows
    found: npt.NDArray[np.uint64] = rows[place - places.start]
    return found


def cuts_of(transfer: Transfer) -> Cuts:
    """Return where a transfer's blocks lie; computed once."""
    if transfer.cuts is None:  # two threads may compute it; a lock would not survive a fork
        transfer.cuts = _cuts(transfer)
    return transfer.cuts


def _cuts(transfer: Transfer) -> Cuts:
    plan, extents = transfer.plan, transfer.plan.extents
    starts = extents["discard"].copy()
    for array, bases in enumerate(transfer.bases):
        mine = extents["array"] == array
        heads = extents["head"][mine] * np.uint64(transfer.memory.head_stride[array])
        starts[mine] = bases[extents["layer"][mine]] + heads
    windows = {}
    for array in set(extents["array"].tolist()):
        mine = extents["array"] == array
        low = starts[mine].min()
        windows[array] = int(low), int((starts + extents["nbytes"])[mine].max() - low)
        starts[mine] -= low
    columns = (extents["array"].tolist(), starts.tolist(), extents["nbytes"].tolist())
    parts = list(zip(*columns, strict=True))
    edges = pairwise(plan.block_extent.tolist())
    blocks = [_joined(parts[at:stop], plan.segments) for at, stop in edges]
    flat = [
        (array, windows[array][0] + cut.start, cut.stop - cut.start)
        for array, cut in chain.from_iterable(blocks)
    ]
    counts = accumulate((plan.segments * len(block) for block in blocks), initial=1)
    return Cuts(windows, blocks, np.array(flat, np.uint64).reshape(-1, 3), [*counts])


def _joined(parts: list[tuple[int, int, int]], segments: int) -> list[tuple[int, slice]]:
    joined: list[tuple[int, slice]] = []
    for array, start, nbytes in parts:
        begin = start
        if segments == 1 and joined and joined[-1][0] == array and joined[-1][1].stop == start:
            begin = joined.pop()[1].start
        joined.append((array, slice(begin, start + nbytes)))
    return joined
