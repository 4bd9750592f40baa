"""A catalog of what can be listed, and tells no more of a chunk than names, sizes and times.

The chunks are held in memory. Which chunk follows which costs a header per chunk, which is read
where a command needs it. What is here works for any kind of place; what is left to it is to list
its chunks, to read a header, to delete, and to keep marks.
"""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final, Generic, TypeVar

from vua.capacity.limits import Limits, nbytes_of
from vua.capacity.removal import Freed
from vua.capacity.scan import Show
from vua.catalog.base import (
    Ask,
    Catalog,
    Collection,
    Links,
    Look,
    NamespaceCatalog,
    NamespaceUse,
    Removal,
    Use,
    resolve,
    size,
)
from vua.errors import ConfigError
from vua.format.layout import KVLayout, Shard
from vua.format.parse import EntryInfo
from vua.storage.description import Description
from vua.store.evidence import settled

__all__ = ["ListedCatalog", "ListedChunk", "ListedNamespace"]

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
