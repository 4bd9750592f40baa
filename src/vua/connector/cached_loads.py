"""Loads of files that the page cache has, straight into an engine's blocks in CPU memory.

A short cut of `vua.connector.group_transfer`, which judges nothing: what is not warm, sealed, in a
bucket or not in order is left to the way through a buffer. See docs/decisions/0006-native-loops.md.
"""

from __future__ import annotations

from typing import Final

from vua.connector.metadata import GroupLoad, LoadOrder
from vua.device.cpu_pages import PagedKV
from vua.format.keys import Keys
from vua.format.layout import MemoryMap, Shard
from vua.store.store import Loader, Store

__all__ = ["CachedLoads"]

_NBYTES: Final = 64 << 20
"""What is read at a time: some milliseconds, in which no load is given up."""
_CHUNKS: Final = 256


class CachedLoads:
    """Loads into the blocks of one group's layers. One thread at a time."""

    def __init__(
        self, store: Store, shard: Shard, pages: PagedKV, memory: MemoryMap, table: int
    ) -> None:
        """Load ``shard`` into the blocks of ``table``; :meth:`of` calls this."""
        self._pages, self._memory, self._table = pages, memory, table
        self._chunks = memory.chunks(store.layout)
        self.loader = Loader(store, memory, target=shard)
        """What loads the keys that :meth:`aim` returns; of the bytes that it copies all have the
        checksums of their file's header, and some may be of a file that is another chunk's."""

    @classmethod
    def of(cls, store: Store, shard: Shard, pages: PagedKV, table: int) -> CachedLoads | None:
        """Return what loads a store's files; None: there are no files, or C cannot write there."""
        chunks = max(1, min(_CHUNKS, _NBYTES // shard.payload_nbytes(store.layout)))
        memory = pages.memory(store.layout.chunk_tokens, chunks)
        if memory is None or store.files is None:
            return None
        return cls(store, shard, pages, memory, table)

    def aim(self, part: GroupLoad, at: int, order: LoadOrder) -> Keys:
        """Aim at the blocks of chunks from the part's number ``at`` on; return their keys.

        None where C cannot write there.
        """
        keys = part.keys[at : at + self._chunks]
        start, stop = max(keys[0].start, part.start), min(keys[-1].stop, part.stop)
        where = (order.block_ids[self._table], start, stop - start, start - keys[0].start)
        return keys if self._pages.aim(self._memory, *where) else keys[:0]
