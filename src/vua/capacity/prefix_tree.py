"""The order of stored chunks, read from their headers: for tools and for the full pass.

A header names the preceding chunk (`parent`), and where extras hide that, a file ``after-<name>``
beside it does. This gives orphans (chunks that no lookup can reach any more), pins of whole
prefixes, and each chunk's salt. It reads one header per chunk, so serving processes never do it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from vua.capacity.lru import mtime_ns_of
from vua.capacity.scan import (
    Show,
    Space,
    chunks_of,
    fans_of,
    listed,
    silent,
)
from vua.format.parse import parent_in
from vua.io.posix import close_quietly
from vua.io.spool import Rows, Spool
from vua.storage.local import SUFFIX, TEMPORARY, chunk_path
from vua.storage.names import AFTER, PIN

R = TypeVar("R")

_HEADER_NBYTES: Final = 1024
"""Enough of a header to hold the parent's hash."""


class ChunkNode(NamedTuple):
    """The content of one chunk's directory."""

    before: str
    """The preceding chunk, empty for a first chunk (or if nothing can be read)."""
    salt: bytes
    """For a first chunk: the digest of its extras, empty without."""
    nbytes: int
    files: int
    """Entries, whole or damaged."""
    temporary: bool
    """Whether files are being written there, or were left behind."""
    pinned: tuple[str, ...]
    """The chunks whose pins hold this one."""


KnownNodes: TypeAlias = dict[str, tuple[int, ChunkNode]]
"""Chunks by name: their mtimes (ns), and the content of their directories then."""

_ROW: Final = np.dtype(
    [
        ("name", "V32"),
        ("before", "V32"),
        ("mtime_ns", "<i8"),
        ("nbytes", "<i8"),
        ("pinned", "?"),
        ("is_first", "?"),
    ]
)
"""A chunk: its prefix hash, that of the preceding chunk (of a first chunk: the digest of its
extras, zeros without), its mtime, its bytes, whether it is pinned, whether it begins a prompt."""
_AT_ONCE: Final = 1 << 10
"""Chunks whose arrays are computed at once."""
_INDEX_BITS: Final = 40
"""An index needs so many, and a depth 23."""

Indices: TypeAlias = npt.NDArray[np.signedinteger[Any]]
"""Of chunks in a tree; as small as they can be."""
_Bools: TypeAlias = npt.NDArray[np.bool_]
_Ints: TypeAlias = npt.NDArray[np.int64]
_Digests: TypeAlias = npt.NDArray[np.void]


def _number(digests: _Digests) -> npt.NDArray[np.uint64]:
    """Return the first 8 bytes of digests: numbers that sort as these do."""
    words = np.ascontiguousarray(digests).view(">u8").reshape(-1, 4)
    return words[:, 0].astype(np.uint64)


