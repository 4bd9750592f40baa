"""The verdicts of engines about writers: kept in the cache directory, for all engines of a setup.

A verdict is a file in ``.upkeep/verdicts`` of the cache: engines of this setup
(`vua.connector.setup`) have compared this writer's chunks with their own. Either chunks of one kind
were the same, or a chunk of any kind differed. The file's name is a digest of namespace, setup,
kind and writer, made with the cache's key if there is one. Its content is its name. It is believed
under the rules for the directory's other files: those who may write there may forge chunks, too.

Also how many of the chunks compared at random were wrong, and the resulting bound for all loaded
ones. Each comparison is one byte, appended to a file per namespace in ``.upkeep/compared``: engines
of all hosts count together, and `vua doctor` reads it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vua.capacity.upkeep import upkeep_folder
from vua.connector.log import logger
from vua.errors import VUAError
from vua.io.files import atomic_write, make_file
from vua.io.pool import Pool
from vua.io.posix import closing_fd
from vua.security.keyring import Keyring
from vua.security.settings import Security
from vua.storage.mark import UPKEEP
from vua.store.writer import same_setup

if TYPE_CHECKING:
    from vua.connector.extras import Adapter

log = logger("scheduler")

NOTES: Final = Pool[None](1, "vua-notes")
"""Writes verdicts to the cache, which may be on a storage that hangs: an engine's own thread does
not wait for it."""
_KEPT_S: Final = 90 * 86400.0
"""Verdicts unused for so long are deleted."""
_MOST: Final = 1 << 14
"""Verdicts that are kept; the oldest ones beyond that are deleted."""
_MOST_KNOWN: Final = 1 << 14
_TIDIED_EVERY: Final = 256
"""A process cleans up at its first verdict and after every so many."""
_VERDICTS, _COMPARED = "verdicts", "compared"


Kind = tuple[str, ...]
"""Proved separately: the adapter's digest or "", then the inputs besides text."""


def kind_of(request: Any, tokens: int, adapter: Adapter | None = None) -> Kind:
    """Return the kind of the first ``tokens`` tokens of a request with an adapter, if any."""
    beside = {each.modality for each in request.mm_features if each.mm_position.offset < tokens}
    return (adapter.digest if adapter is not None else "", *sorted(beside))


def written() -> None:
    """Return when everything queued for the cache is written."""
    with suppress(RuntimeError):  # the process ends
        NOTES.submit(lambda _: None).wait()


def _believed(path: Path, security: Security) -> bool:
    try:
        for part in (path.parent.parent, path.parent, path):
            status = part.stat(follow_symlinks=False)
            others = status.st_mode & stat.S_IWOTH and security.uids is not None
            if others or not security.trusts(status.st_uid):
                return False
        return stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    except OSError:
        return False


