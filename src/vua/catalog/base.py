"""A cache as its operator sees it: its content, its size, and what may be done to it.

Every command of `vua` uses a :class:`Catalog` and does not know where the cache is. What a kind of
place does by itself is abstract here, and all else is written once: for directories
(:mod:`vua.catalog.directory`), buckets, and any storage that can list its entries
(:mod:`vua.catalog.stored`). A new kind is registered by :func:`vua.catalog.register`.

Engines may write and delete meanwhile: a file that vanishes is skipped.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

from vua.capacity.limits import Limits, nbytes_of
from vua.capacity.spaces import Show, silent
from vua.catalog.contents import SHORT, Content, Entries, Item
from vua.errors import ConfigError, CorruptEntryError, explaining
from vua.io.words import size
from vua.security.settings import Security
from vua.storage.description import DESCRIPTION, Description
from vua.storage.location import Location
from vua.storage.names import AFTER

if TYPE_CHECKING:
    from vua.capacity.listing import ListedChunk, Listing
    from vua.capacity.removal import Collection
    from vua.catalog.check import Verification
    from vua.format.layout import KVLayout
    from vua.format.parse import EntryInfo
    from vua.security.keyring import KnownKeys

MAX_FILE_NBYTES: Final = 4 << 30
"""Largest file of a chunk; one that claims to be larger is not read."""
_NAME: Final = re.compile(r"[0-9a-f]{6,64}")
_MARK: Final = re.compile(r"[0-9a-f]{2}/([0-9a-f]{64})/(after|pin)-([0-9a-f]{64})")
_AT_ONCE: Final = 256
"""Chunks whose headers are read between two progress reports."""

Level: TypeAlias = Literal["ok", "note", "bad"]
Ask: TypeAlias = Callable[[str], None]
"""Asks the operator whether to continue. Raises ConfigError if the answer is no."""
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Use:
    """The space that a cache takes, and its limits."""

    chunks: int
    nbytes: int
    exact: bool
    """Whether everything was counted just now."""
    namespaces: Sequence[Content]
    bounds: Limits
    """The content of ``bounds.json``."""
    limits: Mapping[str, float | None]
    """The limits in force, in bytes and seconds, named as in `ResolvedLimits`."""
    free_nbytes: int | None
    """None if only money limits the space."""
    strays: Sequence[str]

    @property
    def usable_nbytes(self) -> int | None:
        """What the cache may occupy: its limit, or what is free on the disk; None: any amount."""
        most, left = self.limits["max_bytes"], self.limits["min_free_bytes"]
        room = None if self.free_nbytes is None else self.free_nbytes + self.nbytes - (left or 0)
        return min((max(0, int(one)) for one in (most, room) if one is not None), default=None)


@dataclass(slots=True)
class Removal:
    """The result of `vua rm`."""

    chunks: int = 0
    nbytes: int = 0
    objects: int | None = None
    """Deleted objects; None for a directory and a dry run, where they are not counted."""
    kept: int = 0
    """Pinned chunks that stay."""
    left: str = ""
    """A message about chunks that can be neither moved nor deleted."""
    strays: Sequence[str] = ()

    def count(self, chunks: Iterable[ListedChunk]) -> None:
        for one in chunks:
            self.chunks += 1
            self.nbytes += one.nbytes


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one probe."""

    name: str
    level: Level
    """``note``: VUA works, with less speed or fewer hits. ``bad``: a guarantee does not hold."""
    text: str
    """The meaning, and what to do."""


Verdict: TypeAlias = tuple[Level, str]
"""A finding without its name."""


def probed(probes: Mapping[str, Callable[[T], Verdict]], at: T) -> Iterator[Finding]:
    """Run probes one after the other; one that raises OSError has found something bad."""
    for name, probe in probes.items():
        try:
            level, text = probe(at)
        except OSError as problem:
            level, text = "bad", f"the probe failed: {problem.strerror or problem}"
        yield Finding(name, level, text)


def timed(work: Callable[[], object]) -> float:
    """Return how many seconds some work takes."""
    began = time.perf_counter()
    work()
    return max(time.perf_counter() - began, 1e-9)


