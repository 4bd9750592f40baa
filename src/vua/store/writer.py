"""Who wrote an entry: a name of 48 characters in its header, of one process or one engine.

The name has the kind of engine, a random number that is drawn anew for each process (each engine,
where one scheduler speaks for several processes) and as much of the host's name as fits. Who reads
must not believe a name more than the bytes beside it: whoever can write there can write any name.
:class:`Writers` tells of which writers a prompt's chunks are, and reads few headers for it.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Sequence
from typing import Final, TypeAlias

from vua.format.entry import EntryCodec
from vua.format.keys import ChunkKey, Keys
from vua.format.layout import Shard, cover
from vua.io.forks import watch
from vua.io.header_plan import header_plan
from vua.native import Transfer
from vua.security.keyring import NoKeyError
from vua.storage.base import Storage
from vua.store.entry_reader import EntryReader
from vua.store.store import Store

__all__ = ["Noted", "Run", "Writers", "in_words", "new_writer", "process_writer"]

Run: TypeAlias = "tuple[int, frozenset[bytes]]"
"""The first chunk of a stretch, and the names in the headers of its entries, as in the file."""

_MOST: Final = 1 << 16
"""Chunks whose writers are remembered."""
_MOST_ODD: Final = 1 << 12
_MOST_READS: Final = 64
"""Headers read for one prompt; what is between two that were read counts as the first one's."""


def new_writer(engine: str) -> str:
    """Return a new name for an engine, or for a process, of that kind."""
    return f"{engine} {secrets.token_hex(8)} {socket.gethostname()}"


class _Process:
    """The number of this process."""

    def __init__(self) -> None:
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Draw another number: a copy of a process is another writer."""
        self.number = secrets.token_hex(8)


_process: Final = _Process()


def process_writer(engine: str) -> str:
    """Return this process's name as a writer; ``engine`` is the kind of what computes."""
    return f"{engine} {_process.number} {socket.gethostname()}"


def in_words(writer: bytes) -> str:
    """Return a name as people read it."""
    return writer.decode(errors="replace").strip() or "a writer without a name"


class Noted(set[bytes]):
    """Believes every writer, and keeps their names."""

    def __contains__(self, writer: object) -> bool:
        self.add(writer)  # type: ignore[arg-type]
        return True


class _Stretches:
    """Where stretches begin, and whose they are."""

    def __init__(self, first: int) -> None:
        self.edges, self.names = {first}, dict[int, frozenset[bytes]]()

    def begin(self, at: int, names: frozenset[bytes]) -> None:
        self.edges.add(at)
        self.names[at] = names

    def insert(self, at: int, names: frozenset[bytes], stop: int) -> None:
        """Let one chunk be of others than the stretch around it."""
        around = self.names[max(edge for edge in self.edges if edge <= at)]
        if at + 1 < stop and at + 1 not in self.edges:
            self.begin(at + 1, around)
        self.begin(at, names)


class Writers:
    """Of which writers a store's chunks are. Safe for threads.

    A prompt's chunks come in stretches of one writer. Headers are read at the ends of what is not
    known, and between two that differ. So a chunk of another writer in the midst of a stretch is
    not seen here: the load, which reads all headers, refuses it and tells (:meth:`learn`).
    """

    def __init__(self, store: Store, shards: Sequence[Shard]) -> None:
        """Read entries of ``store``: those of ``shards``, or others that cover the model."""
        self._store, self._shards = store, tuple(shards)
        self._known: dict[bytes, frozenset[bytes]] = {}
        self._odd: dict[bytes, frozenset[bytes]] = {}
        """Of chunks that a load refused."""
        self._threads = threading.local()

    def runs(self, keys: Keys, first: int, stop: int) -> tuple[Run, ...]:
        """Return the stretches of chunks ``first`` to ``stop``, of nobody where it cannot be read.

        Raises nothing for the state of the storage.
        """
        if first >= stop:
            return ()
        found = _Stretches(first)
        found.names[first], reads = self._of(keys[first]), _MOST_READS
        found.names[stop - 1] = self._of(keys[stop - 1])
        todo = [(first, stop - 1)]
        while todo:
            low, high = todo.pop()
            if found.names[low] == found.names[high]:
                continue
            if high - low == 1 or not reads:
                found.begin(low + 1, found.names[high])
                continue
            middle, reads = (low + high) // 2, reads - 1
            found.names[middle] = self._of(keys[middle])
            todo += [(low, middle), (middle, high)]
        for at in range(first, stop) if self._odd else ():
            if (odd := self._odd.get(keys[at].prefix_hash)) is not None:
                found.insert(at, odd, stop)
        return tuple((at, found.names[at]) for at in sorted(found.edges))

    def _of(self, key: ChunkKey) -> frozenset[bytes]:
        found = self._known.get(key.prefix_hash)
        return self._read(key) if found is None else found

    def learn(self, prefix_hash: bytes, writer: bytes) -> None:
        """Note of which writer a chunk is that a load refused."""
        self._known.pop(prefix_hash, None)
        if len(self._odd) >= _MOST_ODD:
            self._odd.clear()
        self._odd[prefix_hash] = frozenset((writer,))

    def _read(self, key: ChunkKey) -> frozenset[bytes]:
        """Return the names in a chunk's headers; none where it cannot be read as a whole."""
        noted = Noted()
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

    def _note(self, key: ChunkKey, shard: Shard, noted: Noted) -> bool:
        store = self._store
        try:
            seal = store.keyring.seal(key.tenant)
        except NoKeyError:
            return False
        codec = store.codec(shard, seal.kind if seal else "")
        # not by the tiered storage itself: a look is no use, for which an entry is copied
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
            plan = header_plan(codec.file_nbytes, codec.header_nbytes, codec.table_offset)
            kept[which] = EntryReader(storage, codec, Transfer(plan, (), (), ()))
        return kept[which]