class PrefixTree:
    """The order of a namespace's chunks, which are indexed in the order of their names.

    Only each chunk's predecessor is in memory, 4 bytes. All else is in a temporary file
    (:class:`vua.io.spool.Spool`): an attribute that is an array is read at each access.
    """

    def __init__(self, rows: Spool, unsettled: list[str]) -> None:
        """Use rows that are sorted by name. Raises OSError."""
        self._rows = rows
        self.unsettled = unsettled
        """Chunks without a file, or with temporary ones."""
        count = len(rows)
        small = np.int32 if count < np.iinfo(np.int32).max else np.int64
        self._above: Indices = np.full(count + 1, count, dtype=small)
        numbers = self._numbers()
        for start, some in rows.blocks():
            here = np.arange(start, start + len(some), dtype=small)
            above = self._indices_of(numbers, some["before"])
            self._above[start : start + len(some)] = np.where(some["is_first"], here, above)

    def __len__(self) -> int:
        return len(self._rows)

    # -- what is known of each chunk --------------------------------------------------------------

    @property
    def parent(self) -> Indices:
        """Index of the preceding chunk; of a first chunk its own, of an orphan ``len(self)``."""
        return self._above[:-1]

    @property
    def names(self) -> _Digests:
        """Prefix hashes, 32 bytes each."""
        return self._rows.column("name")

    @property
    def mtimes_ns(self) -> _Ints:
        return self._rows.column("mtime_ns")

    @property
    def nbytes(self) -> _Ints:
        return self._rows.column("nbytes")

    @property
    def pinned(self) -> _Bools:
        return self._rows.column("pinned")

    def blocks(self) -> Iterator[tuple[int, Rows]]:
        """Yield all chunks, some at a time, each time with the first one's index.

        Fields are ``name``, ``before``, ``mtime_ns``, ``nbytes``, ``pinned`` and ``is_first``.
        """
        return self._rows.blocks()

    def rows(self, which: Indices) -> Rows:
        """Return some chunks, as :meth:`blocks` does."""
        return self._rows.take(which)

    def name(self, index: int) -> str:
        return bytes(self._rows.rows(index, index + 1)["name"][0]).hex()

    def named(self, which: Indices) -> Iterator[str]:
        """Yield the names of chunks."""
        for start in range(0, len(which), _AT_ONCE):
            for name in self.rows(which[start : start + _AT_ONCE])["name"]:
                yield bytes(name).hex()

    # -- which chunk has a name -------------------------------------------------------------------

    def _numbers(self) -> npt.NDArray[np.uint64]:
        numbers = np.empty(len(self), dtype=np.uint64)
        for start, rows in self._rows.blocks():
            numbers[start : start + len(rows)] = _number(rows["name"])
        return numbers

    def _indices_of(self, numbers: npt.NDArray[np.uint64], wanted: _Digests) -> Indices:
        """Return the index of each of some digests; ``len(self)`` where it is not in the tree."""
        count = len(self)
        if not count:
            return np.zeros(len(wanted), dtype=np.int64)
        wanted = np.ascontiguousarray(wanted)
        sought = _number(wanted)
        at = np.searchsorted(numbers, sought)
        is_near = at < count
        is_near[is_near] = numbers[at[is_near]] == sought[is_near]
        near = np.flatnonzero(is_near)
        found = np.full(len(wanted), count, dtype=np.int64)
        same = np.ascontiguousarray(self.rows(at[near])["name"]) == wanted[near]
        found[near[same]] = at[near[same]]
        for one in near[~same].tolist():  # another name with the same first 8 bytes
            place = int(at[one]) + 1
            while place < count and numbers[place] == sought[one]:
                if bytes(self._rows.rows(place, place + 1)["name"][0]) == bytes(wanted[one]):
                    found[one] = place
                    break
                place += 1
        return found

    def finder(self) -> Callable[[_Digests], Indices]:
        """Return a function from names to indices, ``len(self)`` for what is not in the tree.

        It holds 8 bytes per chunk.
        """
        return partial(self._indices_of, self._numbers())

    def index(self, chunk: str) -> int:
        """Return a chunk's index; ``len(self)`` if it is not in the tree."""
        wanted, low, high = bytes.fromhex(chunk), 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if bytes.fromhex(self.name(middle)) < wanted:
                low = middle + 1
            else:
                high = middle
        return low if low < len(self) and self.name(low) == chunk else len(self)

    # -- who follows whom -------------------------------------------------------------------------

    @property
    def first(self) -> Indices:
        """Index of each chunk's first ancestor; ``len(self)`` if the chain is broken.

        A circular chain is broken, too: only foreign files cause that.
        """
        return self._firsts(self._above.copy())

    def reached(self, whole: _Bools) -> _Bools:
        """Return which chunks are whole, with all before them."""
        above = self._above.copy()
        above[:-1][~whole] = len(self)
        return self._firsts(above) < len(self)

    def _firsts(self, above: Indices) -> Indices:
        """Climb; ``above`` is overwritten. A predecessor ``len(self)`` is a gap."""
        count = len(self)
        for _ in range(len(above).bit_length()):
            for part in self._parts():
                above[part] = above[above[part]]  # twice as far, or farther by an earlier part
        for part in self._parts():
            some = above[part]
            some[self._above[some] != some] = count
        return above[:-1]

    def _parts(self) -> Iterator[slice]:
        """Yield slices of all chunks and the gap after them: numpy copies what indexes an array."""
        for start in range(0, len(self._above), _AT_ONCE):
            yield slice(start, start + _AT_ONCE)

    def _depths(self) -> Indices:
        """Return how many chunks precede each; of a circle anything."""
        above = self._above.copy()
        depth = np.ones_like(above)
        for part in self._parts():
            some = above[part]
            depth[part][some == np.arange(part.start, part.start + len(some))] = 0
        for _ in range(len(above).bit_length()):
            for part in self._parts():
                depth[part] += depth[above[part]]
                above[part] = above[above[part]]
        return depth[:-1]

    def needed(self) -> tuple[_Ints, Indices]:
        """Return when each chunk or one that follows it was last used, in ns, and its depth."""
        depth, above = self._depths(), self.parent
        order = np.argsort(-depth, kind="stable").astype(depth.dtype)
        edges = np.flatnonzero(np.diff(depth[order])) + 1
        needed_ns = self.mtimes_ns
        for level in np.split(order, edges):  # from the deepest on
            for start in range(0, len(level), _AT_ONCE):
                some = level[start : start + _AT_ONCE]
                some = some[above[some] < len(self)]
                np.maximum.at(needed_ns, above[some], needed_ns[some])
        return needed_ns, depth

    def in_order(self) -> list[str]:
        """Return all chunks whose whole prefix is stored, parents before children."""
        return list(self.named(self.order()))

    def order(self, which: _Bools | None = None) -> Indices:
        """Return all chunks whose whole prefix is stored, or those of ``which``, parents first."""
        which = self.first < len(self) if which is None else which
        depth = self._depths()
        found: Indices = np.flatnonzero(which)
        for start in range(0, len(found), _AT_ONCE):
            some = found[start : start + _AT_ONCE]
            some |= depth[some].astype(np.int64) << _INDEX_BITS  # to sort both in place
        found.sort()
        found &= (1 << _INDEX_BITS) - 1
        return found

    def descendants(self, chunk: str) -> list[str]:
        """Return a chunk and all that follow it, parents before children; [] if it is missing."""
        start = self.index(chunk)
        if start == len(self):
            return []
        children, seen = self.children(), {start}
        found = [start]
        for index in found:  # grows meanwhile, but ends even if the chain is a circle
            news = [one for one in children(index) if one not in seen]
            seen.update(news)
            found += news
        return list(self.named(np.array(found)))

    def children(self) -> Callable[[int], list[int]]:
        """Return a function from a chunk to those that follow it; it holds 8 bytes per chunk.

        Given ``len(self)`` it returns the orphans.
        """
        order = np.argsort(self.parent, kind="stable").astype(self._above.dtype)
        above = self.parent[order]

        def of(index: int) -> list[int]:
            start, stop = np.searchsorted(above, np.array([index, index + 1], dtype=above.dtype))
            return [one for one in order[start:stop].tolist() if one != index]

        return of

    def salts(self) -> tuple[Indices, int]:
        """Return the number of each chunk's salt, and how many there are.

        It is that of the extras of its prompt's first chunk; 0 without any, and for a broken chain.
        """
        places, digests = [], []
        for start, rows in self._rows.blocks():
            numbers = _number(rows["before"])
            at = np.flatnonzero(rows["is_first"] & (numbers != 0))
            places.append((at + start).astype(self._above.dtype))
            digests.append(numbers[at])
        roots = np.concatenate([*places, np.empty(0, dtype=self._above.dtype)])
        known = np.concatenate([*digests, np.empty(0, dtype=np.uint64)])
        salts = np.unique(known)
        found = np.zeros_like(self._above)
        found[roots] = np.searchsorted(salts, known) + 1
        return found[self.first], len(salts) + 1

    def followers(self) -> Followers:
        extras = np.zeros(len(self), dtype=np.bool_)
        for start, rows in self._rows.blocks():
            extras[start : start + len(rows)] = rows["is_first"] & (_number(rows["before"]) != 0)
        return Followers(self._numbers(), self.parent, extras)

    def nodes(self, fan: str) -> KnownNodes:
        """Return what is known of the chunks in one fan-out directory."""
        edges = [bytes([int(fan, 16)]), bytes([int(fan, 16) + 1]) if fan != "ff" else b""]
        keys = range(len(self))
        start, stop = (
            bisect_left(keys, edge, key=lambda one: bytes.fromhex(self.name(one)))
            if edge
            else len(self)
            for edge in edges
        )
        known: KnownNodes = {}
        for row in self._rows.rows(start, stop):
            name, before = bytes(row["name"]).hex(), bytes(row["before"])
            salt = before if row["is_first"] and any(before) else b""
            pins = ("",) if row["pinned"] else ()
            above = "" if row["is_first"] else before.hex()
            node = ChunkNode(above, salt, int(row["nbytes"]), 1, temporary=False, pinned=pins)
            known[name] = int(row["mtime_ns"]), node
        for name in self.unsettled:
            known.pop(name, None)
        return known


