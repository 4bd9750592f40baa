"""Commands on a cache in a bucket that differ from those on a directory: du, gc, rm, adopt.

Every request is counted and said: a bucket's owner pays for them. What a bucket does by itself is
its lifecycle rule; see docs/object-stores.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Final

from vua.capacity.limits import Limits, nbytes_of
from vua.capacity.scan import Show
from vua.cli.owner import confirm
from vua.cli.text import DAMAGED, SHORT, SOUND, Write, plain, progress, size, table, when
from vua.cli.walk import Found, walk_bucket
from vua.errors import ConfigError, CorruptEntryError
from vua.format.entry import parse_entry
from vua.format.header import MAX_HEADER_NBYTES
from vua.storage.bucket import Bucket
from vua.storage.bucket_mark import bucket_descriptions, claim_bucket, is_marked_bucket
from vua.storage.bucket_path import BucketPath
from vua.storage.description import Description
from vua.storage.mark import MARK, mark_text
from vua.store.locate import locate

__all__ = ["adopt_bucket", "du_bucket", "gc_bucket", "rm_bucket"]

_HEADER_NBYTES: Final = 32 << 10
"""What is read of an object first to find its parent: most headers are shorter."""
_AT_ONCE: Final = 256


@dataclass(slots=True)
class _Chunk:
    """A chunk's objects."""

    namespace: Description
    name: str
    nbytes: int = 0
    written_s: float = 0.0
    """When the youngest was written, or renewed by a use."""
    paths: list[str] = field(default_factory=list)
    parent: str = ""
    needed_s: float = 0.0
    """The youngest of :attr:`written_s` of it and of all that follows it."""


def _open(url: str) -> BucketPath:
    place = locate(url, create=False)
    if not isinstance(place, BucketPath):
        msg = f"{url} is no bucket"
        raise ConfigError(msg)
    return place


def _chunks(namespace: Description, show: Show) -> dict[str, _Chunk]:
    """List a namespace's chunks. Raises StorageError."""
    found: dict[str, _Chunk] = {}
    for one in walk_bucket(namespace):
        if one.kind == "entry":
            _add(found, namespace, one)
            if len(found) % 1000 == 0:
                show(namespace.name[:SHORT], amount=len(found), unit="chunks")
    return found


def _add(found: dict[str, _Chunk], namespace: Description, one: Found) -> None:
    chunk = found.setdefault(one.chunk, _Chunk(namespace, one.chunk))
    chunk.nbytes += one.nbytes
    chunk.written_s = max(chunk.written_s, one.modified_s)
    chunk.paths.append(one.path)


def _requests(place: BucketPath) -> str:
    counts = place.bucket.counts
    kinds = [f"{counts[kind]} {kind}" for kind in _KINDS if counts[kind]]
    return f"requests: {', '.join(kinds) or 'none'}"


_KINDS: Final = ("list", "head", "get", "put", "copy", "delete")


# -- du -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Occupied:
    """What a namespace takes."""

    namespace: str
    chunks: int
    nbytes: int
    oldest_s: float | None
    newest_s: float | None

    def row(self) -> list[object]:
        times = (self.oldest_s, self.newest_s)
        shown = ("-" if at is None else when(at) for at in times)
        return [self.namespace[:SHORT], self.chunks, size(self.nbytes), *shown]


def _occupied(namespace: Description, show: Show) -> _Occupied:
    chunks = _chunks(namespace, show).values()
    times = [one.written_s for one in chunks]
    nbytes = sum(one.nbytes for one in chunks)
    ends = min(times, default=None), max(times, default=None)
    return _Occupied(namespace.name, len(chunks), nbytes, *ends)


def du_bucket(url: str, *, write: Write | None) -> int:
    """Show what a cache in a bucket occupies, by namespace, and what the look cost."""
    place = _open(url)
    with progress() as show:
        rows = [_occupied(namespace, show) for namespace in bucket_descriptions(place)]
    nbytes, chunks = sum(one.nbytes for one in rows), sum(one.chunks for one in rows)
    if write is not None:
        requests = {kind: place.bucket.counts[kind] for kind in _KINDS}
        whole = {"nbytes": nbytes, "chunks": chunks, "exact": True, "requests": requests}
        write({"directory": url, **whole, "namespaces": [asdict(one) for one in rows]})
        return SOUND
    if rows:
        head = ["namespace", " chunks", " size", "oldest", "newest"]
        table(head, [one.row() for one in rows])
    print(plain(f"{place}: {chunks} chunks, {size(nbytes)}; {_requests(place)}"))
    return SOUND


# -- gc -----------------------------------------------------------------------------------------


def gc_bucket(url: str, said: Limits, *, dry_run: bool, yes: bool, write: Write | None) -> int:
    """Bring a cache in a bucket within limits by listing it: what was not used for longest goes.

    A chunk stays for as long as one that follows it in some prompt.
    """
    place = _open(url)
    claim_bucket(place, tool=True)
    if said.min_free_bytes is not None or said.max_bytes_per_salt is not None:
        msg = "a bucket has no free space, and nobody counts salts there: give --max-bytes or --ttl"
        raise ConfigError(msg)
    with progress() as show:
        chunks = {
            (namespace.name, name): chunk
            for namespace in bucket_descriptions(place)
            for name, chunk in _chunks(namespace, show).items()
        }
        total = sum(one.nbytes for one in chunks.values())
        most = total if said.max_bytes is None else nbytes_of(said.max_bytes, 0)
        before_s = 0.0 if said.ttl_s is None else time.time() - said.ttl_s
        doomed: list[_Chunk] = []
        if total > most or any(one.written_s < before_s for one in chunks.values()):
            _find_needed(chunks, show)
            doomed = _doomed(chunks, total - most, before_s)
        nbytes = sum(one.nbytes for one in doomed)
        if doomed and not dry_run:
            confirm(f"Delete {len(doomed)} chunks, {size(nbytes)}, of {url}?", yes=yes)
            _delete(place, doomed)
    within = total - nbytes <= most
    if write is not None:
        deleted = {"chunks": len(doomed), "nbytes": nbytes}
        left = {"chunks": len(chunks) - len(doomed), "nbytes": total - nbytes}
        write({"directory": url, "dry_run": dry_run, "within": within, "deleted": deleted, **left})
    else:
        word = "would be deleted" if dry_run else "deleted"
        print(f"{len(doomed)} chunks, {size(nbytes)}, {word}; {_requests(place)}")
        print(plain(f"{place}: {len(chunks) - len(doomed)} chunks, {size(total - nbytes)} stay"))
    return SOUND if within else DAMAGED


