"""What engines of one setup know of writers on this host: a restart compares none again.

A note is an empty file in the user's own cache, ``~/.cache/vua/proved`` for writers whose chunks of
a kind equalled an engine's own, ``~/.cache/vua/aside`` for those whose chunks differed, named by a
digest of the namespace, the engine's setup, the kind and the writer. An engine that stores notes
itself: after a restart it is another writer, of the same setup.

Also how many of the chunks compared at random were wrong, and the resulting bound for all loaded
ones. Each comparison is one byte, appended to a file per namespace in ``~/.cache/vua/compared``:
engines of several processes count together, and `vua doctor` reads it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from vua.connector.log import logger
from vua.io.files import atomic_write, make_file, make_folders, user_cache
from vua.io.pool import Pool

log = logger("scheduler")

NOTES: Final = Pool[None](1, "vua-notes")
"""Writes to the user's cache, which may be on a storage that hangs: an engine's own thread does not
wait for it."""
_KEPT_S: Final = 90 * 86400.0
"""Notes unused for so long are deleted."""
_MOST: Final = 1 << 14
"""Notes of one sort that are kept; the oldest ones beyond that are deleted."""
_MOST_KNOWN: Final = 1 << 13
"""Answers that are kept in memory, of each of two questions."""
_TIDIED_EVERY: Final = 256
"""A process cleans up at its first note and after every so many."""


Kind = tuple[str, ...]
"""Proved separately: the adapter's path or "", then the inputs besides text."""


def kind_of(request: Any, tokens: int) -> Kind:
    """Return the kind of the first ``tokens`` tokens of a request."""
    adapter = request.lora_request
    beside = {each.modality for each in request.mm_features if each.mm_position.offset < tokens}
    return (str(adapter.lora_path) if adapter is not None else "", *sorted(beside))


def written() -> None:
    """Return when everything queued for the user's cache is written."""
    with suppress(RuntimeError):  # the process ends
        NOTES.submit(lambda _: None).wait()


def files_below(root: Path) -> Iterator[list[object]]:
    """Yield for each file below a directory its name and what changes when it is replaced."""
    for folder, folders, names in os.walk(root, followlinks=False):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            if name.startswith(".vua-"):
                continue
            with suppress(OSError):
                status = path.stat()
                times = [status.st_mtime_ns, status.st_ctime_ns]
                yield [str(path.relative_to(root)), status.st_size, status.st_ino, *times]


def name_of(namespace: Path, parts: object) -> str | None:
    """Return a digest of a namespace's directory and of ``parts``; None if there is none."""
    try:
        status = (namespace / "namespace.json").stat()
    except OSError:
        return None
    there = [str(namespace.absolute()), status.st_dev, status.st_ino, status.st_mtime_ns]
    return hashlib.sha256(json.dumps([*there, parts]).encode()).hexdigest()


def trusted(path: Path) -> bool:
    """Whether a note exists that only this user can have written."""
    try:
        for part in (path, path.parent):
            status = part.stat(follow_symlinks=False)
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return False
    except OSError:
        return False
    return True