class Followers(NamedTuple):
    """Which chunks follow which, in 13 bytes per chunk, without their names."""

    numbers: npt.NDArray[np.uint64]
    """The first 8 bytes of each name."""
    parent: Indices
    """As :attr:`PrefixTree.parent`."""
    extras: _Bools
    """Whether a first chunk has extras: a salt, a LoRA adapter, an image."""

    def of(self, before: str) -> Indices:
        """Return what follows chunk ``before``; what begins prompts for ""."""
        if not before:
            own = np.arange(len(self.parent), dtype=self.parent.dtype)
            first: Indices = np.flatnonzero(self.parent == own)
            return first
        place = self._index_of(before)
        found: Indices = np.flatnonzero(self.parent == (place if place >= 0 else -1))
        return self.without(found, before)

    def _index_of(self, chunk: str) -> int:
        number = np.uint64(int(chunk[:16], 16))
        at = int(np.searchsorted(self.numbers, number))
        return at if at < len(self.numbers) and self.numbers[at] == number else -1

    def without(self, which: Indices, chunk: str) -> Indices:
        """Return ``which`` without one chunk."""
        found: Indices = which[which != self._index_of(chunk)]
        return found


def read_node(space: Space, chunk: str) -> ChunkNode:
    """Read a chunk's directory and one of its headers; unreadable parts are left out."""
    before, salt, nbytes, files, temporary = "", b"", 0, 0, False
    pinned, known = [], False
    with listed(space.fd, chunk_path(chunk)) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):  # after- comes first
            name = entry.name
            if name.startswith(AFTER):
                before, known = name[len(AFTER) :], True
            elif name.startswith(PIN):
                pinned.append(name[len(PIN) :])
            elif name.startswith(TEMPORARY):
                temporary = True
            elif name.endswith(SUFFIX):
                files += 1
                with contextlib.suppress(OSError):
                    nbytes += entry.stat(follow_symlinks=False).st_size
                if not known:
                    found = _read_parent(space, f"{chunk_path(chunk)}/{name}")
                    if found is not None:
                        (before, salt), known = found, True
    return ChunkNode(before, salt, nbytes, files, temporary, tuple(pinned))


