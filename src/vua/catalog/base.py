"""A cache as its operator sees it: what lies in it, what that takes, and what may be done to it.

Every command of `vua` speaks to a :class:`Catalog` and knows no kind of place. There is one of
directories (:mod:`vua.catalog.directory`), one of buckets (:mod:`vua.catalog.bucket`), and one of
anything that can list its entries (:mod:`vua.catalog.listed`): a new kind of place derives from
that one and is made known with :func:`vua.catalog.opening.register`.

Engines may write and delete meanwhile: a file that vanishes is skipped.
"""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from vua.capacity.limits import Limits
from vua.capacity.prefix_tree import PrefixTree
from vua.capacity.removal import NOTHING, Freed
from vua.capacity.scan import Show
from vua.capacity.use_log import UseLog
from vua.catalog.check import NO_KEYS, Item, Kind, OpenFile, Verification
from vua.errors import ConfigError
from vua.format.layout import KVLayout, Shard
from vua.format.parse import EntryInfo
from vua.security.keyring import KnownKeys
from vua.security.settings import Security
from vua.storage.description import Description
from vua.storage.location import Location

__all__ = [
    "DELETED",
    "MAX_FILE_NBYTES",
    "NO_KEYS",
    "NO_LIMITS",
    "SHORT",
    "Adoption",
    "Ask",
    "Catalog",
    "Collection",
    "Content",
    "Counted",
    "Finding",
    "Item",
    "Kind",
    "Level",
    "Links",
    "Look",
    "NamespaceCatalog",
    "NamespaceUse",
    "OpenFile",
    "Removal",
    "Rules",
    "Use",
    "key_ids",
    "resolve",
    "size",
]

SHORT: Final = 12
"""Hex digits that are shown of a digest."""
MAX_FILE_NBYTES: Final = 4 << 30
"""No chunk's file is larger; one that claims to be is not read."""
DELETED: Final = ("lost_keys", "evicted", "expired", "over_quota", "orphans", "leftovers")
"""Why `vua gc` deletes."""
NO_LIMITS: Final = Limits()
_NAME: Final = re.compile(r"[0-9a-f]{6,64}")

Level: TypeAlias = Literal["ok", "note", "bad"]
Ask: TypeAlias = Callable[[str], None]
"""Asks the operator whether to go on. Raises ConfigError where the answer is no."""


class Counted(NamedTuple):
    """What a part of a namespace holds, counted where it was listed: it may be another process."""

    chunks: int
    files: int
    nbytes: int
    newest_s: float | None
    entries: list[Item]
    """Each entry, where they are to be listed."""
    strays: list[str]
    """Paths of what is not of VUA."""

    @classmethod
    def of(cls, items: Iterable[Item], *, long: bool) -> Counted:
        """Count items that hold all of their chunks."""
        items = list(items)
        entries = [one for one in items if one.kind == "entry" and one.regular]
        return cls(
            len({one.chunk for one in entries}),
            len(entries),
            sum(one.nbytes for one in entries),
            max((one.modified_s for one in entries), default=None),
            entries if long else [],
            [one.path for one in items if one.kind == "stray"],
        )


@dataclass(slots=True)
class Content:
    """What a namespace holds."""

    description: Description
    state: str
    """What ``namespace.json`` is: ``ok``, ``missing``, ``damaged`` or ``later``."""
    chunks: int = 0
    files: int = 0
    nbytes: int = 0
    newest_s: float | None = None
    entries: list[Item] = field(default_factory=list)
    """Each entry, where they are to be listed."""
    strays: list[str] = field(default_factory=list)
    """Paths of what is not of VUA."""

    def add(self, part: Counted) -> None:
        """Add a part of the namespace."""
        self.chunks += part.chunks
        self.files += part.files
        self.nbytes += part.nbytes
        self.newest_s = max(filter(None, (self.newest_s, part.newest_s)), default=None)
        self.entries += part.entries
        self.strays += part.strays

    @property
    def model(self) -> str:
        """The model's name, empty where it is not known."""
        identity = self.description.identity
        return "" if identity is None else identity.name or identity.model


@dataclass(frozen=True, slots=True)
class NamespaceUse:
    """What a namespace takes."""

    namespace: str
    chunks: int
    nbytes: int
    """Bytes of its entries; in a directory also those of marks and quarantine."""
    pinned: int
    """Chunks that pins hold."""
    quarantine: int
    """Bytes of damaged files that were put aside."""
    leftovers: int
    """Bytes that a crash left."""
    oldest_ns: int | None
    """When the least recently used chunk was used (in a bucket: written or renewed)."""
    newest_ns: int | None


