"""The order of stored chunks, read from their headers: for tools and for the full pass.

A header names the preceding chunk (`parent`), and where extras hide that, a file ``after-<name>``
beside it does. This gives orphans (chunks that no lookup can reach any more), pins of whole
prefixes, and each chunk's salt. It reads one header per chunk, so serving processes never do it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeAlias, TypeVar

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
from vua.format.entry import FORMAT, SEALED, SEALED_V1
from vua.io.posix import close_quietly
from vua.storage.local import SUFFIX, TEMPORARY, chunk_path
from vua.storage.names import AFTER, PIN

__all__ = [
    "ChunkNode",
    "ChunkNodes",
    "PrefixTree",
    "Spread",
    "ancestors",
    "in_turn",
    "read_node",
    "read_prefix_tree",
]

R = TypeVar("R")

_HEADER_NBYTES: Final = 1024
"""Enough of a header to hold the parent's hash."""
_FORMATS: Final = tuple(f'"format":"{one}"'.encode() for one in (FORMAT, SEALED, SEALED_V1))
_PARENT: Final = b'","parent":"'
_TOKENS: Final = b'","tokens":"'


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


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The order of a namespace's chunks. Arrays over its chunks, unordered."""

    names: npt.NDArray[np.void]
    """Prefix hashes, 32 bytes each."""
    mtimes_ns: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    pinned: npt.NDArray[np.bool_]
    parent: npt.NDArray[np.int64]
    """Index of the preceding chunk; of a first chunk its own, of an orphan len(names)."""
    salts: dict[int, bytes]
    """Of first chunks that have extras: the digest of these."""
    unsettled: list[str]
    """Chunks without a file, or with temporary ones."""

    @property
    def first(self) -> npt.NDArray[np.int64]:
        """Index of each chunk's first ancestor; len(names) if the chain is broken.

        A circular chain is broken, too: only foreign files cause that.
        """
        above = np.append(self.parent, len(self.names))
        known = above.copy()
        for _ in range(len(above).bit_length()):  # each time twice as far
            above = above[above]
        ends = known[above] == above
        return np.where(ends, above, len(self.names))[:-1]

    def descendants(self, chunk: str) -> list[str]:
        """Return a chunk and all that follow it, parents before children; [] if it is missing."""
        children = self._children()
        start = np.flatnonzero(self.names == np.frombuffer(bytes.fromhex(chunk), "V32"))
        found = start.tolist()
        for index in found:  # grows meanwhile, but ends even if the chain is a circle
            found += children.pop(index, [])
        return [self.name(index) for index in dict.fromkeys(found)]

    def in_order(self) -> list[str]:
        """Return all chunks whose whole prefix is stored, parents before children."""
        children = self._children()
        found = np.flatnonzero(self.parent == np.arange(len(self.names))).tolist()
        for index in found:  # grows meanwhile
            found += children.get(index, [])
        return [self.name(index) for index in found]

    def _children(self) -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for index, before in enumerate(self.parent.tolist()):
            if before != index:
                children.setdefault(before, []).append(index)
        return children

    def places(self, names: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
        """Return the index of each of ``names``; len(self.names) where it is not in the tree."""
        return _indices(self.names, names)

    def nodes(self, fan: str) -> KnownNodes:
        """Return what is known of the chunks in one fan-out directory."""
        first = self.names.view(np.uint8).reshape(-1, 32)[:, 0]  # in order: read one by one
        start, stop = np.searchsorted(first, [int(fan, 16), int(fan, 16) + 1]).tolist()
        whole = self.parent[start:stop] < len(self.names)
        known: KnownNodes = {}
        for index in (start + np.flatnonzero(whole)).tolist():
            above = int(self.parent[index])
            before = "" if above == index else self.name(above)
            salt, nbytes = self.salts.get(index, b""), int(self.nbytes[index])
            pins = ("",) if self.pinned[index] else ()
            node = ChunkNode(before, salt, nbytes, 1, temporary=False, pinned=pins)
            known[self.name(index)] = int(self.mtimes_ns[index]), node
        for name in self.unsettled:
            known.pop(name, None)
        return known

    def name(self, index: int) -> str:
        return bytes(self.names[index]).hex()


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
        if not any(one in head for one in _FORMATS):
            return None  # a later version's
        parent = head.split(_PARENT, 1)[1][:64].decode()
        start = int(head.split(_TOKENS, 1)[1][:10])
        digest = b"" if parent.startswith("-") else bytes.fromhex(parent)
    except (OSError, ValueError, IndexError):
        return None
    return (digest.hex(), b"") if start else ("", digest)


def ancestors(space: Space, chunk: str) -> Iterator[str]:
    """Yield a chunk and those before it, up to the first one or a gap."""
    seen = set()
    while chunk and chunk not in seen and mtime_ns_of(space.fd, chunk) is not None:
        yield chunk
        seen.add(chunk)
        chunk = read_node(space, chunk).before


class ChunkNodes(NamedTuple):
    """The content of some chunks as columns: mostly those of one fan-out directory."""

    names: list[bytes]
    befores: list[bytes]
    mtimes_ns: list[int]
    nbytes: list[int]
    pinned: list[bool]
    salts: dict[int, bytes]
    unsettled: list[str]

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
        if node.salt:
            self.salts[len(self.names)] = node.salt
        self.names.append(name)
        self.mtimes_ns.append(mtime_ns)
        self.nbytes.append(node.nbytes)
        self.pinned.append(bool(node.pinned))
        self.befores.append(before if len(before) == len(name) else name)

    def tree(self) -> PrefixTree:
        names = _digests(self.names)
        return PrefixTree(
            names,
            np.array(self.mtimes_ns, dtype=np.int64),
            np.array(self.nbytes, dtype=np.int64),
            np.array(self.pinned, dtype=np.bool_),
            _indices(names, _digests(self.befores)),
            self.salts,
            self.unsettled,
        )


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
    whole = ChunkNodes([], [], [], [], [], {}, [])
    fans = fans_of(space)
    work = partial(_nodes_in, space) if known is None else partial(_news_in, space, known)
    for done, nodes in enumerate(spread(work, space, fans), 1):
        whole.salts.update({len(whole.names) + at: salt for at, salt in nodes.salts.items()})
        for mine, found in zip(whole, nodes, strict=True):
            if isinstance(mine, list) and isinstance(found, list):
                mine.extend(found)
        show(space.name[:12], done, len(fans), amount=len(whole.names), unit="chunks")
    return whole.tree()


def _news_in(space: Space, known: PrefixTree, fan: str) -> ChunkNodes:
    return _nodes_in(space, fan, known.nodes(fan))


def _nodes_in(space: Space, fan: str, known: KnownNodes | None = None) -> ChunkNodes:
    found = ChunkNodes([], [], [], [], [], {}, [])
    for chunk, mtime_ns in chunks_of(space, fan):
        then_ns, node = (known or {}).get(chunk, (None, None))
        if node is None or then_ns != mtime_ns:
            node = read_node(space, chunk)
        found.add(chunk, mtime_ns, node)
    return found


def _digests(values: list[bytes]) -> npt.NDArray[np.void]:
    return np.frombuffer(b"".join(values), dtype="V32")


def _indices(names: npt.NDArray[np.void], wanted: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """Where each wanted digest stands in ``names``; len(names) where it does not."""
    both = np.concatenate([names, wanted]).view(">u8").reshape(-1, 4)
    _, number = np.unique(both, axis=0, return_inverse=True)
    number = number.reshape(-1)
    place = np.full(len(both) + 1, len(names), dtype=np.int64)
    place[number[: len(names)]] = np.arange(len(names))
    return place[number[len(names) :]]
