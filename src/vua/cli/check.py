"""One file's bytes against what it says, and what it says against where it lies."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import xxhash

from vua.cli.keys import NO_KEYS
from vua.errors import CorruptEntryError
from vua.format.entry import EntryInfo, codec_of, parse_entry
from vua.format.header import ENCRYPTED, MAX_HEADER_NBYTES
from vua.format.layout import KVLayout, Shard
from vua.format.plan import Digest
from vua.security.keyring import KnownKeys

__all__ = ["Check", "Checker", "Outcome", "Place"]

Outcome = Literal["sound", "corrupt", "foreign", "error"]
"""The words of the store's own counters. ``error``: it could not be read."""

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


class Checker:
    """Checks files one after the other with one buffer. Not for several threads at once."""

    def __init__(self, keys: KnownKeys | None = None) -> None:
        """Prove of files that are sealed with one of ``keys`` who wrote them, too."""
        self._keys = keys or KnownKeys(NO_KEYS)
        self._buffer = memoryview(bytearray(_BUFFER_NBYTES))

    def check(self, fd: int, place: Place) -> Check:
        """Read all of the file ``fd``, from its start, and say whether it is what it has to be."""
        try:
            return self._check(fd, place)
        except OSError as problem:
            return Check("error", (problem.strerror or str(problem),), 0)

    def _check(self, fd: int, place: Place) -> Check:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        first = self._first_block(fd)
        try:
            info = parse_entry(bytes(first))
        except CorruptEntryError as problem:
            return Check("corrupt", (str(problem),), status.st_size)
        misplaced = tuple(_differences(info, place))
        if status.st_size != info.file_nbytes:
            reason = f"{status.st_size} bytes long, expected {info.file_nbytes}"
            return Check("corrupt", (reason, *misplaced), status.st_size, info)
        try:
            openings = self._openings(info, bytes(first[: info.header_nbytes]))
        except CorruptEntryError as problem:
            return Check("corrupt", (str(problem), *misplaced), status.st_size, info)
        damage = self._damage(fd, first[info.header_nbytes :], info, openings)
        if damage:
            return Check("corrupt", (damage, *misplaced), status.st_size, info)
        outcome: Outcome = "foreign" if misplaced else "sound"
        return Check(outcome, misplaced, status.st_size, info, openings is not None)

    def _openings(self, info: EntryInfo, header: bytes) -> Iterator[Digest] | None:
        """What tells of each unit whether its tag is right; None: plain, or the key is not here."""
        if not info.kind:
            return None
        encrypt = info.kind == ENCRYPTED
        seal = self._keys.seal(info.namespace, info.mark.key_id, encrypt=encrypt)
        if seal is None:
            return None
        codec = codec_of(info)
        return seal.openings(codec, info.key, memoryview(header), range(codec.units))

    def _first_block(self, fd: int) -> memoryview:
        filled = 0
        while got := os.readv(fd, [self._buffer[filled:]]) if filled < len(self._buffer) else 0:
            filled += got
        return self._buffer[:filled]

    def _damage(
        self, fd: int, rest: memoryview, info: EntryInfo, openings: Iterator[Digest] | None
    ) -> str:
        codec = codec_of(info)
        found = list(self._sums(fd, rest, codec.unit_nbytes(), openings))
        if len(found) < codec.units:
            return "it became shorter while it was read"
        expected = info.checksums.tolist()
        bad = [unit for unit in range(codec.units) if found[unit][0] != expected[unit]]
        if bad:
            return f"{len(bad)} of {codec.units} checksums do not match, {_first(info, bad)}"
        bad = [unit for unit in range(codec.units) if not found[unit][1]]
        if bad:
            return (
                f"{len(bad)} of {codec.units} tags do not match, {_first(info, bad)}: written "
                f"by somebody without the key {info.mark.key_id}, or changed since"
            )
        return ""

    def _sums(
        self,
        fd: int,
        block: memoryview,
        sizes: Sequence[int],
        openings: Iterator[Digest] | None,
    ) -> Iterator[tuple[int, int]]:
        """The checksum of each unit, and 0 where its tag is wrong.

        Fewer where the file ends early. ``block`` is read already. What is encrypted is decrypted
        in the buffer, which the next read overwrites.
        """
        for size in sizes:
            opening = None if openings is None else next(openings)
            digest, left = xxhash.xxh3_64(), size
            while left:
                if not block:
                    block = self._buffer[: os.readv(fd, [self._buffer])]
                    if not block:
                        return
                digest.update(block[:left])
                if opening is not None:
                    opening.update(block[:left])
                left, block = left - len(block[:left]), block[left:]
            yield digest.intdigest(), 1 if opening is None else opening.intdigest()


def _first(info: EntryInfo, bad: Sequence[int]) -> str:
    return f"the first is that of {_unit_name(info, bad[0])}"


def _unit_name(info: EntryInfo, unit: int) -> str:
    """Which part of the model's KV cache a checksum stands for."""
    shard, step = info.shard, info.layout.unit_layers
    row, column = divmod(unit, shard.units(info.layout))
    array, head = divmod(row, shard.heads)
    layer = shard.layer_start + column * step
    stop = min(layer + step, shard.layer_stop)
    return f"{'KV'[array]}, head {shard.head_start + head}, layers {layer}-{stop}"


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