@dataclass(frozen=True, slots=True)
class Demand:
    """What loading has to beat; 0 for what is not known."""

    token_nbytes: int = 0
    """Bytes of K and V of one token."""
    prefill_tokens_s: float = 0.0

    def judge(self, nbytes_s: float, fixed_s: float) -> str:
        """Say from which prompt length on loading wins: ``n / prefill > fixed + n / loading``."""
        if not self.token_nbytes:
            return "give --token-bytes and --prefill to learn from which prompt length on it wins"
        loading = nbytes_s / self.token_nbytes
        text = f"loading brings {loading:,.0f} tokens/s of {size(self.token_nbytes)} each"
        if not self.prefill_tokens_s:
            return f"{text}: give --prefill to learn from which prompt length on it wins"
        prefill = f"{self.prefill_tokens_s:,.0f} tokens/s computed"
        if loading <= self.prefill_tokens_s:
            return f"{text}, less than {prefill}: it never wins"
        tokens = math.ceil(fixed_s / (1 / self.prefill_tokens_s - 1 / loading))
        return f"{text}, and wins over {prefill} from {max(1, tokens):,} tokens on"


@dataclass(slots=True)
class Look:
    """A namespace at one moment, from names, times and sizes alone, and what changed before."""

    name: str
    model: str
    chunks: Listing
    """All of them, or a sample of very many."""
    fans: Sequence[str] | None
    """With which two digits the names of a sample begin; None for all."""
    scale: float = 1.0
    """So many chunks stand for each one in :attr:`chunks`; so it is with those that follow."""
    whole: Content | None = None
    """All chunks, if :attr:`chunks` is a sample, and there was a look before."""
    new: int = 0
    """Since the look before; also :attr:`used` and :attr:`gone`."""
    used: int = 0
    gone: int = 0
    salts: Mapping[str, int] = field(default_factory=dict)
    """First chunks per prefix of their salt's digest, if the namespace is small."""