def _read_parent(space: Space, path: str) -> tuple[str, bytes] | None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, dir_fd=space.fd)
        try:
            head = os.pread(fd, _HEADER_NBYTES, 0)
        finally:
            close_quietly(fd)
    except OSError:
        return None
    return parent_in(head)


def ancestors(space: Space, chunk: str) -> Iterator[str]:
    """Yield a chunk and those before it, up to the first one or a gap."""
    seen = set()
    while chunk and chunk not in seen and mtime_ns_of(space.fd, chunk) is not None:
        yield chunk
        seen.add(chunk)
        chunk = read_node(space, chunk).before


class ChunkRows:
    """The content of some chunks: mostly those of one fan-out directory."""

    def __init__(self) -> None:
        self._found: list[tuple[bytes, bytes, int, int, bool, bool]] = []
        self.unsettled: list[str] = []

    def add(self, chunk: str, mtime_ns: int, node: ChunkNode) -> None:
        """Add a chunk, unless its name is not one of VUA's, or it has no files."""
        try:
            name, before = bytes.fromhex(chunk), bytes.fromhex(node.before)
        except ValueError:
            return
        if node.temporary or not node.files:
            self.unsettled.append(chunk)
        if not (node.temporary or node.files):
            return
        is_first = len(before) != len(name)
        if is_first:
            before = node.salt.ljust(len(name), b"\0")
        self._found.append((name, before, mtime_ns, node.nbytes, bool(node.pinned), is_first))

    def sorted(self) -> Rows:
        """Return the chunks in the order of their names."""
        return np.array(sorted(self._found), dtype=_ROW)


