"""Writes entries of one shard from memory to a storage, sealed if required; names writers.

A writer's name of 48 characters in each header has the kind of engine, a random number per process
(per engine, if one scheduler speaks for several processes; after its setup, if that is known) and
as much of the host's name as fits.
A name is not stronger evidence than the bytes beside it: any process that can write there can write
any name. :class:`Writers` finds the writers of a prompt's chunks by reading few headers.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from vua.capacity.lru import Unlimited
from vua.capacity.reclaim import Reservation
from vua.errors import InputError, StorageFullError
from vua.format.entry import ENCRYPTED, PLAIN, EntryCodec
from vua.format.keys import ChunkKey, Keys
from vua.format.layout import Shard, cover, payload_map
from vua.io.posix import page_aligned
from vua.native import MemoryMap, Transfer, blocks_of
from vua.security.keyring import NoKeyError
from vua.storage.base import FAILED, PRESENT, WRITTEN, Batch, Storage, entry_name
from vua.store.entry_reader import EntryReader
from vua.store.store import Store

if TYPE_CHECKING:
    from vua.security.seal import Seal

Run: TypeAlias = "tuple[int, frozenset[bytes]]"
"""The first chunk of a stretch, and the writers' names in its entries' headers."""

_SETUP: Final = 12
_OF_SETUP: Final = re.compile(rb"[^ ]+ [0-9a-f]{12}(?=[0-9a-f]{8} )")
_MOST: Final = 1 << 16
_MOST_ODD: Final = 1 << 12
_MOST_READS: Final = 64
"""Headers read per prompt; chunks between two that were read count as the first one's."""


def new_writer(engine: str, setup: str = "") -> str:
    """Return a new name for an engine of that kind, and of a setup (64 hex digits), if known."""
    number = f"{setup[:_SETUP]}{secrets.token_hex(4)}" if setup else secrets.token_hex(8)
    return f"{engine} {number} {socket.gethostname()}"


def same_setup(writer: bytes, other: bytes) -> bool:
    """Whether two names are of engines of one kind and one setup."""
    of_one = [_OF_SETUP.match(name) for name in (writer, other)]
    return all(of_one) and len({found.group() for found in of_one if found}) == 1


@functools.lru_cache(maxsize=1)
def _number_of(process: int) -> str:  # a forked process is another writer
    del process
    return secrets.token_hex(8)


def process_writer(engine: str) -> str:
    """Return this process's name as a writer; ``engine`` is the kind of engine."""
    return f"{engine} {_number_of(os.getpid())} {socket.gethostname()}"


def in_words(writer: bytes) -> str:
    """Return a name in readable form."""
    return writer.decode(errors="replace").strip() or "a writer without a name"


class WriterNames(set[bytes]):
    """Trusts every writer, and collects their names."""

    def __contains__(self, writer: object) -> bool:
        self.add(writer)  # type: ignore[arg-type]
        return True