@dataclass(frozen=True, slots=True)
class Use:
    """What a cache takes, and what it may take."""

    chunks: int
    nbytes: int
    exact: bool
    """Whether all was counted, not estimated from a sample."""
    namespaces: Sequence[NamespaceUse]
    bounds: Limits
    """What ``bounds.json`` says."""
    limits: Mapping[str, float | None]
    """The limits that hold now, in bytes and seconds, as `ResolvedLimits` names them."""
    free_nbytes: int | None
    """None where nothing bounds the place but money."""
    strays: Sequence[str]


@dataclass(slots=True)
class Collection:
    """What `vua gc` did."""

    chunks: int
    """That are left."""
    nbytes: int
    exact: bool
    within: bool
    """Whether the cache is within its limits now."""
    limits: Mapping[str, float | None]
    deleted: dict[str, Freed] = field(default_factory=lambda: dict.fromkeys(DELETED, NOTHING))
    free_nbytes: int | None = None
    free_inodes: int | None = None
    emptied: int = 0
    """Namespaces without a chunk that were deleted."""
    pinned_nbytes: int | None = None
    """None where it was not looked at."""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    strays: Sequence[str] = ()


@dataclass(slots=True)
class Removal:
    """What `vua rm` did."""

    chunks: int = 0
    nbytes: int = 0
    objects: int | None = None
    """Objects that went; None of a directory, where they are not counted."""
    kept: int = 0
    """Pinned chunks that stay."""
    left: str = ""
    """What is to say of chunks that can be neither moved nor deleted."""
    strays: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Adoption:
    """What a place holds that is to become a cache of VUA, or is one."""

    was_marked: bool
    namespaces: Sequence[str]
    """Names of those that are of VUA."""
    others: Sequence[str]
    """Names of what is not, and stays as it is."""
    chunks: int | None
    """None of a bucket: counting costs requests."""
    nbytes: int | None
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Finding:
    """What one probe found."""

    name: str
    level: Level
    """``note``: VUA works, with less speed or fewer hits. ``bad``: a promise does not hold here."""
    text: str
    """What it means, and what to do."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Lifecycle rules for a bucket that delete what was not used for so long."""

    days: int
    rules: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Look:
    """A namespace at one moment, from names, times and sizes alone."""

    name: str
    model: str
    mtimes_ns: Mapping[bytes, int]
    """When each chunk was last used, by its digest, ns by the server's clock."""
    chunk_nbytes: float
    """Mean size of a chunk."""
    salts: Mapping[str, int]
    """First chunks by the first digits of their salt's digest, where that is cheap to know."""


@dataclass(frozen=True, slots=True)
class Links:
    """Which chunk follows which."""

    order: Sequence[str]
    """The chunks that have their whole prefix, parents before children."""
    befores: Mapping[str, str | None]
    """By chunk the one before it: "" for a first one, None where that cannot be read."""
    mtimes_ns: Mapping[str, int]
    tree: PrefixTree | None = None
    """None where shards are known from the listing."""


class NamespaceCatalog(ABC):
    """The chunks of one namespace."""

    name: str

    @property
    @abstractmethod
    def description(self) -> Description:
        """What it says of itself."""

    @property
    @abstractmethod
    def layouts(self) -> tuple[KVLayout, ...]:
        """One per group of layers, as its entries' headers bear them out; () if not known."""

    # -- reading ----------------------------------------------------------------------------------

    @abstractmethod
    def matching(self, digits: str) -> list[str]:
        """Return the chunks whose names begin so, in order."""

    @abstractmethod
    def holds(self, chunk: str) -> bool:
        """Whether a chunk is there."""

    @abstractmethod
    def header(self, chunk: str) -> EntryInfo | None:
        """Return what an entry of a chunk says; None where none is there or it cannot be read."""

    @abstractmethod
    def shards(self, chunk: str) -> list[Shard | None]:
        """Return the shards of a chunk's entries."""

    @abstractmethod
    def listed(self, chunk: str) -> list[str]:
        """Return the names of what lies in a chunk's folder, in order."""

    @abstractmethod
    def opened(self, path: str) -> contextlib.AbstractContextManager[OpenFile]:
        """Return a file, open for reading, by its path in the namespace. Raises OSError."""

    @abstractmethod
    def look(self) -> Look:
        """Return what names and times tell now."""

    # -- who follows whom -------------------------------------------------------------------------

    @abstractmethod
    def links(self, show: Show, past: Links | None = None) -> Links:
        """Return who follows whom; with what was found before only what is new is read."""

    @abstractmethod
    def ancestors(self, chunk: str) -> Iterator[str]:
        """Yield a chunk and what comes before it, up to the first one or a gap."""

    @abstractmethod
    def descendants(self, chunk: str, show: Show) -> list[str]:
        """Return a chunk and all that follow it, parents before children."""

    @abstractmethod
    def in_order(self, show: Show) -> list[str]:
        """Return all chunks that have their whole prefix, parents before children."""

    # -- pins -------------------------------------------------------------------------------------

    @abstractmethod
    def pin(self, chunk: str) -> int:
        """Keep a chunk and its prefix until it is unpinned; return how many chunks are held."""

    @abstractmethod
    def unpin(self, chunk: str) -> int:
        """Undo :meth:`pin`; return how many chunks are released."""

    @abstractmethod
    def pins(self) -> dict[str, int]:
        """Return the chunks that are pinned, each with the number of chunks that it holds."""

    def pinned_nbytes(self, chunks: Sequence[str] | None = None) -> int:
        """Return the bytes that pins hold: all of them, or those of ``chunks`` and prefixes.

        0 where no limit makes pinned chunks go.
        """
        del chunks
        return 0


