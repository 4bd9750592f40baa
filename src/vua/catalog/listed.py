"""Catalogs of storages that can be listed, with only names, sizes and times of chunks.

The chunks are held in memory. Their order costs a header per chunk, read only where a command needs
it. :class:`ListedCatalog` works for any kind of storage; a subclass lists its chunks, reads a
header, deletes, and keeps marks.

:class:`StorageCatalog` serves any :class:`vua.storage.base.Storage`. A new storage gets `vua ls`,
`du`, `gc`, `rm`, `ttl`, `top`, `verify` and `explain` by it, and `vua pin` if it is a
:class:`PinnedStorage`, too::

    def opened(where: str, *, create: bool) -> Catalog:
        storages = {"<64 hex>": MyStorage(where)}  # by namespace
        return StorageCatalog(where, storages, describe=..., limits=MyLimits(where))

    register("mine", opened)  # now `vua gc mine://...` works
"""

from __future__ import annotations

import contextlib
import io
import itertools
import random
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar, runtime_checkable

from vua.capacity.limits import Limits, nbytes_of
from vua.capacity.prefix_tree import ChunkNode, PrefixTree, tree_of
from vua.capacity.removal import DeletionTotals
from vua.capacity.scan import Show
from vua.catalog.base import (
    Adoption,
    Ask,
    Catalog,
    Collection,
    Content,
    Item,
    NamespaceCatalog,
    NamespaceUse,
    OpenFile,
    PartUsage,
    Removal,
    Snapshot,
    Times,
    Use,
    resolve,
    size,
)
from vua.catalog.check import Check, Checker, ExpectedEntry, Verification
from vua.errors import ConfigError, EntryError
from vua.format.entry import MAX_HEADER_NBYTES
from vua.format.layout import KVLayout, Shard
from vua.format.parse import EntryInfo, parse_entry
from vua.security.keyring import KnownKeys
from vua.storage.base import Batch, Storage, parse_name
from vua.storage.description import Description
from vua.storage.local import SUFFIX
from vua.store.evidence import settled

__all__ = [
    "LimitStore",
    "ListedCatalog",
    "ListedChunk",
    "ListedNamespace",
    "PinnedStorage",
    "StorageCatalog",
    "StorageNamespace",
]

_SHORT: Final = 12
_AT_ONCE: Final = 256
"""Chunks whose headers are read between two progress reports."""


@dataclass(slots=True)
class ListedChunk:
    """A chunk, as listed."""

    name: str
    nbytes: int = 0
    used_s: float = 0.0
    """When the youngest of its entries was written, or renewed by a use."""
    paths: list[str] = field(default_factory=list)
    """Its entries, relative to the namespace."""
    shards: list[Shard | None] = field(default_factory=list)
    """The entries' shards."""
    marks: list[str] = field(default_factory=list)
    """Paths of empty objects beside them."""
    pins: list[str] = field(default_factory=list)
    """The chunks whose pins hold this one."""
    before: str | None = None
    """The preceding chunk: "" for a first or unreadable one, None if not known yet."""
    needed_s: float = 0.0
    """The youngest :attr:`used_s` of it and its descendants."""
    depth: int = 0
    """How many chunks precede it."""

    def add(self, path: str, nbytes: int, used_s: float, shard: Shard | None) -> None:
        self.nbytes += nbytes
        self.used_s = max(self.used_s, used_s)
        self.paths.append(path)
        self.shards.append(shard)


