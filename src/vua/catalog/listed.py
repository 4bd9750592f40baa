"""A catalog of what can be listed, and tells no more of a chunk than names, sizes and times.

The chunks are held in memory. Which chunk follows which costs a header per chunk, which is read
where a command needs it. What is here works for any kind of place; what is left to it is to list
its chunks, to read a header, to delete, and to keep marks.

The catalog of any :class:`vua.storage.base.Storage`: what lists and deletes entries is enough.

A new storage gets `vua ls`, `du`, `gc`, `rm`, `ttl`, `top`, `verify` and `explain`'s names by it,
and `vua pin` where it is a :class:`PinnedStorage`, too::

    def opened(where: str, *, create: bool) -> Catalog:
        storages = {"<64 hex>": MyStorage(where)}  # by namespace
        return StorageCatalog(where, storages, describe=..., limits=MyLimits(where))

    register("mine", opened)  # now `vua gc mine://...` works
"""

from __future__ import annotations

import contextlib
import io
import random
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar, runtime_checkable

from vua.capacity.limits import Limits, nbytes_of
from vua.capacity.removal import Freed
from vua.capacity.scan import Show
from vua.catalog.base import (
    Adoption,
    Ask,
    Catalog,
    Collection,
    Content,
    Counted,
    Item,
    Links,
    Look,
    NamespaceCatalog,
    NamespaceUse,
    OpenFile,
    Removal,
    Use,
    resolve,
    size,
)
from vua.catalog.check import Check, Checker, Place, Verification
from vua.errors import ConfigError, EntryError
from vua.format.entry import MAX_HEADER_NBYTES
from vua.format.layout import KVLayout, Shard
from vua.format.parse import EntryInfo, parse_entry
from vua.io.plan import header_plan
from vua.native import Transfer
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
"""Chunks whose headers are read between two words on how far it is."""


@dataclass(slots=True)
class ListedChunk:
    """A chunk, as it was listed."""

    name: str
    nbytes: int = 0
    used_s: float = 0.0
    """When the youngest of its entries was written, or renewed by a use."""
    paths: list[str] = field(default_factory=list)
    """Its entries, relative to the namespace."""
    shards: list[Shard | None] = field(default_factory=list)
    """Theirs."""
    marks: list[str] = field(default_factory=list)
    """Paths of empty objects beside them."""
    pins: list[str] = field(default_factory=list)
    """The chunks whose pins hold this one."""
    before: str | None = None
    """The chunk before it: "" for a first one or where it cannot be read, None if not known yet."""
    needed_s: float = 0.0
    """The youngest :attr:`used_s` of it and of all that follows it."""

    def add(self, path: str, nbytes: int, used_s: float, shard: Shard | None) -> None:
        """Note an entry."""
        self.nbytes += nbytes
        self.used_s = max(self.used_s, used_s)
        self.paths.append(path)
        self.shards.append(shard)


