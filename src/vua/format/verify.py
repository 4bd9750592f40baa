"""Whether an entry's payload is what its header says: one judgement for everybody who reads one.

The header itself is judged by :meth:`vua.format.entry.EntryCodec.check_header` where the chunk is
known, and by :func:`vua.format.entry.parse_entry` where it is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vua.errors import CorruptEntryError
from vua.format.layout import KVLayout, Shard

__all__ = ["check_payload"]


def check_payload(
    layout: KVLayout,
    shard: Shard,
    expected: npt.NDArray[np.uint64] | Sequence[int],
    found: npt.NDArray[np.uint64] | Sequence[int],
    blocks: npt.NDArray[np.uint64] | None = None,
    *,
    what: str = "checksums",
) -> None:
    """Compare what the header says of blocks with what was found.

    Args:
        layout: of the entry.
        shard: of the entry.
        expected: what the header says of each block.
        found: what its bytes gave.
        blocks: which blocks of the entry these are; by default all, in order.
        what: what is compared.

    Raises CorruptEntryError, which names the first block that differs.
    """
    bad = np.flatnonzero(np.asarray(expected) != np.asarray(found))
    if len(bad):
        first = int(bad[0] if blocks is None else blocks[bad[0]])
        msg = f"{len(bad)} of {len(found)} {what} do not match, the first is that of "
        raise CorruptEntryError(msg + _block_name(layout, shard, first))


def _block_name(layout: KVLayout, shard: Shard, block: int) -> str:
    """Which part of the model's KV cache a checksum stands for."""
    step = layout.unit_layers
    row, column = divmod(block, shard.units(layout))
    array, head = divmod(row, shard.heads)
    layer = shard.layer_start + column * step
    stop = min(layer + step, shard.layer_stop)
    return f"{'KV'[array]}, head {shard.head_start + head}, layers {layer}-{stop}"
