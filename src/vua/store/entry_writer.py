"""From memory to storage: writes entries of one shard, sealed where they have to be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from vua.capacity.reservation import Reservation, Unlimited
from vua.errors import InputError, StorageFullError
from vua.format.header import ENCRYPTED, PLAIN
from vua.format.keys import ChunkKey, Keys
from vua.format.layout import MemoryMap, Shard, cover, payload_map
from vua.io.posix import page_aligned
from vua.native import Transfer, blocks_of
from vua.security.keyring import NoKeyError
from vua.storage.base import FAILED, PRESENT, WRITTEN, Batch, entry_name
from vua.store.store import Store
from vua.store.writer import process_writer

if TYPE_CHECKING:
    from vua.security.seal import Seal  # needs an optional package

__all__ = ["EntryWriter"]

log = logging.getLogger(__name__)

_BATCH_CHUNKS: Final = (4, 512)
"""What one call writes, at least and at most, whatever the storage says."""


class EntryWriter:
    """Writes from one memory map, keeping what it has worked out about it. One thread at a time."""

    def __init__(
        self, store: Store, memory: MemoryMap, *, shard: Shard | None = None, writer: str = ""
    ) -> None:
        """Write from ``memory``, which holds ``shard``: by default the whole model.

        It must not change while it is being written. ``writer`` is the name for the headers, by
        default this process's.
        """
        self._writer = writer or process_writer("vua")
        self.store, self.shard = store, shard or store.layout.full
        self.refused = False
        """Whether the last one was not written for want of space, or of a key."""
        self.ttl_s: float | None = None
        """A hint for what is written from now on, see :mod:`vua.capacity.ttl`."""
        self.wanted: Callable[[], bool] = lambda: True
        """Asked now and then by :meth:`save_all`, which ends early when it says no."""
        self._memory, self._room = memory, memory.chunks(store.layout)
        self._transfers: dict[str, Transfer] = {}

    def save_all(self, keys: Keys) -> int:
        """Write chunks, the i-th from place i of the memory map, unless they are stored already.

        In order, by several threads where that is worth it, up to the first that is refused: what
        comes behind it would not be found. Returns how many were written. Raises as
        :meth:`save` does, after what is being written has come to its end.
        """
        return sum(statuses.count(WRITTEN) for statuses in self.save_each(keys))

    def save_each(self, keys: Keys, first: int = 0) -> Iterator[list[int]]:
        """As :meth:`save_all`, from place ``first`` on: yield what became of the next ones.

        As :meth:`save` returns it: chunks from the first FAILED on come again. Nothing of one that
        is refused, and of those behind it.
        """
        place, one_by_one = 0, False
        while place < len(keys) and self.wanted():
            most = 1 if one_by_one else self._batch_chunks()
            run = [keys[at] for at in range(place, min(place + most, len(keys)))]
            statuses = self.save(run, first + place)
            if self.refused:
                if len(run) == 1:
                    break
                one_by_one = True  # there may be space for some of them
            yield statuses
            place += statuses.index(FAILED) if FAILED in statuses else len(statuses)

    def copy(self, key: ChunkKey, header: npt.NDArray[np.uint8], kind: str) -> bool:
        """Write an entry that was verified: ``header``, and the payload that lies in memory.

        Returns whether it was written. Raises as :meth:`save` does.
        """
        batch = self._batch([key], self._transfer(kind), 0, kind)
        batch.headers[0] = header
        return self.save([key], batch=batch) == [WRITTEN]

    def save(
        self, run: Sequence[ChunkKey], place: int = 0, *, batch: Batch | None = None
    ) -> list[int]:
        """Write a prompt's next chunks by one call, unless they are stored already.

        A chunk is stored where files are there that together hold this shard, in whatever shards.
        The i-th lies at ``place + i`` of the memory map; a ``batch`` that is given is written as
        it is. Returns what became of each: WRITTEN, PRESENT or FAILED. Fewer where leading ones
        are PRESENT, or where one behind them is: then others may be, too. None where all are
        refused, see :attr:`refused`. Raises
        StorageError (NotWritableError, StorageFullError) where nothing could be written;
        InputError for chunks that the memory map has no room for.
        """
        if place + len(run) > self._room:
            msg = f"chunks {place} to {place + len(run)} of memory for {self._room}"
            raise InputError(msg)
        self.refused, store, storage, seal = False, self.store, self.store.storage, None
        try:
            seal = store.keyring.seal(run[0].tenant) if batch is None else None
        except NoKeyError as problem:
            store.keyring.faults.tell(problem, "a prompt is not stored")
            return self._refuse(1)
        kind = seal.kind if seal else ""
        nbytes = store.codec(self.shard, kind).file_nbytes if batch is None else batch.nbytes
        names, present = [entry_name(key.name, self.shard) for key in run], 0
        while present < len(run) and storage.exists([names[present]], nbytes)[0]:
            present += 1
        if not present and batch is None:
            covered = self._covered(run, kind)
            present = next((at for at, there in enumerate(covered) if not there), len(run))
            run = run if present else run[: covered.index(True) if True in covered else len(run)]
        if present:
            store.quarantine.count("chunks_present", present)
            return [PRESENT] * present
        with self._reserve(run, nbytes) as room:
            if not room.granted:
                return self._refuse(len(run))
            batch = batch or self._sealed(run, place, seal)
            written = storage.write(batch)
            statuses = list(written.statuses)
            if statuses[0] == FAILED and isinstance(written.problem, StorageFullError):
                room.relieve_full_disk()
                written = storage.write(batch)
                statuses = list(map(max, statuses, written.statuses))
            room.commit(statuses)
            if statuses[0] == FAILED and written.problem is not None:
                raise written.problem
        self._count(run, statuses)
        return statuses

    def _covered(self, run: Sequence[ChunkKey], kind: str) -> list[bool]:
        """Whether files of other shards are there that together hold this one, of each chunk.

        Each is looked at as a reader does it: its owner, kind and length. Where a listing is a
        request, only those shards are asked for that lookups have come upon.
        """
        store, search = self.store, self.store.search
        if search is None:
            found = [[one for one, _ in self._cover(store.shards(key.name))] for key in run]
            return [bool(some) and self._are_there([key], some, kind)[0]
                    for key, some in zip(run, found, strict=True)]  # fmt: skip
        covered = [False] * len(run)
        for shards in search.covers:
            if some := [one for one, _ in self._cover(shards)]:
                there = self._are_there(run, some, kind)
                covered = [one or other for one, other in zip(covered, there, strict=True)]
        return covered

    def _cover(self, shards: Sequence[Shard]) -> list[tuple[Shard, Shard]]:
        """Return which of these shards hold this one; none where they do not."""
        full = self.store.layout.full
        others = [one for one in shards if one != self.shard and full.contains(one)]
        return (cover(self.shard, others) or []) if others else []

    def _are_there(self, run: Sequence[ChunkKey], shards: Sequence[Shard], kind: str) -> list[bool]:
        """Whether all of these shards are there of each chunk, as long as they have to be."""
        there = [True] * len(run)
        for shard in shards:
            nbytes = self.store.codec(shard, kind).file_nbytes
            names = [entry_name(key.name, shard) for key in run]
            found = self.store.storage.exists(names, nbytes)
            there = [one and other for one, other in zip(there, found, strict=True)]
        return there

    def _count(self, run: Sequence[ChunkKey], statuses: Sequence[int]) -> None:
        for event, became in (("chunks_saved", WRITTEN), ("chunks_present", PRESENT)):
            if chunks := statuses.count(became):
                self.store.quarantine.count(event, chunks)
        for key, became in zip(run, statuses, strict=True):
            if self.store.search is not None and became != FAILED:
                self.store.search.wrote(entry_name(key.name, self.shard))
            if became == WRITTEN:
                log.debug("saved chunk %s/%s", key.name[:12], self.shard.name)

    def _sealed(self, run: Sequence[ChunkKey], place: int, seal: Seal | None) -> Batch:
        """Return a batch with the headers of new entries, and their payloads as they are stored."""
        kind = seal.kind if seal else ""
        codec, transfer = self.store.codec(self.shard, kind), self._transfer(kind)
        headers = []
        payload_nbytes = codec.file_nbytes - codec.header_nbytes
        encrypted = np.empty((0, payload_nbytes), dtype=np.uint8)
        if kind == ENCRYPTED:
            encrypted = page_aligned(len(run) * payload_nbytes).reshape(len(run), -1)
        for at, key in enumerate(run):
            seal_info, tags = PLAIN, b""
            if seal is not None:
                blocks = blocks_of(transfer, place + at)
                into = encrypted[at] if len(encrypted) else None
                seal_info, tags = seal.close(codec, key, blocks, into)
            headers.append(
                codec.blank_header(key, writer=self._writer, seal_info=seal_info, tags=tags)
            )
        if len(encrypted):
            store, shard, address = self.store, self.shard, encrypted.ctypes.data
            memory = payload_map(store.layout, shard, address, encrypted, len(run))
            transfer, place = store.transfer(shard, shard, shard, memory, kind), 0
        batch = self._batch(run, transfer, place, kind)
        for row, text in zip(batch.headers, headers, strict=True):
            row[:] = np.frombuffer(text, dtype=np.uint8)
        return batch

    def _batch(self, run: Sequence[ChunkKey], transfer: Transfer, place: int, kind: str) -> Batch:
        names = [entry_name(key.name, self.shard) for key in run]
        check_offset = self.store.codec(self.shard, kind).check_offset
        return Batch.of(names, transfer, place, check_offset=check_offset)

    def _batch_chunks(self) -> int:
        """How many chunks to write by one call."""
        nbytes, (low, high) = self.store.codec(self.shard).file_nbytes, _BATCH_CHUNKS
        best_nbytes = self.store.storage.capabilities.batch_nbytes
        chunks, capacity = min(max(best_nbytes // nbytes, low), high), self.store.capacity
        return chunks if capacity is None else max(1, min(chunks, capacity.batch_bytes // nbytes))

    def _reserve(self, run: Sequence[ChunkKey], nbytes: int) -> Reservation | Unlimited:
        capacity = self.store.capacity
        return Unlimited() if capacity is None else capacity.reserve(run, nbytes, self.ttl_s)

    def _refuse(self, chunks: int) -> list[int]:
        self.refused = True
        if chunks == 1:  # several are then asked for one by one
            self.store.quarantine.count("chunks_refused")
        return []

    def _transfer(self, kind: str) -> Transfer:
        """How the shard lies in memory, and in entries with a ``kind`` of seal if any."""
        transfer = self._transfers.get(kind)
        if transfer is None:
            shard = self.shard
            transfer = self.store.transfer(shard, shard, shard, self._memory, kind)
            self._transfers[kind] = transfer
        return transfer