class ListedNamespace(NamespaceCatalog):
    """A namespace whose chunks were listed."""

    lists_shards = True

    def __init__(self, description: Description) -> None:
        self._description, self.name = description, description.name
        self.chunks: dict[str, ListedChunk] = {}
        """All chunks that have an entry, by name."""
        self.quarantine_nbytes = self.leftover_nbytes = 0

    @property
    def description(self) -> Description:
        """Its description as listed; headers are not read."""
        return self._description

    @property
    def layouts(self) -> tuple[KVLayout, ...]:
        return settled(self._description).layouts

    # -- what a kind of place does ----------------------------------------------------------------

    @abstractmethod
    def read_header(self, chunk: ListedChunk, path: str) -> EntryInfo | None:
        """Read an entry's header; None if it is unreadable or unsound."""

    @abstractmethod
    def write_pin(self, chunk: str, held: Sequence[str]) -> None:
        """Write a pin's mark at each chunk that it holds. Raises StorageError."""

    @abstractmethod
    def remove_pin(self, chunk: str, held: Sequence[str]) -> None:
        """Remove these marks. Raises StorageError."""

    def each(self, work: Callable[[ListedChunk], None], chunks: Sequence[ListedChunk]) -> None:
        """Call ``work`` for each chunk; concurrently if the storage answers slowly."""
        for one in chunks:
            work(one)

    # -- what follows from it ---------------------------------------------------------------------

    def matching(self, digits: str) -> list[str]:
        return sorted(name for name in self.chunks if name.startswith(digits))

    def holds(self, chunk: str) -> bool:
        return chunk in self.chunks

    def header(self, chunk: str) -> EntryInfo | None:
        one = self.chunks.get(chunk)
        return None if one is None else self.read_header(one, one.paths[0])

    def shards(self, chunk: str) -> list[Shard | None]:
        return list(self.chunks[chunk].shards)

    def snapshot(self, past: Snapshot | None = None) -> Snapshot:
        chunks, identity = self.chunks.values(), self._description.identity
        mean = sum(one.nbytes for one in chunks) / max(1, len(chunks))
        model = "" if identity is None else identity.name or identity.model
        found = Snapshot(self.name, model, chunk_nbytes=mean)
        found.add("", Times.of([*self.chunks], (int(one.used_s * 1e9) for one in chunks)), past)
        return found

    def tree(self, show: Show, past: PrefixTree | None = None) -> PrefixTree:
        """Read the headers of new chunks."""
        for _, rows in () if past is None else past.blocks():
            for row in rows:
                chunk = self.chunks.get(bytes(row["name"]).hex())
                if chunk is not None and chunk.before is None:
                    chunk.before = "" if row["is_first"] else bytes(row["before"]).hex()
        self.find_befores(show)
        return tree_of(
            (one.name, int(one.used_s * 1e9), _node(one)) for one in self.chunks.values()
        )

    def find_befores(self, show: Show) -> None:
        """Find each chunk's predecessor, its depth, and until when it is needed."""
        every = [one for one in self.chunks.values() if one.before is None]
        for first in range(0, len(every), _AT_ONCE):
            show(f"{self.name[:_SHORT]}: reading headers", first, len(every))
            self.each(self._find_before, every[first : first + _AT_ONCE])
        for chunk in self.chunks.values():
            chunk.needed_s = max(chunk.needed_s, chunk.used_s)
            for one in self.ancestors(chunk.name):
                at = self.chunks[one]
                if one != chunk.name and at.needed_s >= chunk.used_s:
                    break
                at.needed_s = max(at.needed_s, chunk.used_s)
        known: dict[str, int] = {"": -1}
        for name in self.chunks:
            new = list(itertools.takewhile(lambda one: one not in known, self.ancestors(name)))
            above = self.chunks[new[-1]].before or "" if new else ""
            for depth, one in enumerate(reversed(new), known.get(above, -1) + 1):
                known[one] = self.chunks[one].depth = depth

    def _find_before(self, chunk: ListedChunk) -> None:
        info = self.read_header(chunk, chunk.paths[0])
        chunk.before = (info.parent or "") if info is not None and info.start else ""

    def ancestors(self, chunk: str) -> Iterator[str]:
        """Read the headers that are not known yet."""
        seen: set[str] = set()
        while chunk in self.chunks and chunk not in seen:
            yield chunk
            seen.add(chunk)
            one = self.chunks[chunk]
            if one.before is None:
                self._find_before(one)
            chunk = one.before or ""

    def descendants(self, chunk: str, show: Show) -> list[str]:
        return self._following([chunk], show)

    def in_order(self, show: Show) -> list[str]:
        self.find_befores(show)
        return self._following([one.name for one in self.chunks.values() if not one.before], show)

    def _following(self, found: list[str], show: Show) -> list[str]:
        self.find_befores(show)
        children: dict[str, list[str]] = {}
        for one in self.chunks.values():
            if one.before:
                children.setdefault(one.before, []).append(one.name)
        for name in found:  # grows meanwhile, but ends even if the chain is a circle
            found += children.pop(name, [])
        return list(dict.fromkeys(found))

    def pin(self, chunk: str) -> int:
        held = list(self.ancestors(chunk))
        self.write_pin(chunk, held)
        return len(held)

    def unpin(self, chunk: str) -> int:
        held = list(self.ancestors(chunk))
        self.remove_pin(chunk, held)
        return len(held)

    def pins(self) -> dict[str, int]:
        held = Counter(pin for one in self.chunks.values() for pin in one.pins)
        return dict(sorted(held.items()))

    def use(self) -> NamespaceUse:
        chunks = self.chunks.values()
        times_ns = [int(one.used_s * 1e9) for one in chunks]
        return NamespaceUse(
            self.name,
            len(chunks),
            sum(one.nbytes for one in chunks),
            sum(bool(one.pins) for one in chunks),
            self.quarantine_nbytes,
            self.leftover_nbytes,
            min(times_ns, default=None),
            max(times_ns, default=None),
        )


