"""A cache as its operator sees it: its content, its size, and what may be done to it.

Every command of `vua` uses a :class:`Catalog` and does not know where the cache is. There is one
for directories (:mod:`vua.catalog.directory`), one for buckets (:mod:`vua.catalog.bucket`), and one
for any storage that can list its entries (:mod:`vua.catalog.listed`). A new kind of storage derives
from the last one and is registered by :func:`vua.catalog.opening.register`.

Engines may write and delete meanwhile: a file that vanishes is skipped.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, TypeVar

from vua.capacity.limits import Limits
from vua.capacity.listing import ListedChunk, Listing
from vua.capacity.removal import Collection
from vua.capacity.spaces import Show
from vua.catalog.check import OpenFile, Verification
from vua.catalog.contents import SHORT, Content
from vua.errors import ConfigError, explaining
from vua.format.layout import KVLayout
from vua.io.words import counted, size
from vua.security.keyring import KnownKeys
from vua.security.settings import Security
from vua.storage.description import DESCRIPTION, Description
from vua.storage.location import Location
from vua.store.evidence import settled

MAX_FILE_NBYTES: Final = 4 << 30
"""Largest file of a chunk; one that claims to be larger is not read."""
_NAME: Final = re.compile(r"[0-9a-f]{6,64}")

Level: TypeAlias = Literal["ok", "note", "bad"]
Ask: TypeAlias = Callable[[str], None]
"""Asks the operator whether to continue. Raises ConfigError if the answer is no."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NamespaceUse:
    """The space that a namespace takes."""

    namespace: str
    chunks: int
    nbytes: int
    """Bytes of its entries, and of what is in quarantine."""
    exact: bool
    """Whether all chunks were looked at, not a sample."""
    pinned: int | None
    """Chunks held by pins; None if it is not known."""
    quarantine: int
    """Bytes of damaged files in quarantine."""
    leftovers: int
    """Bytes left by a crash."""
    oldest_ns: int | None
    """Last use of the least recently used chunk (in a bucket: its last write or renewal)."""
    newest_ns: int | None


@dataclass(frozen=True, slots=True)
class Use:
    """The space that a cache takes, and its limits."""

    chunks: int
    nbytes: int
    exact: bool
    """Whether everything was counted, not estimated from a sample."""
    namespaces: Sequence[NamespaceUse]
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


@dataclass(frozen=True, slots=True)
class Rules:
    """Lifecycle rules for a bucket that delete objects unused for so long."""

    days: int
    rules: Mapping[str, object]


@dataclass(slots=True)
class Look:
    """A namespace at one moment, from names, times and sizes alone, and what changed before."""

    name: str
    model: str
    chunks: Listing
    """All of them, or a sample of very many."""
    fans: Sequence[str] | None
    """With which two digits the names of a sample begin; None for all."""
    scale: float
    """So many chunks stand for each one in :attr:`chunks`; so it is with those that follow."""
    new: int = 0
    """Since the look before; also :attr:`used` and :attr:`gone`."""
    used: int = 0
    gone: int = 0
    salts: Mapping[str, int] = field(default_factory=dict)
    """First chunks per prefix of their salt's digest, if the namespace is small."""