def one_by_one(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Call ``work`` for each; a place that answers slowly does it concurrently."""
    return [work(one) for one in items]


class NamespaceCatalog(ABC):
    """The chunks of one namespace, listed at first use."""

    salted_most = 256
    """Of at most so many chunks a look has the salts: that needs a header of each."""
    is_remote = True
    """Whether to read headers costs more than a listing."""
    each = staticmethod(one_by_one)

    def __init__(self, stated: Description, show: Show = silent) -> None:
        """Take its description as it is, without a look at headers."""
        self.stated, self.name, self._show = stated, stated.name, show
        self._chunks: Listing | None = None
        self._beside: list[Item] = []
        self.strays: list[str] = []
        """Paths of files that are not VUA's, as far as it was listed."""

    # -- what a kind of place does ----------------------------------------------------------------

    @property
    def state(self) -> str:
        """The state of ``namespace.json``: ``ok``, ``missing``, ``damaged``, or ``unknown``.

        Another version of VUA has written an unknown one.
        """
        if self.stated.layout is not None:
            return "ok"
        if self.stated.is_unknown:
            return "unknown"
        return "damaged" if self.has_description() else "missing"

    @abstractmethod
    def has_description(self) -> bool:
        """Whether something has the description's name, usable or not."""

    @abstractmethod
    def items(self) -> Iterator[Item]:
        """List all files but the description, by path. Raises OSError."""

    @abstractmethod
    def read(self, path: str, most: int) -> bytes | memoryview:
        """Return at most so many first bytes of a file. Raises OSError."""

    def header(self, path: str) -> EntryInfo | None:
        """Read an entry's header; None if it is unreadable or unsound."""
        from vua.format.entry import MAX_HEADER_NBYTES  # noqa: PLC0415 - `ls` goes without
        from vua.format.parse import parse_entry  # noqa: PLC0415 - `ls` goes without

        with contextlib.suppress(OSError, CorruptEntryError):
            return parse_entry(bytes(self.read(path, MAX_HEADER_NBYTES)))
        return None

    @abstractmethod
    def checked(
        self, keys: KnownKeys, share: float, *, repair: bool
    ) -> Iterator[tuple[int, Verification]]:
        """Check the parts of a namespace; also yield how many there are, 0 if that is not known."""

    @abstractmethod
    def pin(self, chunk: str, *, on: bool = True) -> int:
        """Pin a chunk and its prefix, or undo that; return how many chunks are held, or were."""

    @abstractmethod
    def erase(self, chunks: Iterable[ListedChunk], done: Removal) -> None:
        """Delete chunks with their marks, in this order, and add them to ``done``.

        Where that costs little each is deleted before the next one is asked for.
        """

    def drop(self, done: Removal) -> None:  # noqa: B027 - a place may have nothing else
        """Delete what else is VUA's in a namespace without chunks."""

    def note_befores(self) -> None:  # noqa: B027 - most places tell the order by headers
        """Write down what headers told about the order of chunks, for the next time."""

    def renew(self, chunks: Sequence[ListedChunk]) -> None:  # noqa: B027 - few do
        """Set the time of chunks to now, if something else deletes by times."""

    # -- what is in it ----------------------------------------------------------------------------

    @property
    def is_ours(self) -> bool:
        """Whether it is a namespace of VUA, by its description or its chunks."""
        return True

    @property
    def description(self) -> Description:
        """Its description, with some headers that confirm it where they cost little."""
        return self.stated

    @property
    def layouts(self) -> tuple[KVLayout, ...]:
        """One per group of layers, as its entries' headers confirm them; () if unknown."""
        from vua.store.namespace import settled  # noqa: PLC0415 - `ls` goes without

        return settled(self.stated).layouts

    @property
    def chunks(self) -> Listing:
        """All chunks that have an entry, with or without their order. Raises OSError."""
        if self._chunks is None:
            self._chunks = self._listed()
        return self._chunks

    @property
    def beside(self) -> list[Item]:
        """VUA's other files: marks without a chunk, damaged and copied files."""
        self._chunks = self.chunks
        return self._beside

    def _listed(self) -> Listing:
        from vua.capacity.listing import Listing  # noqa: PLC0415 - `ls` goes without

        found, entries = Listing(), 0
        for item in self.items():
            if item.kind == "entry":
                found.add(item.chunk, item.path, item.nbytes, item.used_ns)
                entries += 1
                if entries % 1000 == 0:
                    self._show(self.name[:SHORT], amount=entries, unit="object")
            elif item.kind == "stray":
                self.strays.append(item.path)
            elif match := _MARK.fullmatch(item.path):
                told = {"before" if f"{match[2]}-" == AFTER else "pin": match[3]}
                found.mark(match[1], item.path, **told)
            else:
                self._beside.append(item)
        self._beside += [Item(path, "mark") for path in found.end()]
        return found

    def content(self, show: Show, *, long: bool = False, exact: bool = True) -> Content:
        """Count the content; else of very many chunks as it was counted last. Raises OSError."""
        del show, exact
        content = Content(self.stated, self.state, entries=Entries())
        for _, items in itertools.groupby(self.items(), lambda one: one.path[:2]):
            content.add(content.counted(items, long=long))
        return content

    def names(self, show: Show, fans: Sequence[str] | None = None) -> Listing:
        """List chunks, or those that begin with such digits, with or without their order.

        Raises OSError.
        """
        del show, fans
        return self.chunks

    def sample(self) -> Sequence[str] | None:
        """Return with which two digits the names of some thousand chunks begin; None: list all."""
        return None

    def look(self, show: Show, past: Look | None = None) -> Look:
        """Return the current names, times and sizes, and what changed since ``past``.

        Raises OSError.
        """
        some = self.sample() if past is None else past.fans  # a change is one of the same sample
        chunks = self.names(show, some)
        found = Look(self.name, self.stated.model, chunks, some)
        if some is not None:
            found.scale = 256 / len(some)
            found.whole = None if past is None else self.content(show, exact=False)
        if past is not None:
            found.new, found.used, found.gone = chunks.changes(past.chunks, some)
        if past is not None and not (found.new or found.gone):
            found.salts = past.salts
        elif some is None and len(chunks) <= self.salted_most:
            found.salts = Counter(salt[:SHORT] or "-" for _, salt in self.firsts(show))
        return found

    def matching(self, digits: str) -> list[str]:
        """Return the chunks whose names begin with ``digits``, sorted."""
        return [name for name, _ in self.chunks.names(digits)]

    def listed(self, chunk: str) -> list[str]:
        """Return the names in a chunk's folder, sorted."""
        one = self.chunks.get(chunk)
        paths = () if one is None else (*one.paths, *one.marks)
        return sorted({path.rpartition("/")[2] for path in paths})

    # -- who follows whom -------------------------------------------------------------------------

    def listing(self, show: Show, past: Listing | None = None) -> Listing:
        """List chunks with their order; given the ``past`` result, only new chunks are read."""
        if past is not None:
            self.chunks.tell_befores(past.befores())
        count, done = len(self.chunks), 0
        for some in self.chunks.parts(_AT_ONCE, "before IS NULL"):
            show(f"{self.name[:SHORT]}: reading headers", done, count)
            self.chunks.tell_befores(self.each(self._read_before, some))
            done += len(some)
        return self.chunks

    def _read_before(self, chunk: ListedChunk) -> tuple[str, str]:
        info = self.header(chunk.paths[0])
        return chunk.name, (info.parent or "") if info is not None and info.start else ""

    def firsts(self, show: Show) -> Iterable[tuple[str, str]]:
        """Return the chunks that begin a prompt, with their salt (the digest, hex; "": none)."""
        listing = self.listing(show)
        for some in listing.parts(_AT_ONCE, "before = ''"):
            infos = self.each(lambda one: self.header(one.paths[0]), some)
            yield from (
                (one.name, "" if info is None else info.parent)
                for one, info in zip(some, infos, strict=True)
            )

    def ancestors(self, chunk: str) -> Iterator[str]:
        """Yield a chunk and those before it, up to the first one or a gap."""
        seen: set[str] = set()
        while (one := self.chunks.get(chunk)) is not None and chunk not in seen:
            yield chunk
            seen.add(chunk)
            if one.before is None:
                self.chunks.tell_befores([self._read_before(one)])
                one = self.chunks.get(chunk)
            chunk = "" if one is None else one.before or ""

    # -- what may be done to it -------------------------------------------------------------------

    def quarantined(self) -> int:
        """Return the bytes in quarantine."""
        return sum(one.nbytes for one in self.beside if one.kind == "quarantined")

    def verify(self, keys: KnownKeys, share: float, show: Show, *, repair: bool) -> Verification:
        """Read and check a random ``share`` of the entries; ``repair`` quarantines damaged ones."""
        from vua.catalog.check import Verification  # noqa: PLC0415 - `ls` goes without

        result = Verification(self.stated, self.state)
        if result.state == "unknown":
            return result
        for number, (total, part) in enumerate(self.checked(keys, share, repair=repair), 1):
            result.join(part)
            show(self.name[:SHORT], number, total, amount=result.nbytes)
        if result.state == self.state == "missing" and result.counts:
            reason = (
                "missing: the next save writes it; entries' headers say what is needed meanwhile"
            )
            result.problems.append((DESCRIPTION, "error", reason))
        if wrong := result.wrong_description():
            reason = f"{wrong}; the next save writes it anew"
            result.problems.append((DESCRIPTION, "corrupt", reason))
        return result


class Catalog(ABC):
    """A cache. Opened by :func:`vua.catalog.open_catalog`."""

    look_s: float | None = None
    """Least seconds between two looks, if a look costs money."""

    root: Location

    def __init__(self, where: str, root: Any) -> None:
        self.where, self.root = where, root

    # -- what a kind of place does ----------------------------------------------------------------

    @property
    def counts(self) -> Mapping[str, int]:
        """Requests that this process sent, by kind; empty for a directory."""
        return {}

    def is_local(self) -> bool:
        """Whether only this machine reaches the cache; False when in doubt."""
        return False

    def is_foreign(self) -> bool:
        """Whether a directory or prefix without a namespace is clearly not VUA's."""
        return False

    @abstractmethod
    def namespaces(
        self, show: Show
    ) -> contextlib.AbstractContextManager[tuple[Sequence[Any], Sequence[str]]]:
        """Return a context with all namespaces, and the names of everything else.

        Raises OSError.
        """

    @abstractmethod
    def claim(self) -> None:
        """Check that the cache may be changed: it has the mark, or is empty and gets it.

        Raises ConfigError if it holds something else, StorageError.
        """

    @abstractmethod
    def bounds(self) -> Limits:
        """Return the content of ``bounds.json``. Raises ConfigError for an unusable one."""

    @abstractmethod
    def write_bounds(self, bounds: Limits) -> None:
        """Replace ``bounds.json``. Raises StorageError."""

    def free_nbytes(self) -> int | None:
        """Return the free bytes of the disk; None if only money limits the space."""
        return None

    def stored_nbytes(self, found: Sequence[Any]) -> int:
        """Return how many bytes are stored, about."""
        return sum(one.chunks.totals().nbytes for one in found)

    def sweep(self, found: Sequence[Any], *, dry_run: bool) -> tuple[int, int]:
        """Delete remains of a crash; return how many, and their bytes. Raises OSError."""
        del found, dry_run
        return 0, 0

    def findings(self, security: Security, demand: Demand) -> Iterator[Finding]:
        """Probe what VUA needs of the storage, and its speed. Leaves no lasting change."""
        del demand
        yield from self.findings_at_rest(security)

    def findings_at_rest(self, security: Security) -> list[Finding]:
        """Return the findings that need no writing."""
        del security
        return []

    # -- what lies in it --------------------------------------------------------------------------

    def contents(self) -> tuple[list[Description], list[str]]:
        """Return the namespaces' descriptions, and the names of everything else."""
        with self.namespaces(silent) as (found, others):
            return [one.stated for one in found], [*others]

    def use(self, show: Show, *, exact: bool = True) -> Use:
        """Count the space that is taken; else of very many chunks as it was counted last.

        Raises OSError, ConfigError.
        """
        with explaining(self.where), self.namespaces(show) as (found, others):
            rows = [one.content(show, exact=exact) for one in found if one.is_ours]
            inside = [f"{one.description.name}/{path}" for one in rows for path in one.strays]
            strays, bounds = [one.name for one in found if not one.is_ours], self.bounds()
            return Use(
                sum(one.chunks for one in rows),
                sum(one.occupied_nbytes for one in rows),
                exact=all(one.exact for one in rows),
                namespaces=rows,
                bounds=bounds,
                limits=self.limits(bounds),
                free_nbytes=self.free_nbytes(),
                strays=[*others, *strays, *inside],
            )

    def limits(self, *sources: Limits) -> Mapping[str, Any]:
        """Return the limits in force, as :attr:`Use.limits`, by the strictest of these."""
        sizes = [nbytes_of(one.max_bytes, 0) for one in sources if one.max_bytes is not None]
        times = [one.ttl_s for one in sources if one.ttl_s is not None]
        return {"max_bytes": min(sizes, default=None), "min_free_bytes": None,
                "ttl_s": min(times, default=None), "max_bytes_per_salt": None,
                "min_free_inodes": None}  # fmt: skip

    # -- what may be done to it -------------------------------------------------------------------

    def keep(self, news: Mapping[str, object]) -> None:
        """Write these limits into ``bounds.json``; limits that are not named stay."""
        with explaining(self.where):
            known = self.bounds()
            self.write_bounds(replace(known, **news))  # type: ignore[arg-type]

    def excess(self, limits: Mapping[str, Any], done: Collection) -> int:
        """Return how many bytes are too many of what ``done`` says is stored; 0 or less: none."""
        return 0 if limits["max_bytes"] is None else done.nbytes - int(limits["max_bytes"])

    def evict(self, limits: Mapping[str, Any], done: Collection, show: Show) -> bool:
        """Evict by rules of this place, and note in ``done`` what is left; False if it has none."""
        del limits, done, show
        return False


N = TypeVar("N", bound=NamespaceCatalog)


def resolve(found: Sequence[N], digits: str) -> tuple[N, str]:
    """Return the one namespace (with "") or chunk whose name begins so. Raises ConfigError."""
    if not _NAME.fullmatch(digits):
        msg = f"{digits!r} is not a name; give at least 6 hex digits of a chunk or a namespace"
        raise ConfigError(msg)
    hits = [(one, "") for one in found if one.name.startswith(digits)]
    hits += [(one, chunk) for one in found for chunk in one.matching(digits)]
    if len(hits) != 1:
        some = ", ".join(f"{one.name[:SHORT]}/{chunk[:SHORT]}" for one, chunk in hits[:5])
        what = f"stands for {len(hits)} things: {some}" if hits else "is not stored"
        raise ConfigError(f"{digits}: {what}; `vua ls --long` lists the names")
    return hits[0]