N = TypeVar("N", bound=ListedNamespace)


class ListedCatalog(Catalog, Generic[N]):
    """A cache whose namespaces can be listed. A subclass lists and deletes."""

    keeps_own_ttls = False

    # -- what a kind of place does ----------------------------------------------------------------

    @abstractmethod
    def list_namespaces(self, show: Show) -> tuple[Sequence[N], Sequence[str]]:
        """List VUA's namespaces, and the names of everything else. Raises StorageError."""

    @abstractmethod
    def delete(
        self,
        chunks: Sequence[tuple[N, ListedChunk]],
        whole: Sequence[N] = (),
        *,
        dry_run: bool = False,
    ) -> int:
        """Delete chunks, in this order, and whole namespaces with all of VUA's files.

        Returns the number of objects.
        """

    @abstractmethod
    def write_bounds(self, bounds: Limits) -> None:
        """Replace ``bounds.json``. Raises StorageError."""

    def sweep(self, namespaces: Sequence[N], *, dry_run: bool) -> DeletionTotals:
        """Delete remains of a crash."""
        del namespaces, dry_run
        return DeletionTotals(0, 0)

    def note_befores(self, namespaces: Sequence[N]) -> None:
        """Write down what headers told about the order of chunks, for the next time."""

    def renew(self, chunks: Sequence[tuple[N, ListedChunk]]) -> None:
        """Set the time of chunks to now, if something else deletes by times."""

    def find_key_ids(self, chunks: Sequence[tuple[N, ListedChunk]], show: Show) -> list[set[str]]:
        """Return the ids of the keys that seal each chunk's entries: "" for an unsealed one."""
        found = []
        for number, (space, chunk) in enumerate(chunks):
            show("reading headers", number, len(chunks))
            found.append(seals(space, chunk))
        return found

    # -- what follows from it ---------------------------------------------------------------------

    @contextlib.contextmanager
    def namespaces(self, show: Show) -> Iterator[tuple[Sequence[N], Sequence[str]]]:
        yield self.list_namespaces(show)

    def is_local(self) -> bool:
        return False

    def use(self, show: Show) -> Use:
        found, strays = self.list_namespaces(show)
        rows, bounds = [one.use() for one in found], self.bounds()
        return Use(
            sum(one.chunks for one in rows),
            sum(one.nbytes for one in rows),
            exact=True,
            namespaces=rows,
            bounds=bounds,
            limits=self._limits(bounds),
            free_nbytes=None,
            strays=strays,
        )

    def _limits(self, limits: Limits) -> Mapping[str, float | None]:
        """Return limits in bytes and seconds; the limits of a disk are None."""
        most = None if limits.max_bytes is None else nbytes_of(limits.max_bytes, 0)
        return {"max_bytes": most, "min_free_bytes": None, "ttl_s": limits.ttl_s,
                "max_bytes_per_salt": None, "min_free_inodes": None}  # fmt: skip

    def limits(self) -> Mapping[str, float | None]:
        return self._limits(self.bounds())

    def own_ttls(self) -> int:
        """Return 0: chunks have no own times to live here."""
        return 0

    def keep(self, news: Mapping[str, object]) -> None:
        self.write_bounds(replace(self.bounds(), **news))  # type: ignore[arg-type] # checked there

    def collect(
        self, given: Limits, *, keep: bool = False, quick: bool = False,
        lost: Callable[[], frozenset[str]] | None = None, dry_run: bool = False,
        ask: Ask, show: Show,
    ) -> Collection:  # fmt: skip
        """Delete the least recently used; a chunk stays as long as one that follows it.

        Pinned chunks stay. They are renewed after half of their life, so that no lifecycle rule
        deletes them.
        """
        del quick
        began_s = time.monotonic()
        if given.min_free_bytes is not None or given.max_bytes_per_salt is not None:
            raise ConfigError(
                "--min-free and --max-per-salt do not apply to buckets; use --max-bytes or --ttl"
            )
        limits = self._stricter(given)
        found, strays = self.list_namespaces(show)
        found = [one for one in found if not one.description.later]  # of a later VUA
        every = [(space, chunk) for space in found for chunk in space.chunks.values()]
        total = sum(chunk.nbytes for _, chunk in every)
        most = total if limits.max_bytes is None else nbytes_of(limits.max_bytes, 0)
        now_s = time.time()
        before_s = 0.0 if limits.ttl_s is None else now_s - limits.ttl_s
        done = Collection(len(every), total, exact=True, within=True, limits=self._limits(limits),
                          strays=strays)  # fmt: skip
        doomed: list[tuple[N, ListedChunk]] = []
        if total > most or any(chunk.used_s < before_s for _, chunk in every):
            for space in found:
                space.find_befores(show)
            expired, evicted = _doomed(every, total - most, before_s)
            done.deleted["expired"], done.deleted["evicted"] = _sum(expired), _sum(evicted)
            doomed = expired + evicted
        if lost is not None:
            gone = {(space.name, chunk.name) for space, chunk in doomed}
            unread = [one for one in self._unreadable(every, lost, show)
                      if (one[0].name, one[1].name) not in gone]  # fmt: skip
            done.deleted["lost_keys"] = _sum(unread)
            doomed += unread
        freed = _sum(doomed)
        if doomed and not dry_run:
            ask(f"Delete {freed.chunks} chunks, {size(freed.nbytes)}, of {self.where}?")
            self.delete(doomed)
            for space, chunk in doomed:
                del space.chunks[chunk.name]
            self.note_befores(found)
        done.deleted["leftovers"] = self.sweep(found, dry_run=dry_run)
        if keep and not dry_run:
            self.keep({name: value for name, value in asdict(given).items() if value is not None})
        if limits.ttl_s is not None and not dry_run:
            half_s = now_s - limits.ttl_s / 2
            self.renew([one for one in every if one[1].pins and one[1].used_s < half_s])
        done.chunks, done.nbytes = done.chunks - freed.chunks, done.nbytes - freed.nbytes
        done.within = done.nbytes <= most
        done.pinned_nbytes = sum(chunk.nbytes for _, chunk in every if chunk.pins)
        done.seconds = time.monotonic() - began_s
        return done

    def _stricter(self, given: Limits) -> Limits:
        """Return the stricter of the given limits and those of ``bounds.json``."""
        both = (given, self.bounds())
        sizes = [nbytes_of(one.max_bytes, 0) for one in both if one.max_bytes is not None]
        times = [one.ttl_s for one in both if one.ttl_s is not None]
        return Limits(max_bytes=min(sizes, default=None), ttl_s=min(times, default=None))

    def _unreadable(
        self,
        every: Sequence[tuple[N, ListedChunk]],
        lost: Callable[[], frozenset[str]],
        show: Show,
    ) -> list[tuple[N, ListedChunk]]:
        """Return chunks sealed with none of the existing keys; includes keys made meanwhile."""
        found = self.find_key_ids(every, show)
        known = {"", *lost()}
        return [one for one, ids in zip(every, found, strict=True)
                if not one[1].pins and not known & ids]  # fmt: skip

    def remove(
        self, names: Sequence[str], *, everything: bool, force: bool, dry_run: bool, ask: Ask,
        show: Show,
    ) -> Removal:  # fmt: skip
        """Find what goes first, and delete it at once."""
        del everything  # without names it is everything
        found, strays = self.list_namespaces(show)
        picked = [resolve(found, name) for name in names] or [(one, "") for one in found]
        whole: dict[str, N] = {}
        some: dict[tuple[str, str], tuple[N, ListedChunk]] = {}
        kept: set[tuple[str, str]] = set()
        for space, chunk in picked:
            doomed = space.descendants(chunk, show) if chunk else list(space.chunks)
            held = set() if force else {name for name in doomed if space.chunks[name].pins}
            if not chunk and not held:
                whole[space.name] = space
                continue
            kept |= {(space.name, name) for name in held}
            some |= {(space.name, name): (space, space.chunks[name]) for name in doomed
                     if name not in held}  # fmt: skip
        alone = [one for one in some.values() if one[0].name not in whole]
        freed = _sum(alone)
        chunks = freed.chunks + sum(len(one.chunks) for one in whole.values())
        nbytes = freed.nbytes + sum(one.use().nbytes for one in whole.values())
        if (alone or whole) and not dry_run:
            ask(f"Delete {chunks} chunks, {size(nbytes)}, of {self.where}?")
        objects = self.delete(alone, [*whole.values()], dry_run=dry_run) if alone or whole else 0
        return Removal(chunks, nbytes, objects, len(kept), strays=strays)