class NamespaceCatalog(ABC):
    """The chunks of one namespace."""

    name: str
    stated: Description
    """Its description as it is, without a look at headers."""
    salted_most = 4096
    """Of at most so many chunks a look has the salts: that needs a header of each."""

    @property
    def is_ours(self) -> bool:
        """Whether it is a namespace of VUA, by its description or its chunks."""
        return True

    @property
    def description(self) -> Description:
        """The namespace's description."""
        return self.stated

    @property
    def layouts(self) -> tuple[KVLayout, ...]:
        """One per group of layers, as its entries' headers confirm them; () if unknown."""
        return settled(self.stated).layouts

    # -- reading ----------------------------------------------------------------------------------

    @abstractmethod
    def matching(self, digits: str) -> list[str]:
        """Return the chunks whose names begin with ``digits``, sorted."""

    @abstractmethod
    def listed(self, chunk: str) -> list[str]:
        """Return the names in a chunk's folder, sorted."""

    @abstractmethod
    def opened(self, path: str) -> contextlib.AbstractContextManager[OpenFile]:
        """Return a file, open for reading, by its path in the namespace. Raises OSError."""

    def look(self, show: Show, past: Look | None = None) -> Look:
        """Return the current names, times and sizes, and what changed since ``past``.

        Raises OSError.
        """
        fans, many = self.fans()
        some = None if many == len(fans) else fans[:many]
        if past is not None and past.fans is not None:  # then a change is one of the same sample
            some = past.fans
        chunks = self.names(show, some)
        scale = 1.0 if some is None else len(fans) / len(some)
        found = Look(self.name, self.stated.model, chunks, some, scale)
        if past is not None:
            found.new, found.used, found.gone = chunks.changes(past.chunks, some)
        if past is not None and not (found.new or found.gone):
            found.salts = past.salts
        elif some is None and len(chunks) <= self.salted_most:
            found.salts = Counter(one[:SHORT] or "-" for one in self.salts(show))
        return found

    def fans(self) -> tuple[Sequence[str], int]:
        """Return with which two digits names begin, and how many of these are a fair sample."""
        return (), 0

    @abstractmethod
    def salts(self, show: Show) -> Iterable[str]:
        """Read the salts (the digest, hex; "": none) of the chunks that begin a prompt."""

    def use(self, show: Show, *, exact: bool = True) -> NamespaceUse:
        """Count the space that the namespace takes; else of very many chunks a sample.

        Raises OSError.
        """
        (fans, many), (quarantine, leftovers) = self.fans(), self.other_nbytes()
        exact |= many == len(fans)
        total = self.names(show, None if exact else fans[:many]).totals()
        chunks, nbytes = total.chunks, total.nbytes
        if not exact:
            chunks, nbytes = (round(one * len(fans) / many) for one in (chunks, nbytes))
        return NamespaceUse(
            *(self.name, chunks, nbytes + quarantine, exact, total.pinned if exact else None),
            *(quarantine, leftovers, total.oldest_ns, total.newest_ns),
        )

    @abstractmethod
    def names(self, show: Show, fans: Sequence[str] | None = None) -> Listing:
        """List chunks, or those that begin with such digits, with or without their order.

        Raises OSError.
        """

    @abstractmethod
    def other_nbytes(self) -> tuple[int, int]:
        """Return the bytes in quarantine, and those left by a crash."""

    # -- who follows whom -------------------------------------------------------------------------

    @abstractmethod
    def listing(self, show: Show, past: Listing | None = None) -> Listing:
        """List chunks with their order; given the ``past`` result, only new chunks are read."""

    @abstractmethod
    def ancestors(self, chunk: str) -> Iterator[str]:
        """Yield a chunk and those before it, up to the first one or a gap."""

    # -- pins -------------------------------------------------------------------------------------

    @abstractmethod
    def pin(self, chunk: str) -> int:
        """Pin a chunk and its prefix; return how many chunks are held."""

    @abstractmethod
    def unpin(self, chunk: str) -> int:
        """Undo :meth:`pin`; return how many chunks are released."""


