"""Catalogs of storages that can be listed, with only names, sizes and times of chunks.

Their order costs a header per chunk, read only where a command needs it. :class:`ListedCatalog`
works for any kind of storage; a subclass lists its chunks, reads a header, deletes, and keeps
marks.

:class:`StorageCatalog` serves any :class:`vua.storage.base.Storage`. A new storage gets `vua ls`,
`du`, `gc`, `rm`, `top`, `verify` and `explain` by it, and `vua pin` if it is a
:class:`PinnedStorage`, too::

    def opened(where: str, *, create: bool) -> Catalog:
        storages = {"<64 hex>": MyStorage(where)}  # by namespace
        return StorageCatalog(where, storages, describe=...)

    register("mine", opened)  # now `vua gc mine://...` works
"""

from __future__ import annotations

import contextlib
import heapq
import io
import itertools
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar, runtime_checkable

from vua.capacity.limits import Limits, nbytes_of
from vua.capacity.listing import ListedChunk, Listing, parts
from vua.capacity.removal import GRACE_S, NOTHING, Collection, DeletionTotals
from vua.capacity.spaces import Show
from vua.catalog.base import (
    Ask,
    Catalog,
    NamespaceCatalog,
    Removal,
    doomed,
)
from vua.catalog.check import Check, Checker, ExpectedEntry, OpenFile, Verification, sampled
from vua.catalog.contents import SHORT, Content, Item, PartUsage
from vua.errors import ConfigError, EntryError
from vua.format.entry import MAX_HEADER_NBYTES
from vua.format.parse import EntryInfo, parse_entry
from vua.io.words import counted, size
from vua.security.keyring import KnownKeys
from vua.storage.base import Batch, Storage, entry_name, parse_name
from vua.storage.description import Description
from vua.storage.names import AFTER, PIN, SUFFIX, chunk_path, entry_at

_AT_ONCE: Final = 256
"""Chunks whose headers are read between two progress reports."""
_HELD: Final = 64
"""Most entries in memory at a time."""
_MARK: Final = re.compile(r"[0-9a-f]{2}/([0-9a-f]{64})/(after|pin)-([0-9a-f]{64})")
_LAST: Final = 1 << 60
"""No other chunk goes later."""
T = TypeVar("T")
R = TypeVar("R")