def _find_needed(chunks: dict[tuple[str, str], _Chunk], show: Show) -> None:
    """Find out which chunk follows which, by a request for each header."""
    every = list(chunks.values())
    for first in range(0, len(every), _AT_ONCE):
        show("reading headers", first, len(every))
        Bucket.each(_find_parent, every[first : first + _AT_ONCE])
    for chunk in every:
        at, seen = chunk, set[str]()
        while at.needed_s < chunk.written_s and at.name not in seen:
            at.needed_s = chunk.written_s
            seen.add(at.name)
            at = chunks.get((at.namespace.name, at.parent), at)


def _find_parent(chunk: _Chunk) -> None:
    """Read what a chunk says of the one before it; nothing where it cannot be read."""
    place = chunk.namespace.path
    if not isinstance(place, BucketPath):
        return
    with suppress(OSError, CorruptEntryError):
        key = (place / chunk.paths[0]).key
        data = place.bucket.get(key, 0, _HEADER_NBYTES)[1]
        try:
            info = parse_entry(bytes(data))
        except CorruptEntryError:
            info = parse_entry(bytes(place.bucket.get(key, 0, MAX_HEADER_NBYTES)[1]))
        chunk.parent = info.parent or ""


def _doomed(chunks: dict[tuple[str, str], _Chunk], excess: int, before_s: float) -> list[_Chunk]:
    """Return what goes: what is older than ``before_s``, and more until ``excess`` bytes go."""
    order = sorted(chunks.values(), key=lambda one: (one.needed_s, -one.written_s))
    doomed, nbytes = [], 0
    for chunk in order:
        if chunk.needed_s >= before_s and nbytes >= excess:
            break
        doomed.append(chunk)
        nbytes += chunk.nbytes
    return doomed


def _delete(place: BucketPath, chunks: Sequence[_Chunk]) -> None:
    keys = [str(one.namespace.path / path)[len(place.bucket.url) + 1 :]
            for one in chunks for path in one.paths]  # fmt: skip
    place.bucket.delete(keys)


# -- rm, adopt ------------------------------------------------------------------------------------


def rm_bucket(
    url: str, names: Sequence[str], *, everything: bool, dry_run: bool, yes: bool,
    write: Write | None,
) -> int:  # fmt: skip
    """Delete namespaces, or chunks with all that follows them, from a bucket."""
    place = _open(url)
    claim_bucket(place, tool=True)
    if everything == bool(names):
        msg = "name what to remove, or say --all"
        raise ConfigError(msg)
    found = bucket_descriptions(place)
    picked: list[tuple[Description, list[str]]] = []
    chunks: list[_Chunk] = []
    with progress() as show:
        if everything:
            picked = [(one, []) for one in found]
        for name in names:
            spaces = [one for one in found if len(name) >= 6 and one.name.startswith(name)]
            if len(spaces) == 1:
                picked.append((spaces[0], []))
            else:
                chunks += _named(found, name, show)
        for namespace, keys in picked:
            if isinstance(namespace.path, BucketPath):
                keys += [one.key for one in place.bucket.walk(namespace.path.key)]
    objects = sum(len(keys) for _, keys in picked) + sum(len(one.paths) for one in chunks)
    if not dry_run:
        confirm(f"Delete {objects} objects of {url}?", yes=yes)
        _delete(place, chunks)
        for namespace, keys in picked:
            place.bucket.delete(
                sorted(keys, key=lambda key: key.count("/"))
            )  # namespace.json first
            del namespace
    if write is not None:
        write({"directory": url, "objects": objects, "dry_run": dry_run})
    else:
        print(plain(f"{place}: {objects} objects {'would be ' * dry_run}removed"))
    return SOUND


def _named(found: Sequence[Description], name: str, show: Show) -> list[_Chunk]:
    """Return the chunk whose name begins so, and all that follow it. Raises ConfigError."""
    for namespace in found:
        chunks = _chunks(namespace, show)
        hits = [one for one in chunks if len(name) >= 6 and one.startswith(name)]
        if len(hits) == 1:
            _find_needed({(namespace.name, one): chunk for one, chunk in chunks.items()}, show)
            gone, grown = {hits[0]}, True
            while grown:
                more = {one.name for one in chunks.values() if one.parent in gone} - gone
                gone, grown = gone | more, bool(more)
            return [chunks[one] for one in gone]
    msg = f"{name}: no one thing's name begins so; `vua ls --long` lists the names"
    raise ConfigError(msg)


def adopt_bucket(url: str) -> int:
    """Make a place with namespaces a cache whose objects VUA may delete."""
    place = _open(url)
    if not bucket_descriptions(place):
        msg = f"{place} holds no namespace of VUA"
        raise ConfigError(msg)
    if not is_marked_bucket(place):
        place.bucket.put((place / MARK).key, mark_text())
    print(plain(f"{place}: VUA may delete its own objects here"))
    return SOUND
