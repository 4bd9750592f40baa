"""The only place where damage becomes a miss: counted, logged, taken out of sight or not.

Whatever is damaged, foreign or gone is a miss. A file is removed only when it is proven to be of no
use to anybody, so that the next save writes it anew.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter
from typing import Final

from vua.errors import EntryError, ForeignEntryError
from vua.format.keys import ChunkKey, Keys
from vua.format.layout import Shard
from vua.format.parse import LaterEntryError, later_form
from vua.io.forks import watch
from vua.storage.base import Storage, entry_name

__all__ = ["Quarantine"]

log = logging.getLogger(__name__)

_WARN_INTERVAL_S: Final = 60.0
_FAILURES: Final = 3
"""Reads that fail with EIO, none in between that works, until a file is taken out of sight."""
_MAX_FAILED: Final = 1024


class Quarantine:
    """Judges the files of one storage that could not be loaded. Safe for threads."""

    def __init__(self, storage: Storage) -> None:
        """Remove from ``storage`` what has to go."""
        self._storage = storage
        self._failed: dict[str, int] = {}
        self._warned_s = -_WARN_INTERVAL_S
        self.counts: Counter[str] = Counter()
        """Events so far, see :attr:`vua.store.store.Store.counts`."""
        self.after_fork()
        watch(self)

    def after_fork(self) -> None:
        """Begin with free locks; see :mod:`vua.io.forks`."""
        self._lock = threading.Lock()

    def count(self, event: str, by: int = 1) -> None:
        """Count an event."""
        with self._lock:
            self.counts[event] += by

    def reject(
        self, key: ChunkKey, shard: Shard, version: bytes | None, problem: EntryError
    ) -> str:
        """Log a file that is not what it should be, and remove it if it is damaged.

        ``version`` is that of the file that was read. Returns ``corrupt`` or ``foreign``.
        """
        reason = "foreign" if isinstance(problem, ForeignEntryError) else "corrupt"
        if isinstance(problem, LaterEntryError) or self.is_later(key, shard):
            reason, fate = "foreign", ", and stays: a later version of VUA may know it"
        elif isinstance(problem, ForeignEntryError) and not problem.misplaced:
            fate = "; it may be right and this reader wrong, so it stays"
        elif self._storage.delete(entry_name(key.name, shard), version):
            fate = " and was taken out of sight"
        else:
            fate = "; it could not be removed"
        name = key.name[:12]
        log.warning("%s entry %s/%s is a miss%s: %s", reason, name, shard.name, fate, problem)
        return reason

    def is_later(self, key: ChunkKey, shard: Shard) -> bool:
        """Whether the file of an entry is of a form that only a later version can have written."""
        head = getattr(self._storage, "head", None)  # of a storage that can show it
        try:
            return head is not None and bool(later_form(head(entry_name(key.name, shard))))
        except (OSError, EntryError):
            return False

    def read_failed(
        self, key: ChunkKey, shard: Shard, version: bytes | None, problem: OSError
    ) -> None:
        """Log a failed read, and take a file with a bad sector out of sight, to be stored anew.

        It is a warning once a minute: a lost mount fails all of them. ``version`` is that of the
        file, None where it could not even be opened.
        """
        if version is not None:
            with self._lock:
                self._failed = {} if len(self._failed) > _MAX_FAILED else self._failed
                times = self._failed.get(key.name, 0) + (problem.errno == errno.EIO)
                self._failed[key.name] = times
            name = entry_name(key.name, shard)
            if times >= _FAILURES and self._storage.delete(name, version):
                log.warning(
                    "chunk %s failed %d reads and was taken out of sight", key.name[:12], times
                )
        now_s = time.monotonic()
        often = now_s - self._warned_s < _WARN_INTERVAL_S
        self._warned_s = self._warned_s if often else now_s
        level = logging.DEBUG if often else logging.WARNING
        log.log(level, "chunk %s could not be read, a miss: %s", key.name[:12], problem)

    def loaded(self, keys: Keys, chunks: int) -> None:
        """Count the first ``chunks`` of ``keys``, which were read well; ends a row of failures."""
        self.count("chunks_loaded", chunks)
        if self._failed:  # only failures in a row count
            for place in range(chunks):
                self._failed.pop(keys[place].name, None)