class Writers:
    """The writers of a store's chunks. Thread-safe.

    A prompt's chunks come in stretches of one writer. Headers are read at the ends of an unknown
    range, and between two that differ. A single chunk of another writer inside a stretch goes
    unseen here; the load, which reads all headers, refuses it and reports it (:meth:`learn`).
    """

    def __init__(self, store: Store, shards: Sequence[Shard]) -> None:
        """Read entries of ``store``: those of ``shards``, or other entries that cover the model."""
        self._store, self._shards = store, tuple(shards)
        self._known: dict[bytes, frozenset[bytes]] = {}
        self._odd: dict[bytes, frozenset[bytes]] = {}
        self._threads = threading.local()

    def runs(self, keys: Keys, first: int, stop: int) -> tuple[Run, ...]:
        """Return the stretches of chunks ``first`` to ``stop``; an unreadable chunk has no writer.

        Raises nothing for the state of the storage.
        """
        if first >= stop:
            return ()
        names = {first: self._of(keys[first]), stop - 1: self._of(keys[stop - 1])}
        edges, todo, reads = {first}, [(first, stop - 1)], _MOST_READS
        while todo:
            low, high = todo.pop()
            if names[low] == names[high]:
                continue
            if high - low == 1 or not reads:
                edges.add(low + 1)
                names[low + 1] = names[high]
                continue
            middle, reads = (low + high) // 2, reads - 1
            names[middle] = self._of(keys[middle])
            todo += [(low, middle), (middle, high)]
        for at in range(first, stop) if self._odd else ():
            if (odd := self._odd.get(keys[at].prefix_hash)) is not None:
                around = names[max(edge for edge in edges if edge <= at)]
                if at + 1 < stop and at + 1 not in edges:
                    edges.add(at + 1)
                    names[at + 1] = around
                edges.add(at)
                names[at] = odd
        return tuple((at, names[at]) for at in sorted(edges))

    def _of(self, key: ChunkKey) -> frozenset[bytes]:
        found = self._known.get(key.prefix_hash)
        return self._read(key) if found is None else found

    def learn(self, prefix_hash: bytes, writer: bytes) -> None:
        self._known.pop(prefix_hash, None)
        if len(self._odd) >= _MOST_ODD:
            self._odd.clear()
        self._odd[prefix_hash] = frozenset((writer,))

    def _read(self, key: ChunkKey) -> frozenset[bytes]:
        noted = WriterNames()
        if not all(self._note(key, shard, noted) for shard in self._shards):
            noted.clear()
            found = cover(self._store.layout.full, self._store.shards(key.name)) or ()
            if not all(self._note(key, shard, noted) for shard, _ in found):
                noted.clear()
        names = frozenset(noted)
        if names:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key.prefix_hash] = names
        return names

    def _note(self, key: ChunkKey, shard: Shard, noted: WriterNames) -> bool:
        store = self._store
        try:
            seal = store.keyring.seal(key.tenant)
        except NoKeyError:
            return False
        codec = store.codec(shard, seal.kind if seal else "")
        # not by the tiered storage itself, which would copy the entry as if it were used
        tiers: Sequence[Storage] = getattr(store.storage, "tiers", (store.storage,))
        for tier in tiers:
            if self._reader(tier, codec).read([key], seal=seal, believed=noted).count:
                return True
        return False

    def _reader(self, storage: Storage, codec: EntryCodec) -> EntryReader:
        kept: dict[tuple[int, Shard, str], EntryReader] | None
        kept = getattr(self._threads, "readers", None)
        if kept is None:
            kept = self._threads.readers = {}
        which = (id(storage), codec.shard, codec.kind)
        if which not in kept:
            kept[which] = EntryReader(storage, codec)
        return kept[which]


log = logging.getLogger(__name__)

_BATCH_CHUNKS: Final = (4, 512)
"""Least and most chunks per call, for any storage."""
_BLOCK_NBYTES: Final = 4096
_ROOM: Final = 1.05
"""A limit that holds a prompt has some room beside its files, for what eviction frees ahead."""


