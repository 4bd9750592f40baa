"""One file's bytes against what it says, and what it says against where it lies."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from vua.cli.keys import NO_KEYS
from vua.errors import CorruptEntryError
from vua.format.compressed import CODEC, PACKAGE, decompressed
from vua.format.header import ENCRYPTED, MAX_HEADER_NBYTES
from vua.format.layout import KVLayout, Shard
from vua.format.parse import (
    LATER_FORM,
    EntryInfo,
    LaterEntryError,
    codec_of,
    later_form,
    parse_entry,
)
from vua.native import Digest
from vua.security.keyring import KnownKeys
from vua.store.whole_entry import check_parts

__all__ = ["Check", "Checker", "Outcome", "Place"]

Outcome = Literal["sound", "corrupt", "foreign", "error", "later"]
"""The words of the store's own counters. ``error``: it could not be read; ``later``: of a later
version of VUA, which is left as it is."""

_BUFFER_NBYTES: Final = MAX_HEADER_NBYTES  # so that the first block holds any header


@dataclass(frozen=True, slots=True)
class Place:
    """Where a file lies: what it therefore has to be. None where that does not follow."""

    namespace: str | None = None
    chunk: str | None = None
    shard: Shard | None = None
    layout: KVLayout | None = None
    """What ``namespace.json`` says."""


@dataclass(frozen=True, slots=True)
class Check:
    """What was found out about one file."""

    outcome: Outcome
    reasons: tuple[str, ...]
    """Why it is not sound, most important first."""
    nbytes: int
    """Size of the file."""
    info: EntryInfo | None = None
    """What the file says about itself, where it says anything."""
    authentic: bool = False
    """Whether it was proved that somebody with the key wrote its bytes."""
    codec: str = ""
    """What it was compressed by, where it is."""


class Checker:
    """Checks files one after the other with one buffer. Not for several threads at once."""

    def __init__(self, keys: KnownKeys | None = None) -> None:
        """Prove of files that are sealed with one of ``keys`` who wrote them, too."""
        self._keys = keys or KnownKeys(NO_KEYS)
        self._buffer = memoryview(bytearray(_BUFFER_NBYTES))

    def check(self, fd: int, place: Place) -> Check:
        """Read all of the file ``fd``, from its start, and say whether it is what it has to be."""
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return Check("error", ("not a regular file",), 0)
            first = self._first_block(fd)
            return self._check(status.st_size, first, self._read_on(fd), place)
        except OSError as problem:
            return Check("error", (problem.strerror or str(problem),), 0)

    def check_bytes(self, data: memoryview, place: Place, *, compressed: bool = False) -> Check:
        """Say whether ``data``, all of a file or object, is what it has to be.

        What is encrypted stays so. ``compressed``: the object's name says that it is.
        """
        nbytes = len(data)
        if compressed and (unknown := later_form(bytes(data[:_BUFFER_NBYTES]))):
            return Check("later", (f"{unknown}; {LATER_FORM}",), nbytes)
        try:
            data = decompressed(data) if compressed else data
        except CorruptEntryError as problem:
            return Check("corrupt", (str(problem),), nbytes)
        except ImportError:
            return Check("error", (f"compressed, which needs the package {PACKAGE}",), nbytes)
        first = data[:_BUFFER_NBYTES]
        check = self._check(len(data), first, iter([data[_BUFFER_NBYTES:]]), place)
        return replace(check, nbytes=nbytes, codec=CODEC if compressed else "")

    def _check(
        self, nbytes: int, first: memoryview, more: Iterator[memoryview], place: Place
    ) -> Check:
        try:
            info = parse_entry(bytes(first))
        except LaterEntryError as problem:
            return Check("later", (str(problem),), nbytes)
        except CorruptEntryError as problem:
            return Check("corrupt", (str(problem),), nbytes)
        misplaced = tuple(_differences(info, place))
        try:
            info.check_length(nbytes)
            openings = self._openings(info, bytes(first[: info.header_nbytes]))
            payload = itertools.chain([first[info.header_nbytes :]], more)
            check_parts(info, payload, openings)
        except CorruptEntryError as problem:
            return Check("corrupt", (str(problem), *misplaced), nbytes, info)
        outcome: Outcome = "foreign" if misplaced else "sound"
        return Check(outcome, misplaced, nbytes, info, openings is not None)

    def _openings(self, info: EntryInfo, header: bytes) -> Iterator[Digest] | None:
        """What tells of each block if its tag is right; None: plain, or the key is not here."""
        if not info.kind:
            return None
        encrypt = info.kind == ENCRYPTED
        seal = self._keys.seal(info.namespace, info.seal_info.key_id, encrypt=encrypt)
        if seal is None:
            return None
        codec = codec_of(info)
        return seal.openings(codec, info.key, memoryview(header), range(codec.blocks))

    def _first_block(self, fd: int) -> memoryview:
        filled = 0
        while got := os.readv(fd, [self._buffer[filled:]]) if filled < len(self._buffer) else 0:
            filled += got
        return self._buffer[:filled]

    def _read_on(self, fd: int) -> Iterator[memoryview]:
        while got := os.readv(fd, [self._buffer]):
            yield self._buffer[:got]


def _differences(info: EntryInfo, place: Place) -> Iterator[str]:
    """What a file says that does not fit where it lies."""
    if place.namespace not in (None, info.namespace):
        yield f"its header says namespace {info.namespace}, it lies in {place.namespace}"
    if place.chunk not in (None, info.prefix_hash):
        yield f"its header says chunk {info.prefix_hash}, it lies in {place.chunk}"
    if place.shard not in (None, info.shard):
        yield f"its header says shard {info.shard.name}, it is named {place.shard.name}"
    if place.layout not in (None, info.layout):
        yield f"its header says {info.layout}, namespace.json {place.layout}"
