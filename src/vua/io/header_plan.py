"""How files are moved of which only the header is wanted, or all of which counts as one."""

from __future__ import annotations

import numpy as np

from vua.io.plan import EXTENT, READ, EntryPlan

__all__ = ["header_plan"]


def header_plan(file_nbytes: int, header_nbytes: int, table_offset: int = 0) -> EntryPlan:
    """Plan how the first ``header_nbytes`` bytes of files are moved, and nothing else.

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
