"""The chunks of a cache in a bucket, as commands see them: listed, and who follows whom.

A listing names 1,000 objects per request. Which chunk follows which costs a request for a header
per chunk, but where an ``after-`` mark says it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from vua.capacity.scan import AFTER, Show
from vua.cli.names import only, wanted_name
from vua.cli.text import SHORT, plain
from vua.cli.walk import Found, walk_bucket
from vua.errors import ConfigError, CorruptEntryError
from vua.format.compressed import Compressed
from vua.format.header import MAX_HEADER_NBYTES
from vua.format.parse import EntryInfo, parse_entry
from vua.storage.bucket import Bucket
from vua.storage.bucket_cost import KINDS, cost_dollars
from vua.storage.bucket_mark import bucket_contents
from vua.storage.bucket_path import BucketPath
from vua.storage.description import DESCRIPTION, Description
from vua.storage.names import COMPRESSED_SUFFIX, is_compressed, is_renewing
from vua.store.opening import locate

__all__ = [
    "BucketChunk",
    "BucketSpace",
    "cost",
    "find_key_ids",
    "header",
    "listed",
    "listed_spaces",
    "opened_bucket",
    "print_strays",
    "resolve",
]

_HEADER_NBYTES: Final = 32 << 10
"""What is read of an object first to find its parent: most headers are shorter."""
_AT_ONCE: Final = 256
_LEFTOVER_S: Final = 3600.0
_MARK: Final = re.compile(r"[0-9a-f]{2}/([0-9a-f]{64})/(after|pin)-([0-9a-f]{64})")
_OURS: Final = b'{\n "format": "vua.'
"""How a description begins."""


@dataclass(slots=True)
class BucketChunk:
    """A chunk's objects."""

    place: BucketPath
    """Of its namespace."""
    name: str
    nbytes: int = 0
    written_s: float = 0.0
    """When the youngest was written, or renewed by a use."""
    paths: list[str] = field(default_factory=list)
    """Its entries, relative to the namespace."""
    marks: list[str] = field(default_factory=list)
    """Empty objects beside them, likewise."""
    pins: list[str] = field(default_factory=list)
    """The chunks whose pins hold this one."""
    before: str | None = None
    """The chunk before it, empty for a first one or where that cannot be read; None: not asked."""
    key_ids: set[str] = field(default_factory=set)
    """The keys that seal its entries, "" for one that is not sealed or cannot be read."""
    needed_s: float = 0.0
    """The youngest of :attr:`written_s` of it and of all that follows it."""

    def mark(self, path: str, kind: str, other: str) -> None:
        """Note a mark: ``after`` or ``pin``, and the chunk that it names."""
        self.marks.append(path)
        if f"{kind}-" == AFTER:
            self.before = other
        else:
            self.pins.append(other)

    @property
    def keys(self) -> list[str]:
        """The keys of all its objects, the entries first."""
        return [(self.place / path).key for path in (*self.paths, *self.marks)]