def _node(chunk: ListedChunk) -> ChunkNode:
    return ChunkNode(
        chunk.before or "", b"", chunk.nbytes, len(chunk.paths), temporary=False,
        pinned=tuple(chunk.pins),
    )  # fmt: skip


def _sum(chunks: Sequence[tuple[N, ListedChunk]]) -> DeletionTotals:
    return DeletionTotals(len(chunks), sum(chunk.nbytes for _, chunk in chunks))


def _doomed(
    every: Sequence[tuple[N, ListedChunk]], excess: int, before_s: float
) -> tuple[list[tuple[N, ListedChunk]], list[tuple[N, ListedChunk]]]:
    """Return chunks older than ``before_s``, and further ones until ``excess`` bytes are freed.

    A chunk comes after the chunks that follow it in prompts, also if they were written earlier.
    """
    order = sorted(every, key=lambda one: (one[1].needed_s, -one[1].depth))
    free = [one for one in order if not one[1].pins]
    expired = [one for one in free if one[1].needed_s < before_s]
    nbytes, evicted = _sum(expired).nbytes, []
    for one in free[len(expired) :]:
        if nbytes >= excess:
            break
        evicted.append(one)
        nbytes += one[1].nbytes
    return expired, evicted


def seals(space: ListedNamespace, chunk: ListedChunk) -> set[str]:
    """Return the ids of the keys that seal a chunk's entries: "" if unsealed or unreadable."""
    infos = [space.read_header(chunk, path) for path in chunk.paths]
    return {one.seal_info.key_id if one is not None and one.kind else "" for one in infos}


