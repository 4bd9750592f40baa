"""Chunks of one namespace: look up, load. :mod:`vua.store.writer` saves them.

A :class:`Store` joins names (`keys`), coordinates (`layout`), bytes (`entry`) and a `storage`. It
returns only what it has verified: header, identity, position and every block's checksum. Damaged,
foreign or missing entries are misses.

:class:`Quarantine` is the only place where damage becomes a miss: it counts and logs it, and
removes a file only if it is proven useless to every reader, so that the next save replaces it.

:class:`Search` looks up chunks if an answer takes long. Bisection asks one question after the
other, at 15 ms each 165 ms for a prompt of 131k tokens; with 16 concurrent questions it takes three
rounds.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from vua.capacity.reclaim import Capacity
from vua.errors import EntryError, ForeignEntryError, InputError
from vua.format.entry import EntryCodec, entry_plan
from vua.format.keys import ChunkKey, Keys
from vua.format.layout import KVLayout, Shard, cover
from vua.io.forks import new_lock
from vua.io.memory import EntryPlan
from vua.native import MemoryMap, Transfer
from vua.security.keyring import Keyring, NoKeyError
from vua.security.settings import Security
from vua.storage.base import ReadResult, Storage, entry_name, parse_name
from vua.storage.local import LocalStorage
from vua.store.entry_reader import EntryReader, UnbelievedError

if TYPE_CHECKING:
    from vua.capacity.bucket import BucketCapacity
    from vua.security.seal import Seal

_PRESENT_S: Final = 600.0
"""How long a found entry counts as present; a load that misses it forgets it at once. A missing one
is asked for anew: other processes store meanwhile."""
_LISTED_S: Final = 10.0
"""Interval of checking in which shards a chunk is stored: listing is expensive."""
_MOST: Final = 1 << 17


class Search:
    """Looks for the chunks of one store. Thread-safe; each process has its own memory."""

    def __init__(
        self, storage: Storage, layout: KVLayout, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._storage, self._layout, self._clock = storage, layout, clock
        self._present: dict[str, float] = {}
        """Until when an entry that was found counts as present, by name."""
        self._covers: list[tuple[Shard, ...]] = []
        self._listed_s = -_LISTED_S

    def longest(self, keys: Keys, wanted: Sequence[Shard]) -> int:
        """Return how many leading chunks are stored, in O(log n) rounds; see `Store.lookup`."""
        found = self._longest(keys, wanted)
        while found < len(keys) and self._discovers(keys[found], wanted):
            found = self._longest(keys, wanted)
        return found

    def holds(self, keys: Sequence[ChunkKey], wanted: Sequence[Shard]) -> list[bool]:
        """Whether each chunk is stored in ``wanted`` or in other writers' shards: one round."""
        covers = [tuple(wanted), *(one for one in self._covers if one != tuple(wanted))]
        names = [[[entry_name(key.name, shard) for shard in one] for one in covers] for key in keys]
        now_s = self._clock()
        every = dict.fromkeys(name for each in names for one in each for name in one)
        there = {name for name in every if now_s < self._present.get(name, now_s)}
        if unknown := [name for name in every if name not in there]:
            answers = zip(unknown, self._storage.exists(unknown), strict=True)
            there |= (found := {name for name, is_there in answers if is_there})
            self._remember(found, now_s)
        return [any(there.issuperset(one) for one in each) for each in names]

    @property
    def covers(self) -> tuple[tuple[Shard, ...], ...]:
        """Shards that other writers store chunks in, as lookups have found them."""
        return tuple(self._covers)

    def wrote(self, name: str) -> None:
        """Note that an entry exists now."""
        self._remember((name,), self._clock())

    def forget(self, name: str) -> None:
        """Note that an entry does not exist after all."""
        self._present.pop(name, None)

    def _longest(self, keys: Keys, wanted: Sequence[Shard]) -> int:
        present, absent = 0, len(keys) + 1  # chunk counts: known good, known bad
        counts = sorted({1, len(keys), *self._between(0, absent, 2)}) if len(keys) else []
        while counts:
            held = self.holds([keys[count - 1] for count in counts], wanted)
            present = max([present, *(c for c, there in zip(counts, held, strict=True) if there)])
            later = [c for c, there in zip(counts, held, strict=True) if not there and c > present]
            absent = min([absent, *later])
            if counts[0] == 1 and not held[0]:
                return 0
            counts = self._between(present, absent)
        return present

    def _between(self, present: int, absent: int, less: int = 0) -> list[int]:
        parts = self._storage.capabilities.probes - less + 1
        gap = absent - present
        picked = {present + gap * part // parts for part in range(1, parts)}
        return sorted(picked - {present, absent})

    def _discovers(self, key: ChunkKey, wanted: Sequence[Shard]) -> bool:
        now_s = self._clock()
        if now_s - self._listed_s < _LISTED_S:
            return False
        self._listed_s = now_s
        listed = (parse_name(entry.name)[1] for entry in self._storage.list(f"{key.name}/"))
        found = cover(self._layout.full, [shard for shard in listed if shard is not None])
        shards = tuple(stored for stored, _ in found or ())
        if not shards or shards == tuple(wanted) or shards in self._covers:
            return False
        self._covers.append(shards)
        self._listed_s -= _LISTED_S  # there may be more kinds
        return True

    def _remember(self, names: Collection[str], now_s: float) -> None:
        if len(self._present) + len(names) > _MOST:
            self._present = {}
        self._present.update(dict.fromkeys(names, now_s + _PRESENT_S))


_WARN_INTERVAL_S: Final = 60.0
_FAILURES: Final = 3
"""Consecutive reads that fail with EIO until a file is removed."""
_MAX_FAILED: Final = 1024


class Quarantine:
    """Judges the files of one storage that could not be loaded. Thread-safe."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._failed: dict[str, int] = {}
        self._warned_s = -_WARN_INTERVAL_S
        self.counts: Counter[str] = Counter()
        """Events so far, see :attr:`vua.store.store.Store.counts`."""
        self._lock = new_lock()

    def count(self, event: str, by: int = 1) -> None:
        with self._lock:
            self.counts[event] += by

    def reject(
        self, key: ChunkKey, shard: Shard, version: bytes | None, problem: EntryError
    ) -> str:
        """Log a wrong file, and remove it if it is damaged.

        ``version`` is that of the file that was read. Returns ``corrupt`` or ``foreign``.
        """
        reason = "foreign" if isinstance(problem, ForeignEntryError) else "corrupt"
        if isinstance(problem, ForeignEntryError) and not problem.misplaced:
            fate = "; it may be right and this reader wrong, so it stays"
        elif self._storage.delete(entry_name(key.name, shard), version):
            fate = " and was taken out of sight"
        else:
            fate = "; it could not be removed"
        name = key.name[:12]
        log.warning("%s entry %s/%s is a miss%s: %s", reason, name, shard.name, fate, problem)
        return reason

    def read_failed(
        self, key: ChunkKey, shard: Shard, version: bytes | None, problem: OSError
    ) -> None:
        """Log a failed read, and remove a file with a bad sector, so that it is stored anew.

        Warns at most once a minute: a lost mount fails every read. ``version`` is that of the file,
        None if it could not even be opened.
        """
        if version is not None:
            with self._lock:
                self._failed = {} if len(self._failed) > _MAX_FAILED else self._failed
                times = self._failed.get(key.name, 0) + (problem.errno == errno.EIO)
                self._failed[key.name] = times
            name = entry_name(key.name, shard)
            if times >= _FAILURES and self._storage.delete(name, version):
                log.warning(
                    "chunk %s failed %d reads and was taken out of sight", key.name[:12], times
                )
        now_s = time.monotonic()
        often = now_s - self._warned_s < _WARN_INTERVAL_S
        self._warned_s = self._warned_s if often else now_s
        level = logging.DEBUG if often else logging.WARNING
        log.log(level, "chunk %s could not be read, a miss: %s", key.name[:12], problem)

    def loaded(self, keys: Keys, chunks: int) -> None:
        """Count the first ``chunks`` of ``keys``, which were read well; ends a row of failures."""
        self.count("chunks_loaded", chunks)
        if self._failed:  # only failures in a row count
            for place in range(chunks):
                self._failed.pop(keys[place].name, None)


log = logging.getLogger(__name__)

_MOST_REFUSED: Final = 1 << 10
UNJUDGED: Final = ("error", "locked", "writer")
"""Reasons for a miss (:attr:`LoadResult.reason`) that say nothing about the file."""


class LoadResult(NamedTuple):
    """The result of a load."""

    chunks: int
    """Leading chunks that are in memory and verified; memory after them is undefined."""
    reason: str | None = None
    """Why it stopped early: missing, corrupt, foreign, locked, error or writer. ``writer``: the
    next chunk's writer is not trusted."""


class Store:
    """Finds and loads the chunks of one namespace. Safe for threads, processes and hosts."""

    def __init__(
        self,
        storage: Storage,
        namespace: str,
        layout: KVLayout,
        capacity: Capacity | BucketCapacity | None = None,
        keyring: Keyring | None = None,
    ) -> None:
        """Use ``storage`` for chunks of ``layout`` in ``namespace`` (64 hex).

        With the storage's ``capacity`` the cache stays within its limits; with the namespace's
        ``keyring`` files are sealed.
        """
        self.storage, self.namespace, self.layout = storage, namespace, layout
        self.capacity = capacity
        self.keyring = keyring or Keyring(namespace, Security())
        self._codecs: dict[tuple[Shard, str], EntryCodec] = {}
        self._plans: dict[tuple[Shard, Shard, Shard, int, str], EntryPlan] = {}
        self._last_cover: dict[Shard, list[tuple[Shard, Shard]]] = {}
        self.search = Search(storage, layout) if storage.capabilities.probes > 1 else None
        self.quarantine = Quarantine(storage)
        self.counts: Counter[str] = self.quarantine.counts
        """Events so far: chunks_loaded, chunks_saved, chunks_present, chunks_refused, missing,
        corrupt, foreign, locked, error, writer."""
        self.refused: dict[bytes, bytes] = {}
        """Writers of chunks that loads refused, by prefix hash; the reader removes them."""

    @property
    def files(self) -> LocalStorage | None:
        """The nearest storage of files, if any: the one that a page cache may hold."""
        first = getattr(self.storage, "near", self.storage)  # of a tiered one
        return first if isinstance(first, LocalStorage) else None

    def close(self) -> None:
        """Finish pending work, within some seconds; a second call does nothing."""
        if self.capacity is not None:
            self.capacity.close()

    def codec(self, shard: Shard, kind: str = "") -> EntryCodec:
        """Return the codec of files of ``shard``, with a ``kind`` of seal if any."""
        codec = self._codecs.get((shard, kind))
        if codec is None:
            codec = EntryCodec(self.namespace, self.layout, shard, kind)
            codec = self._codecs.setdefault((shard, kind), codec)
        return codec

    def transfer(
        self, stored: Shard, taken: Shard, target: Shard, memory: MemoryMap, kind: str = ""
    ) -> Transfer:
        """Return how ``taken`` moves between files, of a ``kind`` of seal, and memory."""
        which = (stored, taken, target, memory.segment_tokens, kind)
        plan = self._plans.get(which)
        if plan is None:
            plan = entry_plan(self.codec(stored, kind), taken, target, memory.segment_tokens)
            plan = self._plans.setdefault(which, plan)
        return Transfer(plan, memory)

    # -- lookup -------------------------------------------------------------------------------

    def lookup(self, keys: Keys, shards: Sequence[Shard] | None = None) -> int:
        """Return how many leading chunks of ``keys`` are stored, in O(log n) probes.

        Assumes that chunks are stored front to back: a hole is found by the load, not here. The
        result is a hint; only a load tells what can be loaded. Store from what the load returned,
        not from this: then the hole is filled.

        Args:
            shards: the files that this kind of engine writes, probed first; by default the whole
                model. Chunks stored in other shards that cover the model count as well.
        """
        if self.search is not None:
            return self.search.longest(keys, shards or [self.layout.full])
        written = [f"/{shard.name}" for shard in shards or (self.layout.full,)]
        if not len(keys) or not self._holds(keys[0].name, written):
            return 0
        present, absent = 1, len(keys) + 1  # chunk counts: known good, known bad
        probe = len(keys)
        while absent - present > 1:
            if self._holds(keys[probe - 1].name, written):
                present = probe
            else:
                absent = probe
            probe = (present + absent) // 2
        return present

    def holds(self, key: ChunkKey, wanted: Sequence[Shard]) -> bool:
        """Whether a chunk is stored: in the files ``wanted``, or in any that cover the model."""
        if self.search is not None:
            return self.search.holds([key], wanted)[0]
        return self._holds(key.name, [f"/{shard.name}" for shard in wanted])

    def _holds(self, chunk: str, written: Sequence[str]) -> bool:
        if all(self.storage.exists([chunk + suffix for suffix in written])):
            return True
        return cover(self.layout.full, self.shards(chunk)) is not None

    def shards(self, chunk: str) -> Sequence[Shard]:
        """Return the stored shards of a chunk, none if it is missing."""
        found = (parse_name(entry.name)[1] for entry in self.storage.list(f"{chunk}/"))
        return [shard for shard in found if shard is not None]

    def used(self, keys: Keys, chunks: int, *, wait: bool = False, storing: bool = False) -> None:
        if self.capacity is not None:
            self.capacity.used(keys, chunks, wait=wait, storing=storing)

    # -- load ---------------------------------------------------------------------------------

    def load(
        self, keys: Keys, memory: MemoryMap, *, target: Shard | None = None, weed: bool = False
    ) -> LoadResult:
        """Read chunks straight into memory, once; see :class:`Loader`."""
        return Loader(self, memory, target=target).load(keys, weed=weed)


class Loader:
    """Loads into one memory map, and keeps its plans for it. Not thread-safe."""

    def __init__(self, store: Store, memory: MemoryMap, *, target: Shard | None = None) -> None:
        """Load into writable ``memory``, which holds ``target``: by default the whole model."""
        self._store, self._memory, self._target = store, memory, target or store.layout.full
        self.chunks = memory.chunks(store.layout.chunk_tokens)
        self._readers: dict[tuple[Shard, Shard, str], EntryReader] = {}
        self._seal: Seal | None = None
        self._follow(store._last_cover.get(self._target) or [(self._target, self._target)])

    def load(
        self, keys: Keys, believed: Container[bytes] | None = None, *, weed: bool = False
    ) -> LoadResult:
        """Read chunks straight into memory, in order, up to the first that cannot be loaded.

        Args:
            keys: the chunks; the i-th goes to chunk slot i of the memory map.
            believed: names of trusted writers; by default all.
            weed: also read what follows a bad chunk, so that all damage is removed before the
                prompt is stored again. Otherwise each request would find, and repair, one chunk.

        Never raises for the state of the storage: the result's ``reason`` says it.
        """
        if len(keys) > self.chunks:
            raise InputError(f"{len(keys)} chunks do not fit into memory for {self.chunks}")
        store = self._store
        try:
            self._unlock(keys[0].tenant if len(keys) else "")
        except NoKeyError as problem:
            store.quarantine.count("locked")
            store.keyring.faults.tell(problem, "nothing is loaded")
            return LoadResult(0, "locked")
        chunks, reason = self._load(keys, 0, believed)
        store.quarantine.loaded(keys, chunks)
        log.debug("loaded %d of %d chunks of %s", chunks, len(keys), self._target.name)
        at, why = chunks, reason
        while weed and why is not None and why not in UNJUDGED:
            at, why = self._load(keys, at + 1, believed)
        return LoadResult(chunks, reason)

    def _load(
        self, keys: Keys, first: int, believed: Container[bytes] | None
    ) -> tuple[int, str | None]:
        store, chunks = self._store, first
        while chunks < len(keys):
            got, bad = ReadResult(len(keys) - chunks), self._target
            for shard, reader in self._route:
                run = [keys[at] for at in range(chunks, chunks + got.count)]
                found = reader.read(run, chunks, self._seal, believed)
                if found.problem is not None:
                    got, bad = found, shard
            chunks += got.count
            if got.problem is not None:
                reason = self._miss(keys[chunks], bad, got.problem, got.version(got.count))
                if reason is not None:
                    store.quarantine.count(reason)
                    return chunks, reason
        return chunks, None

    def load_cached(self, keys: Keys, believed: Container[bytes] | None = None) -> int:
        """Load leading chunks that need no waiting; return how many. Nothing is judged.

        Into ``cached`` memory. To learn why it stopped, call :meth:`load` with other memory.
        """
        store = self._store
        if not len(keys):
            return 0
        cover = store._last_cover.get(self._target, self._cover)
        if cover != self._cover:  # another loader found where chunks lie
            self._follow(cover)
        if store.files is None or len(self._route) > 1 or store.keyring.seals(keys[0].tenant):
            return 0
        run = [keys[at] for at in range(len(keys))]
        chunks = self._route[0][1].read(run, believed=believed).count
        store.quarantine.loaded(keys, chunks)
        return chunks

    def _unlock(self, tenant: str) -> None:
        before, self._seal = self._seal, self._store.keyring.seal(tenant)
        if (before and before.kind) != (self._seal and self._seal.kind):
            self._follow(self._cover)

    def _miss(
        self, key: ChunkKey, shard: Shard, problem: Exception, version: bytes | None
    ) -> str | None:
        """Return why a chunk cannot be loaded; None if it may be in other shards."""
        quarantine = self._store.quarantine
        if self._store.search is not None:
            self._store.search.forget(entry_name(key.name, shard))
        if isinstance(problem, FileNotFoundError):
            found = cover(self._target, self._store.shards(key.name))
            if found is None or found == self._cover:
                return "missing"
            self._store._last_cover[self._target] = found
            self._follow(found)
            return None
        if isinstance(problem, UnbelievedError):
            if len(self._store.refused) < _MOST_REFUSED:
                self._store.refused[key.prefix_hash] = problem.writer
            return "writer"
        if isinstance(problem, EntryError):
            return quarantine.reject(key, shard, version, problem)
        if isinstance(problem, OSError):
            quarantine.read_failed(key, shard, version, problem)
            return "error"
        log.warning("chunk %s has an untrusted writer, a miss: %s", key.name[:12], problem)
        return "foreign"

    def _follow(self, cover: list[tuple[Shard, Shard]]) -> None:
        store, kind = self._store, self._seal.kind if self._seal else ""
        storage = store.files if self._memory.cached and store.files else store.storage
        for stored, taken in cover:
            if (stored, taken, kind) not in self._readers:
                transfer = store.transfer(stored, taken, self._target, self._memory, kind)
                reader = EntryReader(storage, store.codec(stored, kind), transfer)
                self._readers[stored, taken, kind] = reader
        self._cover = cover
        self._route = [(stored, self._readers[stored, taken, kind]) for stored, taken in cover]
