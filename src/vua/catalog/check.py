"""Checks files: whether each is what it says, and whether that fits its path; counts results."""

from __future__ import annotations

import itertools
import os
import random
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

from vua.catalog.contents import Item
from vua.errors import CorruptEntryError, VUAError
from vua.format.entry import ENCRYPTED, MAX_HEADER_NBYTES
from vua.format.layout import KVLayout, Shard
from vua.format.parse import (
    EntryInfo,
    codec_of,
    parse_entry,
)
from vua.io import posix
from vua.io.files import is_plain
from vua.native import Digest
from vua.security.keyring import KnownKeys
from vua.security.settings import Security
from vua.storage.base import Storage, entry_name
from vua.storage.description import Description
from vua.storage.local import version_of
from vua.store.entry_reader import check_parts
from vua.store.namespace import fits

NO_KEYS: Final = Security()
"""The settings without keys."""
OUTCOMES: Final = ("sound", "corrupt", "foreign", "error")
"""Outcomes that a report counts."""

Outcome = Literal["sound", "corrupt", "foreign", "error"]
"""As the store's counters. ``error``: unreadable."""

_BUFFER_NBYTES: Final = MAX_HEADER_NBYTES  # so that the first block holds any header


@dataclass(frozen=True, slots=True)
class ExpectedEntry:
    """What a file must be, by its path; a None is not checked."""

    namespace: str | None = None
    chunk: str | None = None
    shard: Shard | None = None
    layout: KVLayout | None = None
    """By ``namespace.json``."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of checking one file."""

    outcome: Outcome
    reasons: tuple[str, ...]
    """Why it is not sound, most important first."""
    nbytes: int
    """Size of the file."""
    info: EntryInfo | None = None
    """The file's header, if readable."""
    authentic: bool = False
    """Whether the seal proves that the key's owner wrote its bytes."""


class Checker:
    """Checks files one after the other with one buffer. Not thread-safe."""

    def __init__(self, keys: KnownKeys | None = None) -> None:
        self._keys = keys or KnownKeys(NO_KEYS)
        self._buffer = memoryview(bytearray(_BUFFER_NBYTES))

    def check(self, fd: int, expected: ExpectedEntry) -> Check:
        """Read all of the file ``fd``, from its start, and judge it."""
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return Check("error", ("not a regular file",), 0)
            first = self._first_block(fd)
            return self._check(status.st_size, first, self._read_on(fd), expected)
        except OSError as problem:
            return Check("error", (problem.strerror or str(problem),), 0)

    def check_bytes(self, data: memoryview, expected: ExpectedEntry) -> Check:
        """Judge ``data``, all of a file or object. Encrypted data stays encrypted."""
        first = data[:_BUFFER_NBYTES]
        return self._check(len(data), first, iter([data[_BUFFER_NBYTES:]]), expected)

    def _check(
        self, nbytes: int, first: memoryview, more: Iterator[memoryview], expected: ExpectedEntry
    ) -> Check:
        try:
            info = parse_entry(bytes(first))
        except CorruptEntryError as problem:
            return Check("corrupt", (str(problem),), nbytes)
        misplaced = tuple(_differences(info, expected))
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
        """Return the digests that check blocks' tags; None for plain files, or without the key."""
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


def _differences(info: EntryInfo, expected: ExpectedEntry) -> Iterator[str]:
    if expected.namespace not in (None, info.namespace):
        yield f"its header says namespace {info.namespace}, it lies in {expected.namespace}"
    if expected.chunk not in (None, info.prefix_hash):
        yield f"its header says chunk {info.prefix_hash}, it lies in {expected.chunk}"
    if expected.shard not in (None, info.shard):
        yield f"its header says shard {info.shard.name}, it is named {expected.shard.name}"
    if expected.layout not in (None, info.layout):
        yield f"its header says {info.layout}, namespace.json {expected.layout}"


def read_plain(fd: int, checker: Checker, expected: ExpectedEntry) -> tuple[Check, bytes | None]:
    """Check an open file, and return its version; None if no reader would accept it."""
    try:
        check = checker.check(fd, expected)
    except VUAError as problem:
        check = Check("error", (str(problem),), 0)
    status = posix.status_cached(fd)
    if is_plain(status, None):
        return check, version_of(status)
    if stat.S_ISREG(status.mode):
        links = "it has further names (hard links), so no reader takes it"
        outcome: Outcome = "foreign" if check.outcome == "sound" else check.outcome
        check = replace(check, outcome=outcome, reasons=(*check.reasons, links))
    return check, None


