"""Reads of many chunks by one plan: addresses are worked out for a batch and kept.

The files' headers are judged here, by `vua.entry`; what a bad file means is for `vua.store` to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from vua._linux import Iovecs
from vua.errors import CorruptEntryError, EntryError
from vua.keys import ChunkKey
from vua.layout import Shard
from vua.plan import Plan
from vua.storage import Reader, Storage

if TYPE_CHECKING:
    from vua.seal import Seal  # needs an optional package

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

    def read_many(
        self,
        storage: Storage,
        shard: Shard,
        keys: Sequence[ChunkKey],
        at: int,
        seal: Seal | None = None,
    ) -> int:
        """Read and verify the files of ``keys`` into places from ``at`` on, by a call per batch.

        With a ``seal`` they have to be sealed by it, and what was encrypted is not any more.

        Returns how many are good; the one after them is for :meth:`read` to judge.
        """
        done = 0
        if seal is not None and self._plan.part.sink.size:
            return 0  # what is read to be verified alone is gone before its seal is looked at
        while done < len(keys):
            iovecs = self._prepare(at + done, at + len(keys))
            batch = keys[done : self._batch.stop - at]
            names = [key.name for key in batch]
            got = storage.read_files(names, shard, self._native, iovecs)
            row = at + done - self._batch.start
            for key in batch[:got]:
                try:
                    self._check(row, key, seal)
                    if seal is not None:
                        self._unseal(row, key, seal)
                except EntryError:
                    return done
                done, row = done + 1, row + 1
            if got < len(batch):
                break
        return done

    def _check(self, row: int, key: ChunkKey, seal: Seal | None) -> npt.NDArray[np.uint64]:
        """Return the checksums of the header in a row of the batch. Raises EntryError."""
        header = memoryview(self._headers[row].data)
        return self._plan.codec.check_header(header, key, "" if seal is None else seal.key_id)

    def _unseal(self, row: int, key: ChunkKey, seal: Seal) -> None:
        header = memoryview(self._headers[row].data)
        seal.open(self._plan, key, header, self._window(row))

    def _window(self, row: int) -> list[list[memoryview]]:
        if not self._windows:
            self._windows = self._plan.windows(self._batch)
        return self._windows[row]

    def read(
        self, reader: Reader, key: ChunkKey, place: int, stop: int, seal: Seal | None = None
    ) -> None:
        """Read and verify one file into ``place``. Raises EntryError, OSError."""
        plan = self._plan
        if reader.nbytes != plan.codec.file_nbytes:
            msg = f"{reader.nbytes} bytes long, expected {plan.codec.file_nbytes}"
            raise CorruptEntryError(msg)
        iovecs = self._prepare(place, stop)
        at = place - self._batch.start
        window, sums = self._window(at), None
        for row, row_stop, nbytes, offset, first, last in plan.slices:
            got = reader.read_into(iovecs + 16 * row, row_stop - row, nbytes, offset)
            if got != nbytes:
                msg = f"ends inside bytes {offset}..{offset + nbytes}"
                raise CorruptEntryError(msg)
            if sums is None:
                table = self._check(at, key, seal)
                sums = (table if plan.table_index is None else table[plan.table_index]).tolist()
            if plan.checksums(window, first, last) != sums[first:last]:
                msg = f"a checksum of bytes {offset}..{offset + nbytes} does not match"
                raise CorruptEntryError(msg)
        if seal is not None:
            self._unseal(at, key, seal)
