"""What is the matter with an entry that is not the one asked for, or not what its header says.

For all who read one. :meth:`vua.format.entry.EntryCodec.table_of` tells whether it is the one asked
for; where the chunk is not known, :func:`vua.format.parse.parse_entry` judges the header.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vua.errors import CorruptEntryError, EntryError, ForeignEntryError
from vua.format.entry import EntryCodec
from vua.format.keys import ChunkKey
from vua.format.layout import KVLayout, Shard
from vua.format.parse import parse_entry

__all__ = ["check_payload", "mismatch"]


def mismatch(codec: EntryCodec, header: memoryview, key: ChunkKey, key_id: str = "") -> EntryError:
    """Return why :meth:`EntryCodec.table_of`, which takes the same, does not take a header.

    A CorruptEntryError where it is damaged, a ForeignEntryError where it is sound, but of another
    chunk, shard, layout or namespace.
    """
    try:
        found = parse_entry(bytes(header))
    except CorruptEntryError as problem:
        return problem
    msg = (
        f"expected chunk {key.name[:12]} shard {codec.shard.name} of namespace "
        f"{codec.namespace[:12]}, found chunk {found.prefix_hash[:12]} shard "
        f"{found.shard.name} of namespace {found.namespace[:12]}; it will be treated as a miss"
    )
    foreign = ForeignEntryError(msg)
    asked = (codec.namespace, key.name, codec.shard, codec.kind, key_id)
    there = (found.namespace, found.prefix_hash, found.shard, found.kind, found.seal_info.key_id)
    foreign.misplaced = there != asked
    return foreign


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
    # as they are: numpy compares lists of numbers below and above 2**63 as floats of 53 bits
    bad = np.flatnonzero(np.asarray(expected, np.uint64) != np.asarray(found, np.uint64))
    if len(bad):
        first = int(bad[0] if blocks is None else blocks[bad[0]])
        msg = f"{len(bad)} of {len(found)} {what} do not match, the first is that of "
        raise CorruptEntryError(msg + _block_name(layout, shard, first))


def _block_name(layout: KVLayout, shard: Shard, block: int) -> str:
    """Which part of the model's KV cache a checksum stands for."""
    step = layout.checksum_block_layers
    row, column = divmod(block, shard.checksum_blocks(layout))
    array, head = divmod(row, shard.heads)
    layer = shard.layer_start + column * step
    stop = min(layer + step, shard.layer_stop)
    return f"{'KV'[array]}, head {shard.head_start + head}, layers {layer}-{stop}"
