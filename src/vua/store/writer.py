"""From memory to files: saves chunk after chunk from one memory map."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import numpy as np

from vua.capacity.reservation import Capacity
from vua.errors import StorageFullError
from vua.format.entry import EntryCodec
from vua.format.header import PLAIN
from vua.format.keys import ChunkKey, Keys
from vua.format.layout import KVLayout, MemoryMap, Shard
from vua.io.posix import page_aligned
from vua.io.threads import Call, Threads
from vua.native import LEFT, PRESENT, THREADS, WRITTEN, Transfer, hash_entry
from vua.security.keyring import Keyring, NoKeyError
from vua.storage.base import FileStorage, entry_name
from vua.store.quarantine import Misses

__all__ = ["Saver"]

log = logging.getLogger(__name__)

_WRITER: Final = f"vua {socket.gethostname()}"
_SHARED_NBYTES: Final = 4 << 20
"""What is saved at once is worth a second thread from this size on."""
_RUN_NBYTES: Final = 64 << 20
"""What one call of the native loop writes: as long it has the room, and the stamps wait."""
_RUN_CHUNKS: Final = (4, 512)
"""How many chunks that is, at least and at most."""
_RUNS_FAILED: Final = 3
"""After so many calls that did nothing all is left to Python."""


class Target(Protocol):
    """What a saver needs of a :class:`vua.store.store.Store`."""

    layout: KVLayout
    storage: FileStorage
    capacity: Capacity | None
    keyring: Keyring
    misses: Misses

    def codec(self, shard: Shard, kind: str = "") -> EntryCodec:
        """Return the codec of a shard's files."""
        ...

    def transfer(
        self, stored: Shard, taken: Shard, target: Shard, memory: MemoryMap, kind: str = ""
    ) -> Transfer:
        """Return how a rectangle moves between files and memory."""
        ...