class KnownWriters:
    """One setup's knowledge about writers in one namespace. Never raises for the file system.

    A writer is the 48 bytes of its name, a kind what :func:`kind_of` returns. Files are read by
    :meth:`learn` and written by a thread; the rest is in memory. Thread-safe.
    """

    def __init__(self, root: Path | None, namespace: str, security: Security | None = None) -> None:
        """Know nothing yet; without a directory (None) nothing is kept for other engines."""
        self._root, self._namespace = root, namespace
        self._security = security or Security()
        self._keyring = Keyring(namespace, self._security)
        self._own, self._setup = b"", ""
        self._known: dict[tuple[Kind | None, bytes], bool] = {}
        """Of a kind, whether the writer's chunks were proved; of no kind, whether one differed."""
        self._added = 0

    def be_of(self, setup: str, own: bytes) -> None:
        """Take the setup ("": unknown, nothing is kept) and name of the engine that asks."""
        self._setup, self._own = setup, own

    def learn(self, kind: Kind, writers: Iterable[bytes]) -> None:
        """Read what is known of writers, and of their chunks of a kind. Touches the file system."""
        for writer in writers:
            for which in (None,) if self.is_alike(writer) else (None, kind):
                if (which, writer) not in self._known:
                    self._keep(which, writer, there=self._read(which, writer))

    def is_alike(self, writer: bytes) -> bool:
        """Whether a writer has this engine's setup: nothing of it need be proved."""
        return same_setup(writer, self._own)

    def holds(self, kind: Kind, writer: bytes) -> bool:
        """Whether a writer's chunks of a kind were proved before, as far as was read."""
        return self.is_alike(writer) or self._known.get((kind, writer), False)

    def add(self, kind: Kind, writer: bytes) -> None:
        self._keep(kind, writer, there=True)
        if not self.is_alike(writer):
            self._write(kind, writer)

    def is_aside(self, writer: bytes) -> bool:
        """Whether a writer's chunks differed before, as far as was read."""
        return self._known.get((None, writer), False)

    def put_aside(self, writer: bytes) -> None:
        self._keep(None, writer, there=True)
        self._write(None, writer)

    def _keep(self, kind: Kind | None, writer: bytes, *, there: bool) -> None:
        if len(self._known) >= _MOST_KNOWN:
            with suppress(StopIteration, KeyError, RuntimeError):  # another thread was faster
                del self._known[next(iter(self._known))]
        self._known[kind, writer] = there

    def _name(self, kind: Kind | None, writer: bytes) -> str | None:
        """Return a verdict's name; ``kind`` None: that a chunk differed. None: it is not kept."""
        if not self._setup or self._root is None:
            return None
        parts = json.dumps([self._namespace, self._setup, kind, writer.hex()]).encode()
        try:
            seal = self._keyring.seal()
        except VUAError:  # its key is not there now
            return None
        if seal is None:
            return hashlib.sha256(parts).hexdigest()
        return hmac.digest(seal.naming, b"vua.verdict" + parts, "sha256").hex()

    def _read(self, kind: Kind | None, writer: bytes) -> bool:
        if (name := self._name(kind, writer)) is None or self._root is None:
            return False
        path = self._root / UPKEEP / _VERDICTS / name
        if not _believed(path, self._security):
            return False
        try:
            same = path.read_bytes() == name.encode()  # it was not renamed
        except OSError:
            return False
        with suppress(OSError):  # another user's
            os.utime(path)
        return same

    def _write(self, kind: Kind | None, writer: bytes) -> None:
        if not self._setup or self._root is None:
            return
        with suppress(RuntimeError):  # the process ends, or has no thread
            NOTES.submit(lambda _: self._add(kind, writer))

    def _add(self, kind: Kind | None, writer: bytes) -> None:
        if (name := self._name(kind, writer)) is None or self._root is None:
            return
        try:
            with upkeep_folder(self._root, _VERDICTS) as folder:
                atomic_write(name, name.encode(), dir_fd=folder, mode=self._security.file_mode)
            if self._added % _TIDIED_EVERY == 0:
                forget_old(self._root / UPKEEP / _VERDICTS, _KEPT_S, _MOST)
            self._added += 1
        except OSError as problem:
            log.debug("not remembered: %s", problem)


def forget_old(folder: Path, kept_s: float, most: int) -> None:
    """Delete files that were not written for so long, and the oldest of more than ``most``.

    Raises OSError.
    """
    notes, until = [(path.stat().st_mtime, path) for path in folder.iterdir()], time.time()
    notes.sort()
    for number, (last_s, path) in enumerate(notes):
        if last_s < until - kept_s or number < len(notes) - most:
            path.unlink(missing_ok=True)


_SAME, _DIFFERENT = b"=", b"x"
_MOST_TALLY: Final = 1 << 17
"""Comparisons that count: the latest, of one load in some hundreds."""


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

    def __init__(self, root: Path | None, namespace: str, security: Security | None = None) -> None:
        """Count for a namespace of a cache's directory; None: only for this process."""
        self._root, self._namespace, self._own = root, namespace, bytearray()
        self._security = security or Security()

    def add(self, *, same: bool) -> None:
        mark = _SAME if same else _DIFFERENT
        self._own += mark
        del self._own[:-_MOST_TALLY]
        if self._root is None:
            return
        made = self._namespace, os.O_APPEND, self._security.file_mode
        with (
            suppress(OSError),
            upkeep_folder(self._root, _COMPARED) as folder,
            closing_fd(make_file(*made, dir_fd=folder)) as fd,
        ):
            os.write(fd, mark)

    @property
    def counted(self) -> SampleCounts:
        """The comparisons so far, of all engines that use the directory if known."""
        marks = bytes(self._own)
        if self._root is not None and _believed(self._path(self._root), self._security):
            with suppress(OSError):
                marks = self._path(self._root).read_bytes()[-_MOST_TALLY:]
        different = marks.count(_DIFFERENT)
        return SampleCounts(different + marks.count(_SAME), different)

    def _path(self, root: Path) -> Path:
        return root / UPKEEP / _COMPARED / self._namespace