@runtime_checkable
class PinnedStorage(Protocol):
    """A storage that keeps pins: pairs of a held chunk and the pinned chunk."""

    def pins(self) -> Sequence[tuple[str, str]]: ...

    def add_pins(self, pins: Sequence[tuple[str, str]]) -> None:
        """Keep pins. Raises OSError."""
        ...

    def remove_pins(self, pins: Sequence[tuple[str, str]]) -> None:
        """Forget pins, if present. Raises OSError."""
        ...


class LimitStore(Protocol):
    """Keeps limits, as ``bounds.json`` does in a directory."""

    def read(self) -> Limits:
        """Return the limits. Raises OSError."""
        ...

    def write(self, limits: Limits) -> None:
        """Replace them. Raises OSError."""
        ...


class StorageNamespace(ListedNamespace):
    """The entries of one storage. A path here is an entry's name, with the suffix of files."""

    def __init__(self, description: Description, storage: Storage) -> None:
        super().__init__(description)
        self.storage = storage
        self._nbytes: dict[str, int] = {}
        for entry in storage.list():
            name, shard = parse_name(entry.name)
            chunk = self.chunks.setdefault(name, ListedChunk(name))
            chunk.add(entry.name, entry.nbytes, entry.last_used_s, shard)
            self._nbytes[entry.name] = entry.nbytes
        for held, pinned in storage.pins() if isinstance(storage, PinnedStorage) else ():
            if held in self.chunks:
                self.chunks[held].pins.append(pinned)

    def read(self, name: str, most: int | None = None) -> tuple[bytes, bytes | None]:
        """Return an entry's first bytes, by default all, and its version. Raises OSError."""
        batch = Batch.of_bytes(name, self._nbytes[name], most)
        filled = self.storage.read(batch)
        if isinstance(filled.problem, EntryError):
            raise OSError(str(filled.problem)) from filled.problem
        if filled.problem is not None:
            raise filled.problem
        return bytes(batch.headers[0]), filled.version(0)

    def read_header(self, chunk: ListedChunk, path: str) -> EntryInfo | None:
        del chunk
        with contextlib.suppress(OSError, EntryError):
            return parse_entry(self.read(path, MAX_HEADER_NBYTES)[0])
        return None

    def listed(self, chunk: str) -> list[str]:
        return sorted(f"{path.partition('/')[2]}{SUFFIX}" for path in self.chunks[chunk].paths)

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[OpenFile]:
        name = path[3:].removesuffix(SUFFIX)
        if name not in self._nbytes:
            raise FileNotFoundError(path)
        yield OpenFile(io.BytesIO(self.read(name)[0]))

    def write_pin(self, chunk: str, held: Sequence[str]) -> None:
        """As in the base class. Raises ConfigError if the storage keeps no pins."""
        self._pinned_storage().add_pins([(one, chunk) for one in held])

    def remove_pin(self, chunk: str, held: Sequence[str]) -> None:
        """As in the base class. Raises ConfigError if the storage keeps no pins."""
        self._pinned_storage().remove_pins([(one, chunk) for one in held])

    def _pinned_storage(self) -> PinnedStorage:
        if isinstance(self.storage, PinnedStorage):
            return self.storage
        raise ConfigError(f"{type(self.storage).__name__} keeps no pins")