class Saver:
    """Saves from one memory map, keeping what it has worked out about it. One thread at a time."""

    def __init__(self, store: Target, shard: Shard, memory: MemoryMap) -> None:
        """Prepare to save ``shard`` from ``memory``; :meth:`Store.saver` calls this."""
        self.store, self.shard = store, shard
        self.refused = False
        """Whether the last one was not written for want of room, or of a key."""
        self.ttl_s: float | None = None
        """A hint for what is written from now on, see :mod:`vua.capacity.ttl`."""
        self.wanted: Callable[[], bool] = lambda: True
        """Asked now and then by :meth:`save_all`, which ends early when it says no."""
        self._memory = memory
        self._transfers: dict[str, Transfer] = {}

    def save(self, key: ChunkKey, *, place: int = 0) -> bool:
        """Write the chunk at ``place`` of the memory map; see :meth:`Store.save`."""
        with self._announced(key):
            [became] = self._write_run([key], place) or [LEFT]
            return became == WRITTEN or (became == LEFT and self._save(key, place))

    def _save(self, key: ChunkKey, place: int) -> bool:
        self.refused, store, shard = False, self.store, self.shard
        try:
            seal = store.keyring.seal(key.tenant)
        except NoKeyError as problem:
            self._refuse()
            log.warning("chunk %s is not stored: %s", key.name[:12], problem)
            return False
        codec = store.codec(shard, seal.kind if seal else "")
        if store.storage.exists([entry_name(key.name, shard)], codec.file_nbytes)[0]:
            store.misses.count("chunks_present")
            return False
        transfer = self.transfer(codec.kind)
        rows = transfer.rows(place)
        header = page_aligned(codec.header_nbytes)
        mark, tags, stored = PLAIN, b"", None
        if seal is not None:
            mark, tags, stored = seal.close(codec, key, transfer.blocks(rows))
        if stored is None:
            table = hash_entry(transfer, place)
        else:
            table = np.array(codec.checksums(stored), dtype=np.uint64)
            rows = np.array([(stored.ctypes.data, stored.nbytes)], dtype=np.uint64)
        opening = np.array([(header.ctypes.data, header.nbytes)], dtype=np.uint64)
        iovecs = np.concatenate([opening, rows])
        text = codec.encode_header(key, table, writer=_WRITER, mark=mark, tags=tags)
        header[:] = np.frombuffer(text, dtype=np.uint8)
        if store.capacity is None:
            store.storage.publish(key.name, shard, iovecs)
        else:
            with store.capacity.reserve([key], codec.file_nbytes, self.ttl_s) as room:
                if not room.granted:
                    self._refuse()
                    return False
                try:
                    store.storage.publish(key.name, shard, iovecs)
                except StorageFullError:
                    room.relieve_full_disk()
                    store.storage.publish(key.name, shard, iovecs)
                room.commit([WRITTEN])
        store.misses.count("chunks_saved")
        log.debug("saved chunk %s/%s", key.name[:12], shard.name)
        return True

    def save_all(self, keys: Keys) -> int:
        """Write chunks, the i-th from place i of the memory map, unless they are stored already.

        In order, by two threads where that is worth it, up to the first that is refused: what
        comes behind it would not be found. Returns how many were written. Raises as
        :meth:`vua.store.store.Store.save` does, after what is being written has come to its end.
        """
        written, place, failed = 0, 0, 0
        while place < len(keys) and self.wanted():
            run = [keys[at] for at in range(place, min(place + self._run_chunks(), len(keys)))]
            outcome = self._write_run(run, place)
            failed = failed + 1 if outcome == [LEFT] else 0
            if not outcome or failed == _RUNS_FAILED:
                return written + self._save_rest(keys, place)
            written += outcome.count(WRITTEN)
            for became in outcome:
                if became == LEFT:
                    written += self._save(keys[place], place)
                    if self.refused:
                        return written
                place += 1
        return written

    def _run_chunks(self) -> int:
        """How many chunks to write by one call."""
        nbytes, (low, high) = self.store.codec(self.shard).file_nbytes, _RUN_CHUNKS
        chunks = min(max(_RUN_NBYTES // nbytes, low), high)
        capacity = self.store.capacity
        return chunks if capacity is None else max(1, min(chunks, capacity.batch_bytes // nbytes))

    def _write_run(self, run: Sequence[ChunkKey], place: int) -> Sequence[int]:
        """Write a prompt's next chunks by one call; what became of each, or nothing: it cannot.

        Up to the one behind which all are left. First ones that are stored already are only
        counted: then others may be, too.
        """
        self.refused, store = False, self.store
        codec, transfer = store.codec(self.shard), self.transfer("")
        if not store.storage.writes_files or self.ttl_s is not None or self._sealed(run[0].tenant):
            return []
        present, names = 0, [entry_name(key.name, self.shard) for key in run]
        while present < len(run) and store.storage.exists([names[present]], codec.file_nbytes)[0]:
            present += 1
        if present:
            store.misses.count("chunks_present", present)
            return [PRESENT] * present
        headers = page_aligned(len(run) * codec.header_nbytes)
        text = b"".join(codec.blank_header(key, writer=_WRITER) for key in run)
        headers[:] = np.frombuffer(text, dtype=np.uint8)

        files = ([key.name for key in run], self.shard, transfer, place, headers.ctypes.data)
        if store.capacity is None:
            outcome = store.storage.write_files(*files, codec.check_offset)
        else:
            with store.capacity.reserve(run, codec.file_nbytes) as room:
                if not room.granted:
                    return []
                outcome = store.storage.write_files(*files, codec.check_offset)
                room.commit(outcome)
        for event, became in (("chunks_saved", WRITTEN), ("chunks_present", PRESENT)):
            if chunks := outcome.count(became):
                store.misses.count(event, chunks)
        for key, became in zip(run, outcome, strict=False):
            if became == WRITTEN:
                log.debug("saved chunk %s/%s", key.name[:12], self.shard.name)
        done = max((at for at, became in enumerate(outcome) if became != LEFT), default=-1)
        return outcome[: done + 2]

    def _sealed(self, tenant: str) -> bool:
        """Whether a tenant's files have a seal, or cannot have the one that they need."""
        try:
            return self.store.keyring.seal(tenant) is not None
        except NoKeyError:
            return True

    def _save_rest(self, keys: Keys, first: int) -> int:
        """Save the chunks from ``first`` on in Python."""
        todo = deque((place, keys[place]) for place in range(first, len(keys)))
        begin = threading.Lock()
        nbytes = len(todo) * self.shard.payload_nbytes(self.store.layout)
        if THREADS < 2 or len(todo) < 2 or nbytes < _SHARED_NBYTES:
            return self._save_each(todo, begin)
        other = Saver(self.store, self.shard, self._memory)
        other.ttl_s, other.wanted = self.ttl_s, self.wanted
        threads, more = Threads(1, "vua-save"), Call[int](lambda _: 0)
        try:
            more = threads.submit(lambda _: other._save_each(todo, begin))
        except RuntimeError:  # the system has no more threads
            more.run()
        try:
            written = self._save_each(todo, begin)
        finally:
            threads.close()
        self.refused |= other.refused
        return written + more.result()

    def _save_each(self, todo: deque[tuple[int, ChunkKey]], begin: threading.Lock) -> int:
        """Save what is left to do, which another thread may take from as well, with ``begin``."""
        self.refused, written = False, 0
        try:
            while True:
                with contextlib.ExitStack() as flight:
                    with begin:  # no child is announced before its parent
                        if not todo or not self.wanted():
                            return written
                        place, key = todo.popleft()
                        flight.enter_context(self._announced(key))
                    written += self._save(key, place)
                if self.refused:
                    todo.clear()
        except BaseException:
            todo.clear()
            raise

    @contextlib.contextmanager
    def _announced(self, key: ChunkKey) -> Iterator[None]:
        pending = None if self.store.capacity is None else self.store.capacity.pending
        mine = [] if pending is None else pending.enter([key.name])
        try:
            yield
        finally:
            if pending is not None:
                pending.leave(mine)

    def _refuse(self) -> None:
        self.refused = True
        self.store.misses.count("chunks_refused")

    def transfer(self, kind: str) -> Transfer:
        """Return how the shard lies in memory, and in files with a ``kind`` of seal if any."""
        transfer = self._transfers.get(kind)
        if transfer is None:
            shard = self.shard
            transfer = self.store.transfer(shard, shard, shard, self._memory, kind)
            self._transfers[kind] = transfer
        return transfer
