"""Copies entries between the places of a tiered cache, in the background.

What is written to the near directory travels on to the places behind it; what was read from behind
is written back. Every entry is verified before it is copied. An empty file ``sent-<digest>`` in a
chunk's directory notes that one of its shards has arrived everywhere: so what is not sent is found
again after a crash or an outage, by whoever opens the directory next, and eviction knows what to
spare.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from vua.capacity.lru import mtime_ns_of, set_mtime
from vua.capacity.scan import SENT, mark
from vua.errors import EntryError, StorageError
from vua.io.forks import watch
from vua.io.threads import Call, Threads
from vua.storage.base import FAILED, Storage
from vua.storage.local import LocalStorage, chunk_path
from vua.store.tier_rules import TierRules
from vua.store.whole_entry import verified
from vua.store.write_back import Bounds, WriteBack, whole_batch

__all__ = ["Travel"]

log = logging.getLogger(__name__)

_WAITING: Final = 1 << 16
"""Names that wait to be sent. What does not fit is found by the next look at the directory."""
_RETRY_S: Final = (1.0, 60.0)
"""Pause after a failure, the first and the longest."""
_CLOSE_S: Final = 5.0
"""How long the end of a cache waits for what is under way."""


class Travel:
    """Moves the entries of one namespace; see :class:`vua.storage.tiered.Travels`.

    Safe for threads. A forked child sends what it writes itself.
    """

    def __init__(
        self,
        near: LocalStorage,
        far: Sequence[Storage],
        namespace: str,
        capacity: Bounds,
        *,
        where: str,
        rules: TierRules | None = None,
    ) -> None:
        """Begin to look for what was not sent yet.

        Args:
            near: the directory.
            far: where its entries are to be, too.
            namespace: 64 hex.
            capacity: of the directory.
            where: names the places behind, for the marks: others are sent to anew.
            rules: what may be copied when; by default everything.
        """
        self._near, self._far = near, tuple(far)
        self._namespace, self._where = namespace, where
        self._rules = rules = rules or TierRules()
        self.counts: Counter[str] = Counter()
        """So far: sent, sent_nbytes, brought, brought_nbytes, not_brought, send_failed."""
        self._closing = threading.Event()
        self._up = Threads(1, "vua-send")
        self._back = WriteBack(
            near, far, namespace, capacity,
            rules=rules, counts=self.counts, brought=partial(self._change_mark, sent=True),
        )  # fmt: skip
        self.came, self.reading = self._back.came, self._back.reading
        self._waiting: deque[str] = deque()
        self._looked = False
        self.after_fork()
        watch(self)
        self._wake()

    def after_fork(self) -> None:
        """Begin with nothing under way; see :mod:`vua.io.forks`."""
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._sending = self._failing = False

    def close(self) -> None:
        """Send what waits, for some seconds at most; the rest is found the next time."""
        stop_s = time.monotonic() + _CLOSE_S
        with self._idle:
            if not self._closing.is_set():
                self._idle.wait_for(lambda: not self._sending or self._failing, _CLOSE_S)
        self._closing.set()
        self._up.close(max(0.0, stop_s - time.monotonic()))
        self._back.close(max(0.0, stop_s - time.monotonic()))

    @property
    def waiting(self) -> int:
        """How many entries are known to wait; more may be unknown before the directory is read."""
        return len(self._waiting) + self._sending

    # -- to the places behind -------------------------------------------------------------------

    def wrote(self, names: Sequence[str]) -> None:
        """Send entries, soon."""
        if names:
            room = _WAITING - len(self._waiting)
            self._waiting.extend(names[: max(0, room)])
            self._looked = self._looked and room >= len(names)
            self._wake()

    def seen_behind(self, chunk: str, names: Collection[str]) -> None:
        """Send those entries of a chunk again that have a mark and are not among ``names``.

        ``names`` is what a place behind holds of it now: a lifecycle rule, or somebody, may have
        deleted the rest.
        """
        gone = [one.name for one in self._near.list(f"{chunk}/") if one.name not in names]
        gone = [name for name in gone if self._is_sent(name)]
        for name in gone:
            self._change_mark(name, sent=False)
        self.wrote(gone)

    def _wake(self) -> None:
        with self._lock:
            if self._sending or self._closing.is_set():
                return
            self._sending = True
        with suppress(RuntimeError):  # closed, or no thread is to be had
            self._up.submit(self._send_all)

    def _send_all(self, call: Call[None]) -> None:
        """Send what waits, until nothing does."""
        del call
        pause_s = _RETRY_S[0]
        while not self._closing.is_set():
            if not self._waiting and not self._looked:
                self._looked = True
                self._waiting.extend(self._unsent())
            with self._lock:
                if not self._waiting:
                    self._sending = self._failing = False
                    self._idle.notify_all()
                    return
            name, began_s = self._waiting.popleft(), time.monotonic()
            try:
                nbytes = self._send(name)
            except (OSError, EntryError) as problem:
                self.counts["send_failed"] += 1
                if isinstance(problem, EntryError):
                    log.warning("entry %s is not sent on: %s", name, problem)
                    continue
                self._waiting.appendleft(name)
                self._note(failing=True)
                log.debug("entry %s could not be sent on: %s", name, problem)
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, _RETRY_S[1])
                continue
            pause_s = _RETRY_S[0]
            self._note(failing=False)
            if self._rules.upload_mib_s is not None:
                took_s = time.monotonic() - began_s
                self._closing.wait(nbytes / 2**20 / self._rules.upload_mib_s - took_s)

    def _note(self, *, failing: bool) -> None:
        """Note whether the places behind take anything: who closes does not wait for them."""
        with self._lock:
            self._failing = failing
            if failing:
                self._idle.notify_all()

    def _unsent(self) -> list[str]:
        """Return the entries of the directory without a mark; some, where there are many."""
        found = []
        for entry in self._near.list():
            if not self._is_sent(entry.name):
                found.append(entry.name)
                if len(found) >= _WAITING:
                    self._looked = False
                    break
        return found

    def _send(self, name: str) -> int:
        """Copy one entry to each place behind; return the bytes that were sent.

        Raises OSError, EntryError.
        """
        if not self._far or self._is_sent(name):
            return 0
        try:
            data = self._content(name)
        except FileNotFoundError:  # evicted
            return 0
        verified(data, self._namespace, name)
        sent = 0
        for tier in self._far:
            if not tier.exists([name], len(data))[0]:
                written = tier.write(whole_batch(name, data))
                if written.statuses[0] == FAILED:
                    raise written.problem or StorageError(5, f"{name} could not be written")
                sent += len(data)
        self._change_mark(name, sent=True)
        self.counts["sent"] += 1
        self.counts["sent_nbytes"] += sent
        return sent

    def _content(self, name: str) -> bytes:
        """Return a file's bytes. Raises OSError, UntrustedError."""
        fd, _ = self._near.open_file(name)
        with os.fdopen(fd, "rb", buffering=0) as file:
            return file.read()  # all of it: one `pread` ends at 2 GiB

    def _sent_mark(self, name: str) -> str:
        shard = name.partition("/")[2]
        return SENT + hashlib.sha256(f"{self._where}\n{shard}".encode()).hexdigest()

    def _is_sent(self, name: str) -> bool:
        try:
            os.stat(self._mark_path(name), dir_fd=self._near.fileno(), follow_symlinks=False)
        except OSError:
            return False
        return True

    def _mark_path(self, name: str) -> str:
        return f"{chunk_path(name.partition('/')[0])}/{self._sent_mark(name)}"

    def _change_mark(self, name: str, *, sent: bool) -> None:
        """Note whether an entry was sent, without making its chunk look used."""
        fd, chunk = self._near.fileno(), name.partition("/")[0]
        mtime_ns = mtime_ns_of(fd, chunk)
        if sent:
            mark(fd, chunk, self._sent_mark(name))
        else:
            with suppress(OSError):
                os.unlink(self._mark_path(name), dir_fd=fd)
        if mtime_ns is not None:
            with suppress(OSError):
                set_mtime(fd, chunk, mtime_ns)