class BucketSpace:
    """A namespace in a bucket, listed."""

    def __init__(self, description: Description, place: BucketPath, show: Show) -> None:
        """List what is there. Raises StorageError."""
        self.description, self.place = description, place
        self.name = description.name
        self.chunks: dict[str, BucketChunk] = {}
        """By name: all that have an entry."""
        self.leftovers: list[str] = []
        """Paths of what somebody who was renewing objects left behind when he was killed, by their
        names and times; see :meth:`of_ours`."""
        self.beside: list[str] = []
        """Paths of what else is of VUA, by their names: marks, times to live, what was copied."""
        self.strays: list[str] = []
        """Paths of what is not."""
        marked: dict[str, BucketChunk] = {}
        for number, one in enumerate(walk_bucket(description)):
            if one.kind == "entry":
                self._add(one)
            elif one.kind == "stray":
                self.strays.append(one.path)
            elif match := _MARK.fullmatch(one.path):
                chunk = marked.setdefault(match[1], BucketChunk(place, match[1]))
                chunk.mark(one.path, match[2], match[3])
            else:
                self._note(one)
            if number % 1000 == 0:
                show(self.name[:SHORT], amount=len(self.chunks), unit="chunks")
        for name, beside in marked.items():
            if chunk_here := self.chunks.get(name):
                chunk_here.marks, chunk_here.pins = beside.marks, beside.pins
                chunk_here.before = beside.before
            else:
                self.beside += beside.marks

    def _note(self, one: Found) -> None:
        """Note what is of VUA and neither a chunk's entry nor its mark."""
        self.beside.append(one.path)
        if one.kind == "temporary" and one.modified_s < time.time() - _LEFTOVER_S:
            self.leftovers.append(one.path)

    @property
    def is_ours(self) -> bool:
        """Whether it is a namespace of VUA: it says so, or chunks are in it, as in a directory."""
        said = self.description
        return said.identity is not None or bool(said.later) or bool(self.chunks)

    def of_ours(self, paths: Sequence[str]) -> list[str]:
        """Return the keys of those of these paths that are of VUA, also by what is in them."""
        keys = [(self.place / path).key for path in paths]
        return [
            key
            for path, key in zip(paths, keys, strict=True)
            if not is_renewing(path) or _holds_entry(self.place.bucket, key)
        ]

    def every_key(self) -> list[str]:
        """Return the keys of all that is of VUA, the description last.

        That stays with what is not of VUA, as in a directory.
        """
        beside = self.of_ours(self.beside)
        keys = [key for one in self.chunks.values() for key in one.keys] + beside
        if not self.strays and len(beside) == len(self.beside):
            keys += self._description()
        return keys

    def _description(self) -> list[str]:
        key = (self.place / DESCRIPTION).key
        if self.description.identity is not None:
            return [key]
        with suppress(OSError):  # a damaged one of VUA begins as a sound one
            if bytes(self.place.bucket.get(key, 0, len(_OURS))[1]) == _OURS:
                return [key]
        return []

    def _add(self, one: Found) -> None:
        chunk = self.chunks.setdefault(one.chunk, BucketChunk(self.place, one.chunk))
        chunk.nbytes += one.nbytes
        chunk.written_s = max(chunk.written_s, one.modified_s)
        chunk.paths.append(one.path)

    def find_befores(self, show: Show) -> None:
        """Find out which chunk follows which, some headers at a time."""
        every = [one for one in self.chunks.values() if one.before is None]
        for first in range(0, len(every), _AT_ONCE):
            show(f"{self.name[:SHORT]}: reading headers", first, len(every))
            Bucket.each(_find_before, every[first : first + _AT_ONCE])
        for chunk in self.chunks.values():
            chunk.needed_s = max(chunk.needed_s, chunk.written_s)
            for one in self.ancestors(chunk.name):
                at = self.chunks[one]
                if one != chunk.name and at.needed_s >= chunk.written_s:
                    break
                at.needed_s = max(at.needed_s, chunk.written_s)

    def ancestors(self, chunk: str) -> Iterator[str]:
        """Yield a chunk and what comes before it, up to the first one or a gap."""
        seen: set[str] = set()
        while chunk in self.chunks and chunk not in seen:
            yield chunk
            seen.add(chunk)
            one = self.chunks[chunk]
            if one.before is None:
                _find_before(one)
            chunk = one.before or ""

    def descendants(self, chunk: str, show: Show) -> list[str]:
        """Return a chunk and all that follow it, parents before children."""
        return self._following([chunk], show)

    def in_order(self, show: Show) -> list[str]:
        """Return all chunks that have their whole prefix, parents before children."""
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


def _find_before(chunk: BucketChunk) -> None:
    """Read what a chunk says of the one before it; nothing where it cannot be read."""
    info = header(chunk, chunk.paths[0])
    chunk.before = (info.parent or "") if info is not None and info.start else ""