class Catalog(ABC):
    """A cache. Opened by :func:`vua.catalog.opening.open_catalog`."""

    look_s: float | None = None
    """Least seconds between two looks, where a look costs money."""
    keeps_own_ttls = True
    """Whether a chunk's own time to live is kept to."""

    def __init__(self, where: str, place: Location) -> None:
        """Take the place, which the operator calls ``where``."""
        self.where, self.place = where, place

    # -- what it is -------------------------------------------------------------------------------

    @property
    def counts(self) -> Mapping[str, int]:
        """Requests that this process sent there, by kind; none to a directory."""
        return {}

    def monthly_dollars(self, nbytes: int) -> float | None:
        """Return what so many bytes cost in a month; None where nothing bills them."""
        del nbytes
        return None

    @abstractmethod
    def is_local(self) -> bool:
        """Whether what is stored there is this machine's alone; False when in doubt."""

    # -- what lies in it --------------------------------------------------------------------------

    @abstractmethod
    def contents(self) -> tuple[list[Description], list[str]]:
        """Return what namespaces say of themselves, and the names of what else lies there."""

    def is_foreign(self) -> bool:
        """Whether a place without a namespace shows that it is none of VUA's."""
        return False

    @abstractmethod
    def state(self, description: Description) -> str:
        """Return what ``namespace.json`` is: ``ok``, ``missing``, ``damaged`` or ``later``."""

    @abstractmethod
    def content(self, description: Description, show: Show, *, long: bool = False) -> Content:
        """Count what lies in a namespace. Raises OSError."""

    @abstractmethod
    def namespaces(
        self, show: Show
    ) -> contextlib.AbstractContextManager[tuple[Sequence[NamespaceCatalog], Sequence[str]]]:
        """Give the namespaces of VUA, and the names of what is not of VUA. Raises OSError."""

    def tree(
        self, description: Description, show: Show, known: PrefixTree | None = None
    ) -> PrefixTree | None:
        """Return who follows whom in a namespace; None where that costs a request a chunk."""
        del description, show, known
        return None

    def sampled_tree(
        self, description: Description
    ) -> tuple[PrefixTree, npt.NDArray[np.float64]] | None:
        """Return what random chunks of a large namespace say, and for how many each stands.

        None where all can be read as fast, or where that costs a request a chunk.
        """
        del description
        return None

    @abstractmethod
    def use(self, show: Show) -> Use:
        """Count what is occupied. Raises OSError, ConfigError."""

    def quick_use(self, said: Limits = NO_LIMITS) -> Use | None:
        """Estimate it, by limits that are ``said``, too; None where counting costs no more.

        Raises OSError, ConfigError.
        """
        del said
        return None

    def use_log(self) -> UseLog:
        """Return the log of requests. Raises ConfigError where none is kept."""
        msg = f"{self.where}: requests are logged in directories; name the one before the bucket"
        raise ConfigError(msg)

    # -- what may be done to it -------------------------------------------------------------------

    @abstractmethod
    def claim(self) -> None:
        """See that the place may be changed: it has the mark, or is empty and gets it.

        Raises ConfigError where it is something else, StorageError.
        """

    @abstractmethod
    def adopt(self, ask: Callable[[Adoption], None]) -> Adoption:
        """Mark it as a cache, unless it is marked; ``ask`` is told what is there before that."""

    @abstractmethod
    def bounds(self) -> Limits:
        """Return what ``bounds.json`` says. Raises ConfigError for an unusable one."""

    @abstractmethod
    def limits(self) -> Mapping[str, float | None]:
        """Return the limits that hold now, as :attr:`Use.limits`."""

    @abstractmethod
    def keep(self, news: Mapping[str, object]) -> None:
        """Write these limits into ``bounds.json``; limits that are not named stay."""

    @abstractmethod
    def own_ttls(self) -> int:
        """Return how many chunks have a time to live of their own."""

    @abstractmethod
    def collect(
        self, said: Limits, *, keep: bool = False, quick: bool = False,
        lost: Callable[[], frozenset[str]] | None = None, dry_run: bool = False,
        ask: Ask, show: Show,
    ) -> Collection:  # fmt: skip
        """Bring it within its limits and sweep it.

        Args:
            said: limits beside those of ``bounds.json``; with ``keep`` they are written there.
            keep: see ``said``.
            quick: leave out what needs a header of each chunk.
            lost: returns the ids of all keys that are not lost; what another one seals goes.
            dry_run: change nothing, and tell what would go.
            ask: is asked before much goes.
            show: is told how far it is.
        """

    @abstractmethod
    def remove(
        self, names: Sequence[str], *, everything: bool, force: bool, dry_run: bool, ask: Ask,
        show: Show,
    ) -> Removal:  # fmt: skip
        """Delete chunks with all that follows them, or namespaces.

        Args:
            names: first digits of names.
            everything: all namespaces, in place of ``names``.
            force: pinned chunks, too.
            dry_run: change nothing, and tell what would go.
            ask: is asked before much goes.
            show: is told how far it is.
        """

    def pins_may_hold(self) -> int | None:
        """Return how many bytes of pinned chunks stay when room is needed; None for all."""
        return None

    # -- whether it is sound ----------------------------------------------------------------------

    @abstractmethod
    def verify(
        self, description: Description, keys: KnownKeys, share: float, show: Show, *, repair: bool
    ) -> Verification:
        """Read a ``share`` of a namespace's entries, chosen at random, and check them.

        With ``repair`` what is damaged is taken out of sight.
        """

    def findings(self, security: Security) -> Iterator[Finding]:
        """Try out what VUA needs of the place. Changes nothing that lasts."""
        yield from self.findings_at_rest(security)

    def findings_at_rest(self, security: Security) -> list[Finding]:
        """Return what is found where nothing is written."""
        del security
        return []

    def rules(self) -> tuple[Rules | None, list[Finding]]:
        """Return lifecycle rules for the place, where it takes any, and what is to say of them."""
        return None, []