class ListedNamespace(NamespaceCatalog):
    """A namespace whose chunks were listed."""

    def __init__(self, description: Description) -> None:
        """Begin with no chunks."""
        self._description, self.name = description, description.name
        self.chunks: dict[str, ListedChunk] = {}
        """By name: all that have an entry."""
        self.quarantine_nbytes = self.leftover_nbytes = 0

    @property
    def description(self) -> Description:
        """Return it as it was listed; headers are not read."""
        return self._description

    @property
    def layouts(self) -> tuple[KVLayout, ...]:
        """Read some headers."""
        return settled(self._description).layouts

    # -- what a kind of place does ----------------------------------------------------------------

    @abstractmethod
    def read_header(self, chunk: ListedChunk, path: str) -> EntryInfo | None:
        """Read what an entry's header says; None where it cannot be read or is not sound."""

    @abstractmethod
    def write_pin(self, chunk: str, held: Sequence[str]) -> None:
        """Leave the mark of a chunk's pin at each chunk that it holds. Raises StorageError."""

    @abstractmethod
    def remove_pin(self, chunk: str, held: Sequence[str]) -> None:
        """Remove these marks. Raises StorageError."""

    def each(self, work: Callable[[ListedChunk], None], chunks: Sequence[ListedChunk]) -> None:
        """Do something with each chunk, several at a time where a place answers slowly."""
        for one in chunks:
            work(one)

    # -- what follows from it ---------------------------------------------------------------------

    def matching(self, digits: str) -> list[str]:
        """Look through the list."""
        return sorted(name for name in self.chunks if name.startswith(digits))

    def holds(self, chunk: str) -> bool:
        """Look into the list."""
        return chunk in self.chunks

    def header(self, chunk: str) -> EntryInfo | None:
        """Read the first one."""
        one = self.chunks.get(chunk)
        return None if one is None else self.read_header(one, one.paths[0])

    def shards(self, chunk: str) -> list[Shard | None]:
        """Look into the list."""
        return list(self.chunks[chunk].shards)

    def look(self) -> Look:
        """Return what was listed."""
        chunks, identity = self.chunks.values(), self._description.identity
        mtimes_ns = {bytes.fromhex(one.name): int(one.used_s * 1e9) for one in chunks}
        mean = sum(one.nbytes for one in chunks) / max(1, len(chunks))
        model = "" if identity is None else identity.name or identity.model
        return Look(self.name, model, mtimes_ns, mean, {})

    def links(self, show: Show, past: Links | None = None) -> Links:
        """Read the headers of chunks that are new."""
        for name, chunk in self.chunks.items():
            if past is not None and chunk.before is None:
                chunk.before = past.befores.get(name)
        order = self.in_order(show)
        befores = {name: chunk.before for name, chunk in self.chunks.items()}
        mtimes_ns = {name: int(chunk.used_s * 1e9) for name, chunk in self.chunks.items()}
        return Links(order, befores, mtimes_ns)

    def find_befores(self, show: Show) -> None:
        """Find out which chunk follows which, and until when each is needed."""
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
        """Read all headers."""
        return self._following([chunk], show)

    def in_order(self, show: Show) -> list[str]:
        """Read all headers."""
        self.find_befores(show)
        return self._following([one.name for one in self.chunks.values() if not one.before], show)

    def _following(self, found: list[str], show: Show) -> list[str]:
        self.find_befores(show)
        children: dict[str, list[str]] = {}
        for one in self.chunks.values():
            if one.before:
                children.setdefault(one.before, []).append(one.name)
        for name in found:  # grows meanwhile, not for ever where it leads in a circle
            found += children.pop(name, [])
        return list(dict.fromkeys(found))

    def pin(self, chunk: str) -> int:
        """Mark a chunk and all before it."""
        held = list(self.ancestors(chunk))
        self.write_pin(chunk, held)
        return len(held)

    def unpin(self, chunk: str) -> int:
        """Remove the marks."""
        held = list(self.ancestors(chunk))
        self.remove_pin(chunk, held)
        return len(held)

    def pins(self) -> dict[str, int]:
        """Count the marks that were listed."""
        held = Counter(pin for one in self.chunks.values() for pin in one.pins)
        return dict(sorted(held.items()))

    def use(self) -> NamespaceUse:
        """Add up what was listed."""
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
        """List the namespaces of VUA, and name what is not of VUA. Raises StorageError."""

    @abstractmethod
    def delete(
        self,
        chunks: Sequence[tuple[N, ListedChunk]],
        whole: Sequence[N] = (),
        *,
        dry_run: bool = False,
    ) -> int:
        """Delete chunks, in this order, and whole namespaces with all of VUA in them.

        Returns how many objects those are.
        """

    @abstractmethod
    def write_bounds(self, bounds: Limits) -> None:
        """Replace ``bounds.json``. Raises StorageError."""

    def sweep(self, namespaces: Sequence[N], *, dry_run: bool) -> Freed:
        """Delete what a crash left."""
        del namespaces, dry_run
        return Freed(0, 0)

    def renew(self, chunks: Sequence[tuple[N, ListedChunk]]) -> None:
        """Give chunks that stay the time of now, where something else deletes by times."""

    def find_key_ids(self, chunks: Sequence[tuple[N, ListedChunk]], show: Show) -> list[set[str]]:
        """Return by which keys each chunk's entries are sealed: "" where one is not sealed."""
        found = []
        for number, (space, chunk) in enumerate(chunks):
            show("reading headers", number, len(chunks))
            found.append(seals(space, chunk))
        return found

    # -- what follows from it ---------------------------------------------------------------------

    @contextlib.contextmanager
    def namespaces(self, show: Show) -> Iterator[tuple[Sequence[N], Sequence[str]]]:
        """List them."""
        yield self.list_namespaces(show)

    def is_local(self) -> bool:
        """Assume that other hosts reach it."""
        return False

    def use(self, show: Show) -> Use:
        """Add up what is listed."""
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
        """Limits in bytes and seconds; the limits of a disk are None."""
        most = None if limits.max_bytes is None else nbytes_of(limits.max_bytes, 0)
        return {"max_bytes": most, "min_free_bytes": None, "ttl_s": limits.ttl_s,
                "max_bytes_per_salt": None, "min_free_inodes": None}  # fmt: skip

    def limits(self) -> Mapping[str, float | None]:
        """Return those that are kept with the cache."""
        return self._limits(self.bounds())

    def own_ttls(self) -> int:
        """Count none: chunks have no times to live of their own here."""
        return 0

    def keep(self, news: Mapping[str, object]) -> None:
        """Replace the file."""
        self.write_bounds(replace(self.bounds(), **news))  # type: ignore[arg-type] # checked there

    def collect(
        self, said: Limits, *, keep: bool = False, quick: bool = False,
        lost: Callable[[], frozenset[str]] | None = None, dry_run: bool = False,
        ask: Ask, show: Show,
    ) -> Collection:  # fmt: skip
        """Delete what was not used for longest; a chunk stays as long as one that follows it.

        Pinned ones stay. They are renewed where half of their life has passed, so that no rule of
        the place deletes them.
        """
        del quick
        began_s = time.monotonic()
        if said.min_free_bytes is not None or said.max_bytes_per_salt is not None:
            raise ConfigError(
                "a bucket has no free space, and nobody counts salts there: give --max-bytes or "
                "--ttl"
            )
        limits = self._stricter(said)
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
        done.deleted["leftovers"] = self.sweep(found, dry_run=dry_run)
        if keep and not dry_run:
            self.keep({name: value for name, value in asdict(said).items() if value is not None})
        if limits.ttl_s is not None and not dry_run:
            half_s = now_s - limits.ttl_s / 2
            self.renew([one for one in every if one[1].pins and one[1].used_s < half_s])
        done.chunks, done.nbytes = done.chunks - freed.chunks, done.nbytes - freed.nbytes
        done.within = done.nbytes <= most
        done.pinned_nbytes = sum(chunk.nbytes for _, chunk in every if chunk.pins)
        done.seconds = time.monotonic() - began_s
        return done

    def _stricter(self, said: Limits) -> Limits:
        """Return the stricter of what is said and of what ``bounds.json`` says."""
        both = (said, self.bounds())
        sizes = [nbytes_of(one.max_bytes, 0) for one in both if one.max_bytes is not None]
        times = [one.ttl_s for one in both if one.ttl_s is not None]
        return Limits(max_bytes=min(sizes, default=None), ttl_s=min(times, default=None))

    def _unreadable(
        self,
        every: Sequence[tuple[N, ListedChunk]],
        lost: Callable[[], frozenset[str]],
        show: Show,
    ) -> list[tuple[N, ListedChunk]]:
        """Return what is sealed with none of the keys that are left; also made meanwhile."""
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


