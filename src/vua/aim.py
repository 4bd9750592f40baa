"""Reads of many chunks by one plan: addresses are worked out for a batch and kept.

The files' headers are judged here, by `vua.entry`; what a bad file means is for `vua.store` to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from vua._linux import Iovecs
from vua.errors import CorruptEntryError, EntryError
from vua.keys import ChunkKey
from vua.layout import Shard
from vua.plan import Plan
from vua.storage import Reader, Storage

__all__ = ["Aim"]

_BATCH_CHUNKS: Final = 64


class Aim:
    """A plan with addresses worked out for the next batch of chunks. One thread at a time."""

    def __init__(self, plan: Plan) -> None:
        """Prepare to read by ``plan``."""
        self._plan = plan
        self._native = plan.batch()
        self._headers = np.empty((_BATCH_CHUNKS, plan.codec.header_nbytes), dtype=np.uint8)
        self._batch = range(0)
        self._iovecs: Iovecs = np.empty((0, 0, 2), dtype=np.uint64)
        self._windows: list[list[list[memoryview]]] = []

    def _prepare(self, place: int, stop: int) -> int:
        """Have addresses for ``place``; return where they lie."""
        batch = range(place, min(stop, place + _BATCH_CHUNKS))
        longer = self._batch.start == place and batch.stop > self._batch.stop
        if place not in self._batch or longer:
            self._batch = batch
            self._iovecs = self._plan.iovecs(self._batch, self._headers)
            self._address: int = self._iovecs.ctypes.data
            self._windows = []
        return self._address + (place - self._batch.start) * self._iovecs.strides[0]

    def read_many(self, storage: Storage, shard: Shard, keys: Sequence[ChunkKey], at: int) -> int:
        """Read and verify the files of ``keys`` into places from ``at`` on, by a call per batch.

        Returns how many are good; the one after them is for :meth:`read` to judge.
        """
        done = 0
        while done < len(keys):
            iovecs = self._prepare(at + done, at + len(keys))
            batch = keys[done : self._batch.stop - at]
            names = [key.name for key in batch]
            got = storage.read_files(names, shard, self._native, iovecs)
            row = at + done - self._batch.start
            for key, header in zip(batch[:got], self._headers[row:], strict=False):
                try:
                    self._plan.codec.check_header(memoryview(header), key)
                except EntryError:
                    return done
                done += 1
            if got < len(batch):
                break
        return done

    def read(self, reader: Reader, key: ChunkKey, place: int, stop: int) -> None:
        """Read and verify one file into ``place``. Raises EntryError, OSError."""
        plan = self._plan
        if reader.nbytes != plan.codec.file_nbytes:
            msg = f"{reader.nbytes} bytes long, expected {plan.codec.file_nbytes}"
            raise CorruptEntryError(msg)
        iovecs = self._prepare(place, stop)
        if not self._windows:
            self._windows = plan.windows(self._batch)
        at = place - self._batch.start
        sums = None
        for row, row_stop, nbytes, offset, first, last in plan.slices:
            got = reader.read_into(iovecs + 16 * row, row_stop - row, nbytes, offset)
            if got != nbytes:
                msg = f"ends inside bytes {offset}..{offset + nbytes}"
                raise CorruptEntryError(msg)
            if sums is None:
                table = plan.codec.check_header(memoryview(self._headers[at].data), key)
                sums = (table if plan.table_index is None else table[plan.table_index]).tolist()
            if plan.checksums(self._windows[at], first, last) != sums[first:last]:
                msg = f"a checksum of bytes {offset}..{offset + nbytes} does not match"
                raise CorruptEntryError(msg)
