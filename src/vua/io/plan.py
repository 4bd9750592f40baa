"""Which bytes of an entry file belong where in memory: tables that Python, C, seals and GPUs share.

An *extent* is one head of one layer of K or V: a range of the file, and its location in memory,
possibly in several *segments* of equal length (the blocks of a paged cache). A *block* is what one
checksum of the file covers: one or more consecutive extents. A *read* is a range of the file that
one system call reads: whole blocks, and possibly the header before them.

Nothing here knows layouts or models; :mod:`vua.format.entry` computes the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

ARRAYS_MAX: Final = 2
"""Arrays of a chunk: K and V."""

EXTENT: Final = np.dtype(
    [("array", "u8"), ("head", "u8"), ("layer", "u8"), ("discard", "u8"), ("nbytes", "u8")]
)
"""One extent: its array (``ARRAYS_MAX`` if it is read only to be verified), head and layer (counted
from the target's first), its place in each segment of the discard buffer, and the bytes of each of
its segments. `load.h` has the same."""

READ: Final = np.dtype(
    [("extent", "u8"), ("extent_stop", "u8"), ("header", "u8"), ("nbytes", "u8"),
     ("offset", "u8"), ("block", "u8"), ("block_stop", "u8")]
)  # fmt: skip
"""One read: extents [extent, extent_stop), 1 if it includes the header, its bytes and their offset
in the file, blocks [block, block_stop). `load.h` has the same."""


@dataclass(frozen=True, slots=True, eq=False)
class EntryPlan:
    """How files of one shard are read into, or written from, memory of one kind.

    Has no addresses.
    """

    file_nbytes: int
    """Size of each file; one of another size is damaged."""
    header_nbytes: int
    table_offset: int
    """Where in the header the checksums (u64, little-endian) begin."""
    reads: npt.NDArray[Any]
    """``[reads]`` of :data:`READ`, in file order."""
    extents: npt.NDArray[Any]
    """``[extents]`` of :data:`EXTENT`, in file order."""
    block_extent: npt.NDArray[np.uint64]
    """The first extent of each block, then the number of extents, ``[blocks + 1]``."""
    block_nbytes: npt.NDArray[np.uint64]
    """Bytes of each block, ``[blocks]``."""
    block_place: npt.NDArray[np.uint64]
    """Place of each block's checksum in the file's table, ``[blocks]``."""
    segments: int
    """Segments of each extent."""
    discard_nbytes: int
    """Memory for the extents that are read only to be verified, for all segments."""

    ranges: Sequence[tuple[int, int]] = field(init=False, repr=False)
    """What is read of each file, header included: (offset, nbytes), adjacent ones joined."""
    tables: tuple[int, ...] = field(init=False, repr=False)
    """The plan as ``struct batch`` of `load.h`: sizes, counts and addresses."""

    def __post_init__(self) -> None:
        tables = (
            *(self.file_nbytes, self.header_nbytes, self.table_offset),
            *(self.reads.ctypes.data, len(self.reads), self.extents.ctypes.data),
            *(self.block_nbytes.ctypes.data, self.block_place.ctypes.data, self.blocks),
            *(self.segments, self.discard_nbytes),
        )
        object.__setattr__(self, "tables", tables)
        ranges: list[tuple[int, int]] = []
        for offset, nbytes in self.reads[["offset", "nbytes"]].tolist():
            joins = bool(ranges) and sum(ranges[-1]) == offset
            first, before = ranges.pop() if joins else (offset, 0)
            ranges.append((first, before + nbytes))
        object.__setattr__(self, "ranges", ranges)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.block_nbytes)


def header_plan(file_nbytes: int, header_nbytes: int, table_offset: int = 0) -> EntryPlan:
    """Plan how only the first ``header_nbytes`` bytes of files are moved.

    Args:
        file_nbytes: size of each file.
        header_nbytes: of them, from the first on.
        table_offset: where among them the checksums begin.
    """
    none = np.zeros(0, dtype=np.uint64)
    return EntryPlan(
        file_nbytes=file_nbytes,
        header_nbytes=header_nbytes,
        table_offset=table_offset,
        reads=np.array([(0, 0, 1, header_nbytes, 0, 0, 0)], dtype=READ),
        extents=np.zeros(0, dtype=EXTENT),
        block_extent=np.zeros(1, dtype=np.uint64),
        block_nbytes=none,
        block_place=none,
        segments=1,
        discard_nbytes=0,
    )