N = TypeVar("N", bound=NamespaceCatalog)


def resolve(found: Sequence[N], digits: str) -> tuple[N, str]:
    """Return the one namespace (with "") or chunk whose name begins so. Raises ConfigError."""
    if not _NAME.fullmatch(digits):
        msg = f"{digits!r} is no name; give 6 or more hex digits of a chunk's or a namespace's name"
        raise ConfigError(msg)
    hits = [(one, "") for one in found if one.name.startswith(digits)]
    hits += [(one, chunk) for one in found for chunk in one.matching(digits)]
    if len(hits) != 1:
        some = ", ".join(f"{one.name[:SHORT]}/{chunk[:SHORT]}" for one, chunk in hits[:5])
        what = f"stands for {len(hits)} things: {some}" if hits else "is not stored"
        msg = f"{digits}: {what}; `vua ls --long` lists the names"
        raise ConfigError(msg)
    return hits[0]


def size(nbytes: float) -> str:
    """Return ``nbytes`` in the unit that keeps it short.

    >>> size(512), size(4096), size(5_000_000)
    ('512 B', '4.0 KiB', '4.8 MiB')
    """
    step = max(0, min(int(nbytes).bit_length() - 1, 50)) // 10
    if step == 0:
        return f"{int(nbytes)} B"
    return f"{nbytes / (1 << 10 * step):.1f} {'_KMGTP'[step]}iB"


def key_ids(security: Security) -> frozenset[str]:
    """Return the ids of all keys, read now; never none, which would make every key a lost one.

    Raises ConfigError where nothing is given, where a file of it is no usable key, or where a
    directory of keys holds none.
    """
    if security.key_file is None and security.tenant_keys is None:
        msg = "--lost-keys needs the keys that are not lost: --key-file, --tenant-keys, or both"
        raise ConfigError(msg)
    known = KnownKeys(security)
    if security.tenant_keys is not None and not known.tenants:
        msg = (
            f"--tenant-keys {security.tenant_keys} holds no key, so every tenant's chunks would "
            "go; is it the right directory? Leave it out if that is meant (and give --key-file)"
        )
        raise ConfigError(msg)
    return known.ids