def _sum(chunks: Sequence[tuple[N, ListedChunk]]) -> Freed:
    return Freed(len(chunks), sum(chunk.nbytes for _, chunk in chunks))


def _doomed(
    every: Sequence[tuple[N, ListedChunk]], excess: int, before_s: float
) -> tuple[list[tuple[N, ListedChunk]], list[tuple[N, ListedChunk]]]:
    """Return what is older than ``before_s``, and what else goes until ``excess`` bytes go."""
    order = sorted(every, key=lambda one: (one[1].needed_s, -one[1].used_s))
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
    """Read by which keys a chunk's entries are sealed: "" where one is not, or cannot be read."""
    infos = [space.read_header(chunk, path) for path in chunk.paths]
    return {one.seal_info.key_id if one is not None and one.kind else "" for one in infos}


@runtime_checkable
class PinnedStorage(Protocol):
    """A storage that keeps pins: pairs of a chunk that is held and of the chunk that was pinned."""

    def pins(self) -> Sequence[tuple[str, str]]:
        """Return all of them."""
        ...

    def add_pins(self, pins: Sequence[tuple[str, str]]) -> None:
        """Keep some. Raises OSError."""
        ...

    def remove_pins(self, pins: Sequence[tuple[str, str]]) -> None:
        """Forget some, where they are there. Raises OSError."""
        ...


