"""Which chunk precedes which in a bucket, told for a thousand chunks by one object.

A listing does not tell it, and a header costs a request for each chunk. So a process that stores
writes what it knows into objects of the namespace, ``parents/<16 hex digits>``: 16 bytes that name
the form, for each chunk its prefix hash and that of the chunk before (zeros for a first chunk, 32
bytes each), and the xxh3-64 of all that. `vua gc` adds what it had to read from headers, and puts
small objects together. Tools take nothing from them but an order: what they do not tell is read
from headers.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

import xxhash

from vua.errors import CorruptEntryError
from vua.format.layout import Shard
from vua.format.parse import parent_in
from vua.storage.location import BucketPath
from vua.storage.names import PARENTS

__all__ = ["FULL", "ParentNotes", "parents_in", "write_parents"]

FULL: Final = 1 << 20
"""Most chunks per object: 64 MiB."""
_MAGIC: Final = b"vua.parents.v1\n\0"
_DIGEST: Final = 32
_CHECK: Final = 8
_FIRST: Final = bytes(_DIGEST)
_AT_ONCE: Final = 1 << 10
_LEAST: Final = 16
"""Fewer chunks are not worth an object: a PUT costs as much as the GETs of 13 headers."""
_WAIT_S: Final = 60.0


def parents_in(data: bytes | memoryview) -> Iterator[tuple[str, str]]:
    """Yield each chunk and the one before it ("" for a first chunk). Raises CorruptEntryError."""
    view = memoryview(data)
    rows, check = view[len(_MAGIC) : -_CHECK], bytes(view[-_CHECK:])
    whole = len(view) >= len(_MAGIC) + _CHECK and len(rows) % (2 * _DIGEST) == 0
    known = bytes(view[: len(_MAGIC)]) == _MAGIC
    if not (whole and known and xxhash.xxh3_64_digest(view[:-_CHECK]) == check):
        raise CorruptEntryError("an object of parents is damaged; `vua gc` reads headers instead")
    for start in range(0, len(rows), 2 * _DIGEST):
        name, before = rows[start : start + _DIGEST], rows[start + _DIGEST : start + 2 * _DIGEST]
        yield bytes(name).hex(), "" if bytes(before) == _FIRST else bytes(before).hex()


def write_parents(place: BucketPath, parents: Iterable[tuple[str, str]]) -> None:
    """Write an object of up to `FULL` chunks, each with the one before it. Raises StorageError."""
    data = bytearray(_MAGIC)
    for name, before in parents:
        data += bytes.fromhex(name) + (bytes.fromhex(before) or _FIRST)
    data += xxhash.xxh3_64_digest(data)
    place.bucket.put((place / PARENTS / secrets.token_hex(8)).key, bytes(data))


class ParentNotes:
    """What this process knows of a namespace's chunks, and has not written yet. Thread-safe."""

    def __init__(self, place: BucketPath, clock: Callable[[], float] = time.monotonic) -> None:
        """Note nothing yet; ``clock`` gives seconds."""
        self._place, self._clock = place, clock
        self._lock = threading.Lock()
        self._known: list[tuple[str, str]] = []
        self._since_s = 0.0

    def note(self, entry: str, data: bytes | memoryview) -> None:
        """Note an entry that was stored, given its first bytes; raises nothing."""
        chunk, _, name = entry.partition("/")
        shard, found = Shard.parse(name), parent_in(bytes(data))
        if found is None or shard is None or shard.layer_start or shard.head_start:
            return
        with self._lock:
            if not self._known:
                self._since_s = self._clock()
            self._known.append((chunk, found[0]))

    def write(self, *, ends: bool = False) -> None:
        """Write what is known, if that is much, or old, or the process ``ends``; raises nothing."""
        with self._lock:
            old = ends or self._clock() - self._since_s >= _WAIT_S
            if len(self._known) < (_LEAST if old else _AT_ONCE):
                return
            known, self._known = self._known, []
        for some in _parts(known):
            with suppress(OSError):  # then `vua gc` reads headers
                write_parents(self._place, some)


def _parts(known: Sequence[tuple[str, str]]) -> Iterator[Sequence[tuple[str, str]]]:
    for start in range(0, len(known), FULL):
        yield known[start : start + FULL]