class Spread(Protocol):
    """Runs a piece of work for each fan-out directory of a namespace, in order."""

    def __call__(
        self, work: Callable[[str], R], space: Space, fans: list[str], /
    ) -> Iterable[R]: ...


def in_turn(
    work: Callable[[str], R],
    space: Space,  # noqa: ARG001
    fans: list[str],
) -> Iterable[R]:
    """Do the work here, one after the other."""
    return map(work, fans)


def read_prefix_tree(
    space: Space,
    show: Show = silent,
    spread: Spread = in_turn,
    known: PrefixTree | None = None,
) -> PrefixTree:
    """Read the order of chunks, some 40 us each. Other processes may write and delete meanwhile.

    Chunks with the same mtime as in ``known``, a tree read before, are not read again (a third of
    the time). So a pin that was set or lifted since goes unnoticed.
    """
    rows, unsettled = Spool(_ROW), []
    fans = fans_of(space)
    work = partial(_nodes_in, space) if known is None else partial(_news_in, space, known)
    for done, (some, unsure) in enumerate(spread(work, space, fans), 1):
        rows.append(some)
        unsettled += unsure
        show(space.name[:12], done, len(fans), amount=len(rows), unit="chunks")
    return PrefixTree(rows, unsettled)


def tree_of(chunks: Iterable[tuple[str, int, ChunkNode]], *, in_order: bool = False) -> PrefixTree:
    """Return the tree of chunks that are given with their mtimes.

    ``in_order``: by their names. Then few of them are in memory at a time.
    """
    rows, unsettled, rest = Spool(_ROW), list[str](), iter(chunks)
    while some := list(itertools.islice(rest, _AT_ONCE if in_order else None)):
        found = ChunkRows()
        for one in some:
            found.add(*one)
        rows.append(found.sorted())
        unsettled += found.unsettled
    return PrefixTree(rows, unsettled)


def _news_in(space: Space, known: PrefixTree, fan: str) -> tuple[Rows, list[str]]:
    return _nodes_in(space, fan, known.nodes(fan))


def _nodes_in(space: Space, fan: str, known: KnownNodes | None = None) -> tuple[Rows, list[str]]:
    found = ChunkRows()
    for chunk, mtime_ns in chunks_of(space, fan):
        if chunk[:2] != fan:
            continue  # no lookup looks for it there
        then_ns, node = (known or {}).get(chunk, (None, None))
        if node is None or then_ns != mtime_ns:
            node = read_node(space, chunk)
        found.add(chunk, mtime_ns, node)
    return found.sorted(), found.unsettled