class LimitStore(Protocol):
    """Keeps what ``bounds.json`` says in a directory."""

    def read(self) -> Limits:
        """Return the limits. Raises OSError."""
        ...

    def write(self, limits: Limits) -> None:
        """Replace them. Raises OSError."""
        ...


class StorageNamespace(ListedNamespace):
    """The entries of one storage. A path is an entry's name here, with the suffix of files."""

    def __init__(self, description: Description, storage: Storage) -> None:
        """List them."""
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
        nbytes = self._nbytes[name]
        plan = header_plan(nbytes, nbytes if most is None else min(nbytes, most))
        batch = Batch.of([name], Transfer(plan, (), (), ()))
        filled = self.storage.read(batch)
        if isinstance(filled.problem, EntryError):
            raise OSError(str(filled.problem)) from filled.problem
        if filled.problem is not None:
            raise filled.problem
        return bytes(batch.headers[0]), filled.version(0)

    def read_header(self, chunk: ListedChunk, path: str) -> EntryInfo | None:
        """Read as many bytes as a header may have."""
        del chunk
        with contextlib.suppress(OSError, EntryError):
            return parse_entry(self.read(path, MAX_HEADER_NBYTES)[0])
        return None

    def listed(self, chunk: str) -> list[str]:
        """Name its entries as files of a directory."""
        return sorted(f"{path.partition('/')[2]}{SUFFIX}" for path in self.chunks[chunk].paths)

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[OpenFile]:
        """Read an entry, by the path that its file would have."""
        name = path[3:].removesuffix(SUFFIX)
        if name not in self._nbytes:
            raise FileNotFoundError(path)
        yield OpenFile(io.BytesIO(self.read(name)[0]))

    def write_pin(self, chunk: str, held: Sequence[str]) -> None:
        """Tell the storage. Raises ConfigError for one that keeps no pins."""
        self._pinned_storage().add_pins([(one, chunk) for one in held])

    def remove_pin(self, chunk: str, held: Sequence[str]) -> None:
        """Tell the storage. Raises ConfigError for one that keeps no pins."""
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
        """Take what is open.

        Args:
            where: what the operator calls the cache.
            storages: by namespace, 64 hex.
            describe: returns what a namespace says of itself.
            limits: keeps limits; by default they are told to each `vua gc`.
        """
        super().__init__(where, Path(where.partition("://")[2] or where))
        self._storages, self._describe, self._limit_store = storages, describe, limits

    def contents(self) -> tuple[list[Description], list[str]]:
        """Describe each."""
        return [self._describe(name) for name in sorted(self._storages)], []

    def state(self, description: Description) -> str:
        """Go by what was described."""
        return "ok" if description.layout is not None else "missing"

    def list_namespaces(self, show: Show) -> tuple[Sequence[StorageNamespace], Sequence[str]]:
        """List the entries of each."""
        del show
        found, others = self.contents()
        return [StorageNamespace(one, self._storages[one.name]) for one in found], others

    def content(self, description: Description, show: Show, *, long: bool = False) -> Content:
        """List the entries."""
        del show
        content = Content(description, self.state(description))
        items = []
        for entry in self._storages[description.name].list():
            chunk, shard = parse_name(entry.name)
            path = f"{chunk[:2]}/{entry.name}{SUFFIX}"
            items.append(
                Item(path, "entry", entry.nbytes, entry.last_used_s, chunk=chunk, shard=shard)
            )
        content.add(Counted.of(items, long=long))
        return content

    def claim(self) -> None:
        """Nothing else lies in a storage."""

    def adopt(self, ask: Callable[[Adoption], None]) -> Adoption:
        """Nothing else lies in a storage."""
        del ask
        return Adoption(was_marked=True, namespaces=sorted(self._storages), others=(), chunks=None,
                        nbytes=None)  # fmt: skip

    def bounds(self) -> Limits:
        """Ask the store of limits."""
        return Limits() if self._limit_store is None else self._limit_store.read()

    def write_bounds(self, bounds: Limits) -> None:
        """Tell the store of limits. Raises ConfigError without one."""
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
        """Delete entries, and what is pinned with them."""
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
        """Read entries one after the other."""
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
                    place = Place(description.name, name, shard)
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