def sampled(fans: Sequence[str], share: float) -> list[str]:
    """Return that share of the fan-out directories, at least one; chunks are uniform over them."""
    count = min(len(fans), max(1, round(share * len(fans))))
    return sorted(random.sample(fans, count))


@dataclass(slots=True)
class Verification:
    """The result of `vua verify` for one namespace, or a part of it."""

    namespace: Description
    state: str
    """State of ``namespace.json``."""
    counts: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0
    sealed: Counter[str] = field(default_factory=Counter)
    """Files per sealing key's id, 16 hex digits."""
    authentic: Counter[str] = field(default_factory=Counter)
    """Sound files per key that was proved to have written them."""
    removed: int = 0
    """Damaged and foreign files that were quarantined or deleted."""
    problems: list[tuple[str, str, str]] = field(default_factory=list)
    """(path, outcome, reason) of unsound files."""
    layouts: dict[str, Counter[KVLayout]] = field(default_factory=dict)
    """Layouts in sound entries' headers, by group of layers."""
    plain: int = 0
    """Unsealed files, by their headers."""
    others: dict[str, list[Item]] = field(default_factory=dict)
    """Items that are not entries, by kind."""

    @property
    def damaged(self) -> bool:
        """Whether something unsound is still there."""
        return len(self.problems) > self.removed

    @property
    def stated(self) -> dict[str, KVLayout]:
        """The layout in most sound entries' headers, by group of layers."""
        return {group: some.most_common(1)[0][0] for group, some in self.layouts.items()}

    def add(self, path: str, check: Check) -> None:
        self.counts[check.outcome] += 1
        self.nbytes += check.nbytes
        if check.info is not None and not check.info.kind:
            self.plain += 1
        elif check.info is not None:
            self.sealed[check.info.seal_info.key_id] += 1
            if check.authentic and check.outcome == "sound":
                self.authentic[check.info.seal_info.key_id] += 1
        if check.outcome == "sound" and check.info is not None:
            group = check.info.layout.group
            self.layouts.setdefault(group, Counter())[check.info.layout] += 1
        if check.outcome != "sound":
            self.problems.append((path, check.outcome, "; ".join(check.reasons)))

    def add_other(self, item: Item) -> None:
        """Note an item that is not an entry."""
        self.others.setdefault(item.kind, []).append(item)

    def join(self, part: Verification) -> None:
        self.counts.update(part.counts)
        self.nbytes += part.nbytes
        self.removed += part.removed
        self.plain += part.plain
        self.sealed.update(part.sealed)
        self.authentic.update(part.authentic)
        self.problems += part.problems
        for group, some in part.layouts.items():
            self.layouts.setdefault(group, Counter()).update(some)
        for kind, found in part.others.items():
            self.others.setdefault(kind, []).extend(found)

    def wrong_description(self) -> str:
        """Return why ``namespace.json`` must be rewritten, by its entries' headers, or ""."""
        if self.state == "damaged":
            return "it does not describe this namespace"
        if self.state == "ok" and not fits(self.stated, self.namespace.layouts):
            headers = tuple(self.stated.values())
            return f"it says {self.namespace.layouts}, and entries' headers {headers}"
        return ""


Judge: TypeAlias = Callable[[Item], "tuple[Check | None, bytes | None, bool]"]
"""Returns an entry's check (None: it vanished), its version, and whether repair may remove it."""


def check_all(
    stated: Description, items: Sequence[Item], judge: Judge, storage: Storage, *, repair: bool,
    each: Callable[..., Iterable[tuple[Check | None, bool]]] = map,
) -> Verification:  # fmt: skip
    """Check some items of a namespace; ``repair`` removes unsound entries from the storage."""

    def work(item: Item) -> tuple[Check | None, bool]:
        if item.kind != "entry":
            return None, False
        check, version, removable = judge(item)
        unsound = check is not None and check.outcome != "sound"
        if not (repair and removable and unsound) or item.shard is None:
            return check, False
        return check, storage.delete(entry_name(item.chunk, item.shard), version)

    part = Verification(stated, "")
    for item, (check, removed) in zip(items, each(work, items), strict=True):
        if item.kind == "unreadable":
            part.add(item.path, Check("error", (item.problem,), 0))
        elif item.kind != "entry":
            part.add_other(item)
        elif check is not None:
            part.add(item.path, check)
            part.removed += removed
    return part