class ProvedWriters:
    """What engines of one setup know of writers in one namespace. Never raises for the file system.

    A writer is the 48 bytes of its name, a kind what :func:`kind_of` returns. Files are read by
    :meth:`learn` and written by a thread; the rest is in memory. Thread-safe.
    """

    def __init__(self, namespace: Path | None, setup: str) -> None:
        """Remember for engines of ``setup`` what concerns a namespace's directory.

        Nothing is remembered for an empty ``setup``, or without a directory (None).
        """
        self._namespace, self._setup = namespace, setup
        self._proved: dict[tuple[Kind, bytes], bool] = {}
        self._put_aside: dict[bytes, bool] = {}
        self._proofs: dict[tuple[Kind, bytes], Path | None] = {}
        """Paths of proofs, which depend on the adapters' files at the lookup."""
        self._added = 0

    def learn(self, kind: Kind, writers: Iterable[bytes]) -> None:
        """Read what is known of writers, and of their chunks of a kind. Touches the file system."""
        for writer in writers:
            if self._put_aside.get(writer) is None:
                self._keep(self._put_aside, writer, self._holds(self._aside(writer)))
            if self._proved.get((kind, writer)) is None:
                proof = self._proof(kind, writer)
                self._keep(self._proofs, (kind, writer), proof)
                self._keep(self._proved, (kind, writer), self._holds(proof))

    def holds(self, kind: Kind, writer: bytes) -> bool:
        """Whether a writer's chunks of a kind were proved before, as far as was read."""
        return self._proved.get((kind, writer), False)

    def add(self, kind: Kind, writer: bytes) -> None:
        """Remember that a writer's chunks of a kind are proved."""
        self._keep(self._proved, (kind, writer), there=True)
        if (kind, writer) in self._proofs:
            proof = self._proofs[kind, writer]
            self._write(lambda: proof)
        else:
            self._write(lambda: self._proof(kind, writer))

    def is_aside(self, writer: bytes) -> bool:
        """Whether a writer's chunks differed before, as far as was read."""
        return self._put_aside.get(writer, False)

    def put_aside(self, writer: bytes) -> None:
        """Remember that a writer's chunks differ."""
        self._keep(self._put_aside, writer, there=True)
        self._write(lambda: self._aside(writer))

    @staticmethod
    def _keep(known: dict[Any, Any], what: object, there: object) -> None:
        if len(known) >= _MOST_KNOWN:
            with suppress(StopIteration, KeyError, RuntimeError):  # another thread was faster
                del known[next(iter(known))]
        known[what] = there

    def _holds(self, path: Path | None) -> bool:
        if path is None or not trusted(path):
            return False
        try:
            os.utime(path)
        except OSError:
            return False
        return True

    def _write(self, where: Callable[[], Path | None]) -> None:
        with suppress(RuntimeError):  # the process ends, or has no thread
            NOTES.submit(lambda _: self._add(where()))

    def _add(self, path: Path | None) -> None:
        try:
            if path is not None:
                make_folders(path.parent)
                os.close(make_file(path))
                os.utime(path)
                if self._added % _TIDIED_EVERY == 0:
                    _forget_old(path.parent)
                self._added += 1
        except OSError as problem:
            log.debug("not remembered: %s", problem)

    def _proof(self, kind: Kind, writer: bytes) -> Path | None:
        """The path of that note; None if something cannot be read."""
        adapter = list(files_below(Path(kind[0]))) if kind[0] else []
        if kind[0] and not adapter:  # its files are not at the path of its name
            return None
        return self._path("proved", [self._setup, kind, adapter, writer.hex()])

    def _aside(self, writer: bytes) -> Path | None:
        return self._path("aside", [self._setup, writer.hex()])

    def _path(self, what: str, parts: object) -> Path | None:
        if not self._setup or self._namespace is None:
            return None
        name = name_of(self._namespace, parts)
        return None if name is None else user_cache(what, name)


def _forget_old(folder: Path) -> None:
    notes, until = [(path.stat().st_mtime, path) for path in folder.iterdir()], time.time()
    notes.sort()
    for number, (last_s, path) in enumerate(notes):
        if last_s < until - _KEPT_S or number < len(notes) - _MOST:
            path.unlink(missing_ok=True)


_SAME, _DIFFERENT = b"=", b"x"
_MOST_TALLY: Final = 1 << 17
"""Comparisons that are kept; at twice as many the older half is deleted."""


class SampleCounts(NamedTuple):
    """Chunks compared at random."""

    compared: int
    different: int

    @property
    def bound(self) -> float:
        """The largest share of wrong chunks among all, with a probability of 95 %."""
        return upper_bound(self.different, self.compared)


def upper_bound(different: int, compared: int, confidence: float = 0.95) -> float:
    """Return the largest share of wrong chunks that ``compared`` draws leave possible.

    The exact bound of Clopper and Pearson: with a larger share so few or fewer of the draws would
    differ in less than 1 - ``confidence`` of all cases.
    """
    if different >= compared:
        return 1.0
    ways = [
        math.lgamma(compared + 1) - math.lgamma(k + 1) - math.lgamma(compared - k + 1)
        for k in range(different + 1)
    ]
    low, high = different / compared, 1.0
    for _ in range(60):
        share = (low + high) / 2
        yes, no = math.log(share or 1e-300), math.log1p(-share) if share < 1 else -math.inf
        chance = sum(math.exp(way + k * yes + (compared - k) * no) for k, way in enumerate(ways))
        low, high = (share, high) if chance > 1 - confidence else (low, share)
    return high


class Tally:
    """The comparisons in one namespace. Never raises for the file system, which it touches."""

    def __init__(self, namespace: Path | None) -> None:
        """Count for a namespace's directory; None: only for this process."""
        self._namespace, self._own = namespace, bytearray()

    def add(self, *, same: bool) -> None:
        mark = _SAME if same else _DIFFERENT
        self._own += mark
        del self._own[:-_MOST_TALLY]
        path = self._path()
        if path is None:
            return
        with suppress(OSError):
            make_folders(path.parent)
            fd = make_file(path, os.O_APPEND)
            try:
                os.write(fd, mark)
            finally:
                os.close(fd)
            if path.stat().st_size > 2 * _MOST_TALLY:  # another process's byte may get lost now
                atomic_write(path, path.read_bytes()[-_MOST_TALLY:])

    @property
    def counted(self) -> SampleCounts:
        """The comparisons so far, of all engines of this user on this host if known."""
        marks, path = bytes(self._own), self._path()
        if path is not None and trusted(path):
            with suppress(OSError):
                marks = path.read_bytes()[-_MOST_TALLY:]
        different = marks.count(_DIFFERENT)
        return SampleCounts(different + marks.count(_SAME), different)

    def _path(self) -> Path | None:
        name = None if self._namespace is None else name_of(self._namespace, ())
        return None if name is None else user_cache("compared", name)