class StorageCatalog(ListedCatalog[StorageNamespace]):
    """A cache whose namespaces are in storages."""

    def __init__(
        self,
        where: str,
        storages: Mapping[str, Storage],
        describe: Callable[[str], Description],
        limits: LimitStore | None = None,
    ) -> None:
        """Use open storages.

        Args:
            where: the operator's name of the cache.
            storages: by namespace, 64 hex.
            describe: returns a namespace's description.
            limits: keeps limits; by default each `vua gc` is given them.
        """
        super().__init__(where, Path(where.partition("://")[2] or where))
        self._storages, self._describe, self._limit_store = storages, describe, limits

    def contents(self) -> tuple[list[Description], list[str]]:
        return [self._describe(name) for name in sorted(self._storages)], []

    def state(self, description: Description) -> str:
        return "ok" if description.layout is not None else "missing"

    def list_namespaces(self, show: Show) -> tuple[Sequence[StorageNamespace], Sequence[str]]:
        del show
        found, others = self.contents()
        return [StorageNamespace(one, self._storages[one.name]) for one in found], others

    def content(self, description: Description, show: Show, *, long: bool = False) -> Content:
        del show
        content = Content(description, self.state(description))
        items = []
        for entry in self._storages[description.name].list():
            chunk, shard = parse_name(entry.name)
            path = f"{chunk[:2]}/{entry.name}{SUFFIX}"
            items.append(
                Item(path, "entry", entry.nbytes, entry.last_used_s, chunk=chunk, shard=shard)
            )
        order = {chunk: at for at, chunk in enumerate(dict.fromkeys(one.chunk for one in items))}
        content.add(PartUsage.of(sorted(items, key=lambda one: order[one.chunk]), long=long))
        return content

    def claim(self) -> None:
        """Do nothing: a storage holds nothing else."""

    def adopt(self, ask: Callable[[Adoption], None]) -> Adoption:
        """Mark nothing: a storage holds nothing else."""
        del ask
        return Adoption(was_marked=True, namespaces=sorted(self._storages), others=(), chunks=None,
                        nbytes=None)  # fmt: skip

    def bounds(self) -> Limits:
        return Limits() if self._limit_store is None else self._limit_store.read()

    def write_bounds(self, bounds: Limits) -> None:
        """Store the limits. Raises ConfigError without a store of limits."""
        if self._limit_store is None:
            raise ConfigError(f"{self.where} keeps no limits; give them to each `vua gc`")
        self._limit_store.write(bounds)

    def delete(
        self,
        chunks: Sequence[tuple[StorageNamespace, ListedChunk]],
        whole: Sequence[StorageNamespace] = (),
        *,
        dry_run: bool = False,
    ) -> int:
        every = [*chunks, *((space, one) for space in whole for one in space.chunks.values())]
        objects = 0
        for space, chunk in every:
            for name in chunk.paths if not dry_run else ():
                space.storage.delete(name)
            if not dry_run and chunk.pins and isinstance(space.storage, PinnedStorage):
                space.storage.remove_pins([(chunk.name, one) for one in chunk.pins])
            objects += len(chunk.paths)
        return objects

    def verify(
        self, description: Description, keys: KnownKeys, share: float, show: Show, *, repair: bool
    ) -> Verification:
        space = StorageNamespace(description, self._storages[description.name])
        result, checker = Verification.of(description, self.state(description)), Checker(keys)
        names = sorted(space.chunks)
        picked = random.sample(names, max(1, round(share * len(names)))) if names else []
        for number, name in enumerate(sorted(picked), 1):
            chunk = space.chunks[name]
            for path, shard in zip(chunk.paths, chunk.shards, strict=True):
                version = None
                try:
                    data, version = space.read(path)
                    place = ExpectedEntry(description.name, name, shard)
                    check = checker.check_bytes(memoryview(bytearray(data)), place)
                except OSError as problem:
                    check = Check("error", (str(problem),), 0)
                result.add(path, check)
                if repair and check.outcome in ("corrupt", "foreign"):
                    result.removed += space.storage.delete(path, version)
            show(description.name[:12], number, len(picked), amount=result.nbytes)
        if wrong := result.wrong_description():
            result.problems.append(("", "corrupt", wrong))
        return result