def header(chunk: BucketChunk, path: str) -> EntryInfo | None:
    """Return what an entry's header says; None where it cannot be read or is not sound."""
    key, bucket = (chunk.place / path).key, chunk.place.bucket
    with suppress(OSError, CorruptEntryError):
        data = bucket.get(key, 0, _HEADER_NBYTES)[1]
        try:
            return _parsed(path, data)
        except CorruptEntryError:
            return _parsed(path, bucket.get(key, 0, 2 * MAX_HEADER_NBYTES)[1])
    return None


def _holds_entry(bucket: Bucket, key: str) -> bool:
    """Whether an object holds an entry, of either form, whatever it is called."""
    with suppress(OSError):
        data = bucket.get(key, 0, _HEADER_NBYTES)[1]
        for name in ("", COMPRESSED_SUFFIX):
            with suppress(CorruptEntryError):
                _parsed(name, data)
                return True
    return False


def _parsed(path: str, data: memoryview) -> EntryInfo:
    """Read the header of an object of either form. Raises CorruptEntryError."""
    return parse_entry(Compressed.parse(data).header if is_compressed(path) else bytes(data))


def find_key_ids(chunks: Sequence[BucketChunk], show: Show) -> None:
    """Find out which keys seal each chunk, by a request for each entry."""
    for first in range(0, len(chunks), _AT_ONCE):
        show("reading headers", first, len(chunks))
        Bucket.each(_find_key_ids, chunks[first : first + _AT_ONCE])


def _find_key_ids(chunk: BucketChunk) -> None:
    infos = [header(chunk, path) for path in chunk.paths]
    chunk.key_ids = {one.seal_info.key_id if one is not None and one.kind else "" for one in infos}


def opened_bucket(url: str) -> BucketPath:
    """Return a place that is asked whether it is there. Raises ConfigError, StorageError."""
    place = locate(url, create=False)
    if not isinstance(place, BucketPath):
        msg = f"{url} is no bucket"
        raise ConfigError(msg)
    return place


def listed_spaces(place: BucketPath, show: Show) -> list[BucketSpace]:
    """List all namespaces of a cache. Raises StorageError."""
    return listed(place, show)[0]


def listed(place: BucketPath, show: Show) -> tuple[list[BucketSpace], list[str]]:
    """List all namespaces of a cache, and name what is not of VUA: objects, and folders beside.

    Raises StorageError.
    """
    found, strays = bucket_contents(place)
    spaces = [BucketSpace(one, place / one.name, show) for one in found]
    strays += [space.name for space in spaces if not space.is_ours]
    ours = [space for space in spaces if space.is_ours]
    strays += [f"{space.name}/{path}" for space in ours for path in space.strays]
    return ours, strays


def print_strays(strays: Sequence[str]) -> None:
    """Print how many things in a place are not of VUA, and the first of them."""
    if strays:
        some = ", ".join(plain(repr(name)[1:-1])[:60] for name in strays[:3])
        more = ", ..." if len(strays) > 3 else ""
        print(f"{len(strays)} objects or folders are not of VUA and stay: {some}{more}")


def resolve(found: Sequence[BucketSpace], text: str) -> tuple[BucketSpace, str]:
    """Find the one namespace (with "") or chunk whose name begins so. Raises ConfigError."""
    wanted_name(text)
    hits = {(space.name, ""): (space, "") for space in found if space.name.startswith(text)}
    for space in found:
        names = sorted(name for name in space.chunks if name.startswith(text))
        hits.update({(space.name, name): (space, name) for name in names})
    return only(hits, text)


def cost(counts: Mapping[str, int]) -> str:
    """Return in a few words how many requests were sent, and what they cost."""
    kinds = [f"{counts[kind]} {kind}" for kind in KINDS if counts[kind]]
    return (
        f"requests: {', '.join(kinds) or 'none'} (${cost_dollars(counts):.6f} at S3's list price)"
    )