class Catalog(ABC):
    """A cache. Opened by :func:`vua.catalog.opening.open_catalog`."""

    look_s: float | None = None
    """Least seconds between two looks, if a look costs money."""
    keeps_own_ttls = True
    """Whether per-chunk times to live are applied."""

    def __init__(self, where: str, place: Location) -> None:
        self.where, self.place = where, place

    # -- what it is -------------------------------------------------------------------------------

    @property
    def counts(self) -> Mapping[str, int]:
        """Requests that this process sent, by kind; empty for a directory."""
        return {}

    @abstractmethod
    def is_local(self) -> bool:
        """Whether only this machine reaches the cache; False when in doubt."""

    # -- what lies in it --------------------------------------------------------------------------

    @abstractmethod
    def contents(self) -> tuple[list[Description], list[str]]:
        """Return the namespaces' descriptions, and the names of everything else."""

    def is_foreign(self) -> bool:
        """Whether a directory or prefix without a namespace is clearly not VUA's."""
        return False

    @abstractmethod
    def state(self, description: Description) -> str:
        """Return the state of ``namespace.json``: ``ok``, ``missing``, ``damaged``, or ``unknown``.

        Another version of VUA has written an unknown one.
        """

    @abstractmethod
    def content(
        self, description: Description, show: Show, *, long: bool = False, exact: bool = True
    ) -> Content:
        """Count the content of a namespace; else of very many chunks a sample. Raises OSError."""

    @abstractmethod
    def namespaces(
        self, show: Show
    ) -> contextlib.AbstractContextManager[tuple[Sequence[NamespaceCatalog], Sequence[str]]]:
        """Return a context with VUA's namespaces, and the names of everything else.

        Raises OSError.
        """

    def listing(self, description: Description, show: Show) -> Listing | None:
        """List a namespace's chunks with their order; None if that costs a request per chunk."""
        del description, show
        return None

    def use(self, show: Show, *, exact: bool = True) -> Use:
        """Count the space that is taken; else of very many chunks a sample.

        Raises OSError, ConfigError.
        """
        with explaining(self.where), self.namespaces(show) as (found, strays):
            rows, bounds = [one.use(show, exact=exact) for one in found], self.bounds()
            return Use(
                sum(one.chunks for one in rows),
                sum(one.nbytes for one in rows),
                exact=all(one.exact for one in rows),
                namespaces=rows,
                bounds=bounds,
                limits=self.limits_of(bounds),
                free_nbytes=self.free_nbytes(),
                strays=strays,
            )

    def free_nbytes(self) -> int | None:
        """Return the free bytes of the disk; None if only money limits the space."""
        return None

    def quick_use(self) -> Use | None:
        """Estimate it; None if counting costs no more. Raises OSError, ConfigError."""
        return None

    # -- what may be done to it -------------------------------------------------------------------

    @abstractmethod
    def claim(self) -> None:
        """Check that the cache may be changed: it has the mark, or is empty and gets it.

        Raises ConfigError if it holds something else, StorageError.
        """

    @abstractmethod
    def bounds(self) -> Limits:
        """Return the content of ``bounds.json``. Raises ConfigError for an unusable one."""

    def limits(self) -> Mapping[str, float | None]:
        """Return the limits in force, as :attr:`Use.limits`."""
        return self.limits_of(self.bounds())

    @abstractmethod
    def limits_of(self, bounds: Limits) -> Mapping[str, float | None]:
        """Return the limits in force with these in ``bounds.json``."""

    @abstractmethod
    def keep(self, news: Mapping[str, object]) -> None:
        """Write these limits into ``bounds.json``; limits that are not named stay."""

    def own_ttls(self) -> int:
        """Return how many chunks have their own time to live."""
        return 0

    @abstractmethod
    def collect(
        self, given: Limits, *, keep: bool = False, quick: bool = False,
        lost: Callable[[], frozenset[str]] | None = None, dry_run: bool = False,
        ask: Ask, show: Show,
    ) -> Collection:  # fmt: skip
        """Bring the cache within its limits and sweep it.

        Args:
            given: limits beside those of ``bounds.json``; with ``keep`` they are written there.
            keep: see ``given``.
            quick: skip what needs a header of each chunk.
            lost: returns the ids of all keys that are not lost; chunks sealed with other keys are
                deleted.
            dry_run: change nothing, and report what would be deleted.
            ask: asks before much is deleted.
            show: reports progress.
        """

    def remove(
        self, names: Sequence[str], *, force: bool, dry_run: bool, ask: Ask, show: Show
    ) -> Removal:
        """Delete chunks with all that follow them, leaves first, or namespaces.

        Args:
            names: first digits of names; none for all namespaces.
            force: also pinned chunks.
            dry_run: change nothing, and report what would be deleted.
            ask: asks before anything is deleted.
            show: reports progress.
        """
        whole, some = list[NamespaceCatalog](), dict[NamespaceCatalog, Listing]()
        with explaining(self.where), self.namespaces(show) as (found, strays):
            done, picked = Removal(strays=strays), [resolve(found, one) for one in names]
            picked = picked or [(one, "") for one in found if one.is_ours]
            for space, chunk in sorted(picked, key=lambda one: one[1]):  # namespaces come first
                if not (chunk or space.is_ours):
                    raise ConfigError(f"{space.name} is not a namespace of VUA, it stays unchanged")
                if space in whole:
                    continue
                if space not in some:
                    some[space] = space.listing(show) if chunk else space.names(show)
                total = some[space].totals()
                if chunk or (total.pinned and not force):
                    some[space].doom_below(chunk)
                    continue
                whole.append(space)
                del some[space]
                done.chunks += total.chunks
                done.nbytes += total.nbytes + space.other_nbytes()[0]
            for listing in some.values():
                done.kept += 0 if force else listing.spare_pinned()
                total = listing.totals(doomed=True)
                done.chunks += total.chunks
                done.nbytes += total.nbytes
            if (done.chunks or whole) and not dry_run:
                part = counted(len(whole), "namespace") if whole else "chunks"
                text = f"{counted(done.chunks, 'chunk')}, {size(done.nbytes)}"
                ask(f"Delete {part if names else 'everything'} in {self.where} ({text})?")
            if not dry_run:
                self.delete(doomed(some, show), whole, done)
        return done

    @abstractmethod
    def delete(
        self, chunks: Iterable[tuple[Any, ListedChunk]], whole: Sequence[Any], done: Removal
    ) -> None:
        """Delete chunks, in this order, each with its namespace; and ``whole`` namespaces.

        ``done`` says what all of it is; that is corrected to what was deleted.
        """

    def pins_may_hold(self) -> int | None:
        """Return how many bytes of pinned chunks stay when space is needed; None for all."""
        return None

    # -- whether it is sound ----------------------------------------------------------------------

    def verify(
        self, description: Description, keys: KnownKeys, share: float, show: Show, *, repair: bool
    ) -> Verification:
        """Read and check a random ``share`` of a namespace's entries.

        With ``repair`` damaged ones are quarantined.
        """
        result = Verification(description, self.state(description))
        parts = self.checked(description, keys, share, repair=repair)
        for number, (total, part) in enumerate(parts, 1):
            result.join(part)
            show(description.name[:SHORT], number, total, amount=result.nbytes)
        if result.state == self.state(description) == "missing" and result.counts:
            reason = (
                "missing: the next save writes it; entries' headers say what is needed meanwhile"
            )
            result.problems.append((DESCRIPTION, "error", reason))
        if wrong := result.wrong_description():
            reason = f"{wrong}; the next save writes it anew"
            result.problems.append((DESCRIPTION, "corrupt", reason))
        return result

    @abstractmethod
    def checked(
        self, description: Description, keys: KnownKeys, share: float, *, repair: bool
    ) -> Iterator[tuple[int, Verification]]:
        """Check the parts of a namespace; also yield how many there are, 0 if that is not known."""

    def findings(self, security: Security, demand: Demand) -> Iterator[Finding]:
        """Probe what VUA needs of the storage, and its speed. Leaves no lasting change."""
        del demand
        yield from self.findings_at_rest(security)

    def findings_at_rest(self, security: Security) -> list[Finding]:
        """Return the findings that need no writing."""
        del security
        return []

    def rules(self) -> tuple[Rules | None, list[Finding]]:
        """Return lifecycle rules for the cache, if it can have any, and findings about them."""
        return None, []


N = TypeVar("N", bound=NamespaceCatalog)


def doomed(listings: Mapping[N, Listing], show: Show) -> Iterator[tuple[N, ListedChunk]]:
    """Yield the chunks to delete, each with its namespace, and in its order."""
    freed = 0
    for space, listing in listings.items():
        for name in listing.doomed():
            if (chunk := listing.get(name)) is not None:
                show(f"{space.name[:SHORT]}: deleting", amount=freed)
                freed += chunk.nbytes
                yield space, chunk


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


def key_ids(security: Security) -> frozenset[str]:
    """Return the ids of all keys, read now; never none, as then every key would count as lost.

    Raises ConfigError if no key is given, if a file is not a usable key, or if a directory of keys
    holds none.
    """
    if security.key_file is None and security.tenant_keys is None:
        msg = "--lost-keys needs the keys that are not lost: --key-file, --tenant-keys, or both"
        raise ConfigError(msg)
    known = KnownKeys(security)
    if security.tenant_keys is not None and not known.tenants:
        raise ConfigError(
            f"--tenant-keys {security.tenant_keys} holds no key, so every tenant's chunks would "
            "go; is it the right directory? Leave it out if that is meant (and give --key-file)"
        )
    return known.ids
