"""The savings of loads: measured in each engine, and kept in the cache directory for people.

A load saves the time that computing its tokens would have taken, less lookup and load. The price
of computing is what this engine's prompts take, by their length (:class:`PrefillSpeed`), from three
measured prefills on. Loads before that get their price afterwards. Until then an engine that was
restarted takes the prefills of the latest one of its kind that used this directory. Loads that are
much longer than the latest prompts take the prefills of before. Without any of these the time is
unknown, not 0.

It also counts where prompts part from what is stored, and keeps no text, tokens or chunk names.

Each process writes a file (`vua.capacity.upkeep`) a second after the first change, then each ten
seconds at most, and at the end: a process that is killed loses no more.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Final

from vua.capacity.upkeep import (
    DAYS,
    FOLDER,
    MOST_FILES,
    Parted,
    Totals,
    add_up,
    advice,
    prefills_of,
    tag_of,
    upkeep_folder,
)
from vua.connector.load_policy import MIN_MEASURED, PrefillSpeed
from vua.connector.log import logger
from vua.connector.proved import forget_old
from vua.errors import ConfigError
from vua.io.files import atomic_write
from vua.io.forks import new_lock, watch
from vua.security.settings import Security
from vua.storage.location import directory_of, names_of
from vua.storage.mark import UPKEEP

log = logger("savings")

_FIRST_S, _EVERY_S, _SAID_EVERY_S, _END_S = 1.0, 10.0, 3600.0, 1.0
_POINTS: Final = 16
"""Measured prefills in a file: the longest."""
_WAITING: Final = 4096
"""Loads that wait for a price; older ones never get any."""
_MOST_PARTED: Final = 16
"""Days of namespaces in a file: the latest."""


class Savings:
    """One process's savings. Thread-safe. Only :meth:`close` waits for the disk, a second."""

    def __init__(
        self, prefill: PrefillSpeed | None = None, *, wall: Callable[[], float] = time.time
    ) -> None:
        """Price by ``prefill``, if it is measured; ``wall`` returns seconds since 1970."""
        self._prefill, self._wall, self._lock = prefill or PrefillSpeed(0), wall, new_lock()
        self._root: Path | None = None
        self._kind, self._security = "", Security()
        self._reset()
        watch(self)

    def _reset(self) -> None:
        self._name = secrets.token_hex(8)
        self._days: dict[str, Totals] = {}
        self._parted: dict[str, Parted] = {}
        self._waiting = deque[tuple[str, int, int, int, float]](maxlen=_WAITING)
        self._earlier = PrefillSpeed(0)
        """Of the engine before this one, then of this one's past: when prompts were longer."""
        self._kept = list[tuple[float, float]]()
        """Measured prefills when the file was last written."""
        self._due = False
        """Whether a thread waits to write: until what it writes is decided."""
        self._writer: threading.Thread | None = None
        """The latest one, until :meth:`close` has waited for it."""
        self._soon, self._disk = threading.Event(), new_lock()
        self._writes, self._said_s = 0, time.monotonic()

    def after_fork(self) -> None:
        """Begin anew: what there is is the parent's."""
        atexit.unregister(self.close)
        self._reset()

    def keep_at(
        self, where: str | os.PathLike[str] | Sequence[str], kind: str, security: Security
    ) -> None:
        """Keep a file in a cache's directory, the nearest of tiers; a bucket has none.

        ``kind`` stands for all that decides how long computing takes; "": that is not known.
        ``security`` says the file's mode, and the key of this file and of others that count.
        """
        with self._lock:
            self._root = directory_of(next(iter(names_of(where)), None))
            self._kind, self._security = kind, security

    def looked_up(
        self,
        namespace: str,
        found: int,
        asked: int,
        size: int,
        before: int = 0,
        *,
        ends: bool = True,
    ) -> None:
        """Note that of a prompt's whole chunks so many were found, of ``size`` tokens each.

        After ``before`` tokens that were not looked up; ``ends``: no more of the prompt will be.
        """
        stored, where = before + found * size, "whole" if asked > 0 else "short"
        if found < asked:
            where = str(1 << (stored + size - 1).bit_length() if stored else size)
        with self._lock:
            at = f"{(today := self._today())} {namespace}"
            if ends:
                self._parted.setdefault(at, Parted())[where] += 1
            for old in [*self._parted][:-_MOST_PARTED]:
                del self._parted[old]
            self._add(today, Totals(asked, found))

    def loaded(self, tokens: int, before: int, seconds: float, rows: int = 1) -> None:
        """Note that so many tokens of each row came, after earlier ones, and how long that took."""
        with self._lock:
            today = self._today()
            self._waiting.append((today, tokens, before, rows, seconds))
            self._add(today, Totals(loaded_tokens=rows * tokens))

    def _today(self) -> str:
        return time.strftime("%Y-%m-%d", time.gmtime(self._wall()))

    def _add(self, day: str, more: Totals) -> None:
        if any(more):
            self._days[day] = add_up((self._days.get(day, Totals()), more))
        for old in sorted(self._days)[:-DAYS]:
            del self._days[old]
        self._price()
        self._begin()

    def _begin(self) -> None:
        if not self._due and self._root is not None:
            self._due, self._soon = True, threading.Event()
            given = (self._root, self._soon)
            self._writer = threading.Thread(target=self._write, args=given, daemon=True)
            with suppress(RuntimeError):  # the process ends, or has no thread
                self._writer.start()
            atexit.unregister(self.close)
            atexit.register(self.close)  # also after a close

    def _price(self) -> None:
        while self._waiting:
            day, tokens, before, rows, seconds = self._waiting[0]
            speeds = [self._prefill, self._earlier]
            if 2 * self._prefill.high < min(before + tokens / 2, self._earlier.high):
                speeds.reverse()  # the latest prompts were much shorter than what is priced
            prices = (one.seconds(tokens, before, MIN_MEASURED) for one in speeds)
            compute_s = next((price for price in prices if price is not None), None)
            if compute_s is None:
                return
            self._waiting.popleft()
            if day in self._days:
                more = Totals(priced_tokens=rows * tokens, saved_s=rows * compute_s - seconds)
                self._days[day] = add_up((self._days[day], more))

    @property
    def total(self) -> Totals:
        """The savings of this process in the last days."""
        with self._lock:
            self._price()
            return add_up(self._days.values())

    def close(self) -> None:
        """Write what is not written yet, and log the sum; if nothing is new, do nothing.

        Waits a second at most.
        """
        with self._lock:
            if self._days and self._prefill.points != self._kept:  # after the last lookup
                self._begin()
            writer, soon, self._writer = self._writer, self._soon, None
        atexit.unregister(self.close)
        if writer is not None:
            soon.set()
            with suppress(RuntimeError):  # it could not be started
                writer.join(_END_S)
            self._say()

    def _say(self) -> None:
        self._said_s = time.monotonic()
        with self._lock:
            why = advice(sum(self._parted.values(), Parted()))
        total = self.total
        if said := [str(total)] * bool(total.asked_chunks) + [why] * bool(why):
            log.info("VUA, since this process began: %s", "; ".join(said))

    def _write(self, root: Path, soon: threading.Event) -> None:
        soon.wait(_EVERY_S if self._writes else _FIRST_S)
        with self._disk:  # the one before may still write what is older
            self._due = False  # what comes from here on needs another
            try:
                self._write_at(root)
            except (OSError, ConfigError) as problem:
                log.debug("what was saved is not kept: %s", problem)
            self._writes += 1
        if time.monotonic() - self._said_s >= _SAID_EVERY_S:
            self._say()

    def _write_at(self, root: Path) -> None:
        """The first time, read all others' files, too, and delete old ones."""
        key_file, mode = self._security.key_file, self._security.file_mode
        for x, y in [] if self._writes else prefills_of(root, self._kind, key_file):
            self._earlier.add(x, y)
        self.total  # noqa: B018 - gives loads their price, as far as there is one now
        with self._lock:
            own = self._kept = self._prefill.points
            far = 2 * self._prefill.high >= self._earlier.high
            if far and len(own) >= MIN_MEASURED:
                self._earlier = copy(self._prefill)
            longest = sorted(self._earlier.points or own)[-_POINTS:]
            kept = {"kind": self._kind, "prefills": longest}
            text = json.dumps(kept | {"days": self._days, "parted": self._parted}).encode()
        text += b"\n" + tag_of(key_file, self._name, text)
        with upkeep_folder(root, FOLDER) as folder:
            atomic_write(self._name, text, dir_fd=folder, mode=mode)
        if not self._writes:
            forget_old(root / UPKEEP / FOLDER, DAYS * 86400.0, MOST_FILES)


@lru_cache(maxsize=64)
def savings_at(directory: Path | None, security: Security) -> Savings:
    """Return this process's savings of a directory, for those that see no prefill: no price."""
    savings = Savings()
    savings.keep_at([] if directory is None else directory, "", security)
    return savings