def one_by_one(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Call ``work`` for each; a storage that answers slowly does it concurrently."""
    return [work(one) for one in items]


class ListedNamespace(NamespaceCatalog):
    """A namespace whose files were listed; their paths are those that a directory has."""

    salted_most = 256

    def __init__(self, description: Description, items: Iterable[Item], show: Show) -> None:
        """List the namespace from all of its files. Raises OSError."""
        self.stated, self.name = description, description.name
        self.chunks = Listing()
        """All chunks that have an entry."""
        self.beside: list[Item] = []
        """VUA's other files: marks without a chunk, times to live, damaged and copied files."""
        self.strays: list[str] = []
        """Paths of files that are not VUA's."""
        entries = 0
        for item in items:
            if item.kind == "entry":
                self.chunks.add(item.chunk, item.path, item.nbytes, item.modified_s)
                entries += 1
                if entries % 1000 == 0:
                    show(self.name[:SHORT], amount=entries, unit="object")
            elif item.kind == "stray":
                self.strays.append(item.path)
            elif match := _MARK.fullmatch(item.path):
                told = {"before" if f"{match[2]}-" == AFTER else "pin": match[3]}
                self.chunks.mark(match[1], item.path, **told)
            else:
                self.beside.append(item)
        self.beside += [Item(path, "mark") for path in self.chunks.end()]

    # -- what a kind of place does ----------------------------------------------------------------

    @abstractmethod
    def read_header(self, path: str) -> EntryInfo | None:
        """Read an entry's header; None if it is unreadable or unsound."""

    @abstractmethod
    def mark(self, held: Sequence[str], pinned: str, *, on: bool) -> None:
        """Write or remove a pin's mark at each chunk that it holds. Raises OSError."""

    each = staticmethod(one_by_one)

    def note_befores(self) -> None:
        """Write down what headers told about the order of chunks, for the next time."""

    def renew(self, chunks: Sequence[ListedChunk]) -> None:
        """Set the time of chunks to now, if something else deletes by times."""

    # -- what follows from it ---------------------------------------------------------------------

    def matching(self, digits: str) -> list[str]:
        return [name for name, _ in self.chunks.names(digits)]

    def listed(self, chunk: str) -> list[str]:
        one = self.chunks.get(chunk)
        paths = () if one is None else (*one.paths, *one.marks)
        return sorted({path.rpartition("/")[2] for path in paths})

    def salts(self, show: Show) -> Iterable[str]:
        self.find_befores(show)
        first = [one for one in map(self.chunks.get, self.chunks.children("")) if one is not None]
        infos = self.each(lambda one: self.read_header(one.paths[0]), first)
        return ["" if one is None else one.parent for one in infos]

    def listing(self, show: Show, past: Listing | None = None) -> Listing:
        if past is not None:
            self.chunks.tell_befores(past.befores())
        self.find_befores(show)
        return self.chunks

    def renew_pinned(self, before_ns: int) -> None:
        """Renew the chunks that pins hold, and that were last used before a time."""
        for some in parts(self.chunks.pinned(before_ns), _AT_ONCE):
            self.renew(some)

    def find_befores(self, show: Show) -> None:
        """Find what precedes each chunk of which it is not known."""
        count, done = len(self.chunks), 0
        for some in parts(self.chunks.unread(), _AT_ONCE):
            show(f"{self.name[:SHORT]}: reading headers", done, count)
            self.chunks.tell_befores(self.each(self._read_before, some))
            done += len(some)

    def _read_before(self, chunk: ListedChunk) -> tuple[str, str]:
        info = self.read_header(chunk.paths[0])
        return chunk.name, (info.parent or "") if info is not None and info.start else ""

    def ancestors(self, chunk: str) -> Iterator[str]:
        seen: set[str] = set()
        while (one := self.chunks.get(chunk)) is not None and chunk not in seen:
            yield chunk
            seen.add(chunk)
            if one.before is None:
                self.chunks.tell_befores([self._read_before(one)])
                one = self.chunks.get(chunk)
            chunk = "" if one is None else one.before or ""

    def pin(self, chunk: str) -> int:
        held = list(self.ancestors(chunk))
        self.mark(held, chunk, on=True)
        return len(held)

    def unpin(self, chunk: str) -> int:
        held = list(self.ancestors(chunk))
        self.mark(held, chunk, on=False)
        return len(held)

    def names(self, show: Show, fans: Sequence[str] | None = None) -> Listing:
        del show, fans
        return self.chunks

    def other_nbytes(self) -> tuple[int, int]:
        quarantine = sum(one.nbytes for one in self.beside if one.kind == "quarantined")
        return quarantine, sum(one.nbytes for one in self.leftovers)

    @property
    def leftovers(self) -> list[Item]:
        """What a killed process left."""
        old_s = time.time() - GRACE_S
        return [one for one in self.beside if one.kind == "temporary" and one.modified_s < old_s]


N = TypeVar("N", bound=ListedNamespace)


class ListedCatalog(Catalog, Generic[N]):
    """A cache whose namespaces can be listed. A subclass lists and deletes."""

    keeps_own_ttls = False

    # -- what a kind of place does ----------------------------------------------------------------

    @abstractmethod
    def list_namespaces(self, show: Show) -> tuple[Sequence[N], Sequence[str]]:
        """List VUA's namespaces, and the names of everything else. Raises StorageError."""

    @abstractmethod
    def write_bounds(self, bounds: Limits) -> None:
        """Replace ``bounds.json``. Raises StorageError."""

    @abstractmethod
    def items(self, description: Description) -> Iterator[Item]:
        """List a namespace's files but its description, by path. Raises OSError."""

    @abstractmethod
    def read(self, description: Description, item: Item) -> tuple[bytes | memoryview, bytes | None]:
        """Return an entry's bytes and its version. Raises OSError."""

    @abstractmethod
    def storage_of(self, description: Description) -> Storage:
        """Return what stores a namespace's entries."""

    each = staticmethod(one_by_one)

    def sweep(self, namespaces: Sequence[N]) -> DeletionTotals:
        """Delete remains of a crash."""
        del namespaces
        return NOTHING

    # -- what follows from it ---------------------------------------------------------------------

    @contextlib.contextmanager
    def namespaces(self, show: Show) -> Iterator[tuple[Sequence[N], Sequence[str]]]:
        yield self.list_namespaces(show)

    def is_local(self) -> bool:
        return False

    def content(
        self, description: Description, show: Show, *, long: bool = False, exact: bool = True
    ) -> Content:
        del show, exact
        content = Content(description, self.state(description))
        for _, items in itertools.groupby(self.items(description), lambda one: one.path[:2]):
            content.add(PartUsage.of(items, long=long))
        return content

    def checked(
        self, description: Description, keys: KnownKeys, share: float, *, repair: bool
    ) -> Iterator[tuple[int, Verification]]:
        checker, fans = Checker(keys), sampled([f"{fan:02x}" for fan in range(256)], share)

        def check(item: Item) -> tuple[Item, Check | None, bool]:
            if item.kind != "entry":
                return item, None, False
            try:
                data, version = self.read(description, item)
            except OSError as problem:
                return item, Check("error", (str(problem),), 0), False
            where = ExpectedEntry(description.name, item.chunk, item.shard)
            done = checker.check_bytes(memoryview(bytearray(data)), where)
            if not repair or done.outcome not in ("corrupt", "foreign") or item.shard is None:
                return item, done, False
            name = entry_name(item.chunk, item.shard)
            return item, done, self.storage_of(description).delete(name, version)

        chosen = (one for one in self.items(description)
                  if one.kind != "entry" or one.chunk[:2] in fans)  # fmt: skip
        while some := list(itertools.islice(chosen, _HELD)):
            part = Verification(description, "")
            for item, done, removed in self.each(check, some):
                if done is None:
                    part.add_other(item)
                else:
                    part.add(item.path, done)
                    part.removed += removed
            yield 0, part

    def limits_of(self, bounds: Limits) -> Mapping[str, float | None]:
        """Return limits in bytes and seconds; the limits of a disk are None."""
        most = None if bounds.max_bytes is None else nbytes_of(bounds.max_bytes, 0)
        return {"max_bytes": most, "min_free_bytes": None, "ttl_s": bounds.ttl_s,
                "max_bytes_per_salt": None, "min_free_inodes": None}  # fmt: skip

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
        found = [one for one in found if not one.description.is_unknown]
        totals = [space.chunks.totals() for space in found]
        total, count = sum(one.nbytes for one in totals), sum(one.chunks for one in totals)
        most = total if limits.max_bytes is None else nbytes_of(limits.max_bytes, 0)
        now_ns = int(time.time() * 1e9)
        before_ns = 0 if limits.ttl_s is None else now_ns - int(limits.ttl_s * 1e9)
        done = Collection(self.limits_of(limits), count, total, strays=strays)
        times_ns = [one.oldest_ns for one in totals if one.oldest_ns is not None]
        if total > most or min(times_ns, default=now_ns) < before_ns:
            for space in found:
                space.find_befores(show)
            chunks = [space.chunks for space in found]
            done.expired, done.evicted = choose_victims(chunks, total - most, before_ns)
        if lost is not None:
            done.lost_keys = self._add_unreadable(found, lost, show)
        freed = sum(done.deleted.values(), start=NOTHING)
        if freed.chunks and not dry_run:
            ask(f"Delete {counted(freed.chunks, 'chunk')}, {size(freed.nbytes)}, of {self.where}?")
            self.delete(doomed({one: one.chunks for one in found}, show), [], Removal())
            for space in found:
                space.chunks.remove_doomed()
                with contextlib.suppress(OSError):  # then it is read again the next time
                    space.note_befores()
        if not dry_run:
            done.leftovers = self.sweep(found)
            if keep:
                self.keep({name: one for name, one in asdict(given).items() if one is not None})
            for space in found if limits.ttl_s is not None else ():
                space.renew_pinned((now_ns + before_ns) // 2)
        done.chunks, done.nbytes = done.chunks - freed.chunks, done.nbytes - freed.nbytes
        done.within = done.nbytes <= most
        done.pinned_nbytes = sum(one.pinned_nbytes for one in totals)
        done.seconds = time.monotonic() - began_s
        return done

    def _stricter(self, given: Limits) -> Limits:
        both = (given, self.bounds())
        sizes = [nbytes_of(one.max_bytes, 0) for one in both if one.max_bytes is not None]
        times = [one.ttl_s for one in both if one.ttl_s is not None]
        return Limits(max_bytes=min(sizes, default=None), ttl_s=min(times, default=None))

    def _add_unreadable(
        self, spaces: Sequence[N], lost: Callable[[], frozenset[str]], show: Show
    ) -> DeletionTotals:
        """Add chunks sealed with none of the existing keys; includes keys made meanwhile."""
        found, done = [], 0
        for space in spaces:
            for some in parts(space.chunks.all(), _AT_ONCE):
                show("reading headers", done, amount=done, unit="chunk")
                done += len(some)
                ids = space.each(partial(seals, space), some)
                found += [(space, one, each) for one, each in zip(some, ids, strict=True)
                          if "" not in each and not one.pins]  # fmt: skip
        known, added = lost(), NOTHING
        for space, one, each in found:
            if not known & each and not space.chunks.is_doomed(one.name):
                space.chunks.doom(one.name, _LAST)
                added += DeletionTotals(1, one.nbytes)
        return added


def choose_victims(
    listings: Sequence[Listing], excess: int, before_ns: int
) -> tuple[DeletionTotals, DeletionTotals]:
    """Doom chunks not used since ``before_ns``, and more until ``excess`` bytes are freed.

    A chunk comes after the chunks that follow it in prompts, also if they were written earlier.
    Pinned ones stay. Returns what both amount to.
    """
    expired = evicted = NOTHING
    by_need = (zip(one.by_need(), itertools.repeat(one), strict=False) for one in listings)
    order = heapq.merge(*by_need, key=lambda row: row[0])
    for place, ((needed_ns, _, name, nbytes), listing) in enumerate(order):
        if needed_ns < before_ns:
            expired += DeletionTotals(1, nbytes)
        elif expired.nbytes + evicted.nbytes < excess:
            evicted += DeletionTotals(1, nbytes)
        else:
            break
        listing.doom(name, place)
    return expired, evicted


def seals(space: ListedNamespace, chunk: ListedChunk) -> set[str]:
    """Return the ids of the keys that seal a chunk's entries: "" if unsealed or unreadable."""
    infos = [space.read_header(path) for path in chunk.paths]
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


class StorageNamespace(ListedNamespace):
    """The entries of one storage."""

    def __init__(self, description: Description, storage: Storage, show: Show) -> None:
        super().__init__(description, items_of(storage), show)
        self.storage = storage

    def read_header(self, path: str) -> EntryInfo | None:
        with contextlib.suppress(OSError, EntryError):
            return parse_entry(read_entry(self.storage, path, MAX_HEADER_NBYTES)[0])
        return None

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[OpenFile]:
        yield OpenFile(io.BytesIO(read_entry(self.storage, path)[0]))

    def mark(self, held: Sequence[str], pinned: str, *, on: bool) -> None:
        """As in the base class. Raises ConfigError if the storage keeps no pins."""
        if not isinstance(self.storage, PinnedStorage):
            raise ConfigError(f"{type(self.storage).__name__} keeps no pins")
        change = self.storage.add_pins if on else self.storage.remove_pins
        change([(one, pinned) for one in held])


def items_of(storage: Storage) -> Iterator[Item]:
    """Yield the entries and pins of a storage, as files of a directory."""
    for entry in sorted(storage.list(), key=lambda one: one.name):
        chunk, shard = parse_name(entry.name)
        path = f"{chunk[:2]}/{entry.name}{SUFFIX}"
        yield Item(path, "entry", entry.nbytes, entry.last_used_s, chunk=chunk, shard=shard)
    for held, pinned in storage.pins() if isinstance(storage, PinnedStorage) else ():
        yield Item(f"{chunk_path(held)}/{PIN}{pinned}", "mark")


def read_entry(storage: Storage, path: str, most: int | None = None) -> tuple[bytes, bytes | None]:
    """Return an entry's first bytes, by default all, and its version. Raises OSError."""
    name = entry_at(path)
    sizes = {one.name: one.nbytes for one in storage.list(name[:64])} if name else {}
    if name not in sizes:
        raise FileNotFoundError(path)
    batch = Batch.of_bytes(name, sizes[name], most)
    filled = storage.read(batch)
    if isinstance(filled.problem, EntryError):
        raise OSError(str(filled.problem)) from filled.problem
    if filled.problem is not None:
        raise filled.problem
    return bytes(batch.headers[0]), filled.version(0)


class StorageCatalog(ListedCatalog[StorageNamespace]):
    """A cache whose namespaces are in storages. It keeps no limits: each `vua gc` is given them."""

    def __init__(
        self, where: str, storages: Mapping[str, Storage], describe: Callable[[str], Description]
    ) -> None:
        """Use open storages.

        Args:
            where: the operator's name of the cache.
            storages: by namespace, 64 hex.
            describe: returns a namespace's description.
        """
        super().__init__(where, Path(where.partition("://")[2] or where))
        self._storages, self._describe = storages, describe

    def contents(self) -> tuple[list[Description], list[str]]:
        return [self._describe(name) for name in sorted(self._storages)], []

    def state(self, description: Description) -> str:
        return "ok" if description.layout is not None else "missing"

    def list_namespaces(self, show: Show) -> tuple[Sequence[StorageNamespace], Sequence[str]]:
        found, others = self.contents()
        return [StorageNamespace(one, self._storages[one.name], show) for one in found], others

    def items(self, description: Description) -> Iterator[Item]:
        return items_of(self.storage_of(description))

    def read(self, description: Description, item: Item) -> tuple[bytes, bytes | None]:
        return read_entry(self.storage_of(description), item.path)

    def storage_of(self, description: Description) -> Storage:
        return self._storages[description.name]

    def claim(self) -> None:
        """Do nothing: a storage holds nothing else."""

    def bounds(self) -> Limits:
        return Limits()

    def write_bounds(self, bounds: Limits) -> None:
        del bounds
        raise ConfigError(f"{self.where} keeps no limits; give them to each `vua gc`")

    def delete(
        self, chunks: Iterable[tuple[StorageNamespace, ListedChunk]],
        whole: Sequence[StorageNamespace], done: Removal,
    ) -> None:  # fmt: skip
        rest = ((space, one) for space in whole for one in space.chunks.all())
        done.objects = 0
        for space, chunk in itertools.chain(chunks, rest):
            for path in chunk.paths:
                space.storage.delete(entry_at(path))
            for pinned in chunk.pins:
                space.mark([chunk.name], pinned, on=False)
            done.objects += len(chunk.paths)