class EntryWriter:
    """Writes from one memory map, and keeps its plans for it. Not thread-safe."""

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
        """Whether the last chunk was not written for lack of space, or of a key."""
        self.wanted: Callable[[], bool] = lambda: True
        """Polled by :meth:`save_all`, which ends early when it returns False."""
        self.prompt_chunks = 0
        """Whole chunks of the prompt, where more than are given to be written."""
        self._memory, self._slots = memory, memory.chunks(store.layout.chunk_tokens)
        self._transfers: dict[str, Transfer] = {}
        self._chunks = 0  # of the prompt, up to the last of those that are given now

    def save_all(self, keys: Keys) -> int:
        """Write chunks, the i-th from slot i of the memory map, unless they are stored already.

        In order, by several threads if that pays, up to the first that is refused: chunks after it
        could not be found. Returns how many were written. Raises as :meth:`save` does, after writes
        in progress have ended.
        """
        return sum(statuses.count(WRITTEN) for statuses in self.save_each(keys))

    def save_each(self, keys: Keys, first: int = 0) -> Iterator[list[int]]:
        """As :meth:`save_all`, from slot ``first`` on: yield the statuses of the next chunks.

        Statuses as :meth:`save` returns them; chunks from the first FAILED on are yielded again.
        Ends before a refused chunk.
        """
        place, one_by_one = 0, False
        last = keys[len(keys) - 1] if len(keys) else None
        self._chunks = last.stop // (last.stop - last.start) if last else 0
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
        """Write an entry that was verified: ``header``, and the payload in memory.

        Returns whether it was written. Raises as :meth:`save` does.
        """
        batch = self._batch([key], self._transfer(kind), 0, kind)
        batch.headers[0] = header
        return self.save([key], batch=batch) == [WRITTEN]

    def save(
        self, run: Sequence[ChunkKey], place: int = 0, *, batch: Batch | None = None
    ) -> list[int]:
        """Write a prompt's next chunks by one call, unless they are stored already.

        A chunk is stored if there are files that together hold this shard. The i-th chunk lies at
        slot ``place + i`` of the memory map; a given ``batch`` is written as it is. Returns each
        chunk's status: WRITTEN, PRESENT or FAILED. The list is shorter if leading chunks are
        PRESENT, or if a later one is: the rest may be, too. It is empty if all are refused, see
        :attr:`refused`. Raises StorageError (NotWritableError, StorageFullError) if nothing could
        be written; InputError for chunks outside the memory map.
        """
        if place + len(run) > self._slots:
            raise InputError(f"chunks {place} to {place + len(run)} of memory for {self._slots}")
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
        with self._reserve(run, nbytes) as reservation:
            if not reservation.granted:
                return self._refuse(len(run))
            batch = batch or self._sealed(run, place, seal)
            written = storage.write(batch)
            statuses = list(written.statuses)
            if statuses[0] == FAILED and isinstance(written.problem, StorageFullError):
                reservation.relieve_full_disk()
                written = storage.write(batch)
                statuses = list(map(max, statuses, written.statuses))
            reservation.commit(statuses)
            if statuses[0] == FAILED and written.problem is not None:
                raise written.problem
        self._count(run, statuses)
        return statuses

    def _covered(self, run: Sequence[ChunkKey], kind: str) -> list[bool]:
        """Whether files of other shards that together hold this one exist, for each chunk.

        Each file is checked as a reader does: its owner, kind and length. If a listing is a
        request, only the shards that lookups have found are checked.
        """
        store, search = self.store, self.store.search
        if search is None:
            if not any(store.shards(run[at].name) for at in {0, len(run) - 1}):
                return [False] * len(run)  # a new prompt: two looks instead of one per chunk
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
        full = self.store.layout.full
        others = [one for one in shards if one != self.shard and full.contains(one)]
        return (cover(self.shard, others) or []) if others else []

    def _are_there(self, run: Sequence[ChunkKey], shards: Sequence[Shard], kind: str) -> list[bool]:
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
        nbytes, (low, high) = self.store.codec(self.shard).file_nbytes, _BATCH_CHUNKS
        best_nbytes = self.store.storage.capabilities.batch_nbytes
        chunks, capacity = min(max(best_nbytes // nbytes, low), high), self.store.capacity
        return chunks if capacity is None else max(1, min(chunks, capacity.batch_bytes // nbytes))

    def _reserve(self, run: Sequence[ChunkKey], nbytes: int) -> Reservation | Unlimited:
        capacity = self.store.capacity
        if capacity is None:
            return Unlimited()
        return capacity.reserve(run, nbytes, prompt=self._prompt(run, nbytes))

    def _prompt(self, run: Sequence[ChunkKey], nbytes: int) -> tuple[int, int]:
        """Return the tokens of a prompt, as far as known, and the bytes that its files take."""
        layout, size = self.store.layout, run[0].stop - run[0].start
        chunks = max(self.prompt_chunks, self._chunks, run[-1].stop // size)
        if layout.window is not None:  # few of its chunks are stored
            return chunks * size, 0
        files = layout.full.payload_nbytes(layout) / self.shard.payload_nbytes(layout)
        blocks = -(-nbytes // _BLOCK_NBYTES) * _BLOCK_NBYTES
        return chunks * size, math.ceil(chunks * files * blocks * _ROOM)

    def _refuse(self, chunks: int) -> list[int]:
        self.refused = True
        if chunks == 1:  # several are then checked one by one
            self.store.quarantine.count("chunks_refused")
        return []

    def _transfer(self, kind: str) -> Transfer:
        transfer = self._transfers.get(kind)
        if transfer is None:
            shard = self.shard
            transfer = self.store.transfer(shard, shard, shard, self._memory, kind)
            self._transfers[kind] = transfer
        return transfer
