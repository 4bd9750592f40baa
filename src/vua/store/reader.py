"""Reads of many chunks by one plan: in C as many as can be by one call, else one by one.

The files' headers are judged here, by `vua.format.entry`; what a bad file means is for
`vua.store.store` to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from vua.errors import CorruptEntryError, EntryError
from vua.format.keys import ChunkKey
from vua.format.layout import Shard
from vua.format.plan import Plan
from vua.io.posix import Iovecs
from vua.storage.base import Reader, Storage

if TYPE_CHECKING:
    from vua.security.seal import Seal  # needs an optional package

__all__ = ["Aim"]

_BATCH_CHUNKS: Final = 256
"""Chunks read by one call; bounds what memory headers take."""
_ADDRESSES_CHUNKS: Final = 64
"""Chunks whose addresses the path in Python works out at once."""


class Aim:
    """A plan with what reads by it keep between chunks. One thread at a time."""

    def __init__(self, plan: Plan) -> None:
        """Prepare to read by ``plan``."""
        self._plan = plan
        self._headers = self._room(0)
        self._batch = range(0)
        self._batch_headers = self._room(0)
        self._iovecs: Iovecs = np.empty((0, 0, 2), dtype=np.uint64)
        self._windows: list[list[list[memoryview]]] = []

    def _room(self, chunks: int) -> npt.NDArray[np.uint8]:
        return np.empty((chunks, self._plan.codec.header_nbytes), dtype=np.uint8)

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
        check, key_id = self._plan.codec.check_header, "" if seal is None else seal.key_id
        if seal is not None and self._plan.recipe.part.sink_nbytes:
            return 0  # what is read to be verified alone is gone before its seal is looked at
        while done < len(keys):
            batch = keys[done : done + _BATCH_CHUNKS]
            if len(self._headers) < len(batch):
                self._headers = self._room(len(batch))
            names = [key.name for key in batch]
            address, first = self._headers.ctypes.data, at + done
            got = storage.read_files(names, shard, self._plan.batch, first, address)
            windows = self._plan.windows(range(first, first + got)) if seal is not None else []
            for row, key in enumerate(batch[:got]):
                header = memoryview(self._headers[row].data)
                try:
                    check(header, key, key_id)
                    if seal is not None:
                        seal.open(self._plan, key, header, windows[row])
                except EntryError:
                    return done
                done += 1
            if got < len(batch):
                break
        return done

    def _prepare(self, place: int, stop: int) -> int:
        """Have addresses for ``place``; return where they lie."""
        if place not in self._batch:
            self._batch = range(place, min(stop, place + _ADDRESSES_CHUNKS))
            if len(self._batch_headers) < len(self._batch):
                self._batch_headers = self._room(len(self._batch))
            self._iovecs = self._plan.iovecs(self._batch, self._batch_headers)
            self._address: int = self._iovecs.ctypes.data
            self._windows = self._plan.windows(self._batch)
        return self._address + (place - self._batch.start) * self._iovecs.strides[0]

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
        header, window = memoryview(self._batch_headers[at].data), self._windows[at]
        sums = None
        for cut in plan.recipe.slices:
            rows = plan.rows(cut)
            got = reader.read_into(iovecs + 16 * rows.start, len(rows), cut.nbytes, cut.offset)
            if got != cut.nbytes:
                msg = f"ends inside bytes {cut.offset}..{cut.offset + cut.nbytes}"
                raise CorruptEntryError(msg)
            if sums is None:
                table = plan.codec.check_header(header, key, "" if seal is None else seal.key_id)
                index = plan.recipe.table_index
                sums = (table if index is None else table[index]).tolist()
            if plan.checksums(window, cut.first, cut.stop) != sums[cut.first : cut.stop]:
                msg = f"a checksum of bytes {cut.offset}..{cut.offset + cut.nbytes} does not match"
                raise CorruptEntryError(msg)
        if seal is not None:
            seal.open(plan, key, header, window)
