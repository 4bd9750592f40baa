"""Repeated looks at a cache, for `vua top` and `vua ui`: what is there, new, used and gone.

`vua top` uses names and times alone: a chunk with a younger mtime than at the previous look was
used (or is new), a missing one was evicted (:mod:`vua.capacity.lru`). A process updates a prefix's
mtime at most once a minute, so `used` counts chunks in use, not requests. At a million chunks a
look takes seconds: the interval runs from its end to the start of the next one. For the page of
`vua ui` a separate process looks (:func:`watch`).

A bucket is listed: its times are those of the last write or renewal, and a request names 1,000
objects. So it is looked at once a minute by default, and `top` shows the cost.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

import click
import numpy as np

from vua.capacity.saved import Totals, saved_today
from vua.catalog.base import Catalog, NamespaceCatalog, Snapshot
from vua.catalog.contents import SHORT
from vua.catalog.opening import open_catalog
from vua.cli.command import command, duration_s
from vua.cli.output import (
    SOUND,
    Output,
    Report,
    clear_screen,
    cost,
    plain,
    progress,
    requests_of,
    table,
)
from vua.errors import ConfigError, VUAError, explaining
from vua.io.words import counted, size

_SHOWN_S: Final = 0.2
"""Least time between two progress messages."""
_ENDS_S: Final = 1.0
"""How long a child may take to end."""
_LOOKED_S: Final = 1.0
"""Interval of checking that the server is still there."""


class Talk:
    """The child's end of the connection."""

    def __init__(self, line: Connection, server: int) -> None:
        self._line, self._server, self._shown_s = line, server, 0.0

    def tell(self, what: str, value: object) -> None:
        self._line.send((what, value))

    def show(
        self, text: str, done: int = 0, total: int = 0, *, amount: int = 0, unit: str = "B"
    ) -> None:
        """Report progress, now and then; see :class:`vua.capacity.spaces.Show`."""
        now_s = time.monotonic()
        if now_s - self._shown_s > _SHOWN_S or done == total:
            self._shown_s = now_s
            state = {"text": text, "done": done, "total": total, "amount": amount, "unit": unit}
            self.tell("progress", state)

    def wait(self, seconds: float = float("inf")) -> bool:
        """Wait for a request; return whether there is one. Ends the process without a server."""
        until_s = time.monotonic() + seconds
        while not self._line.poll(max(0.0, min(_LOOKED_S, until_s - time.monotonic()))):
            if os.getppid() != self._server:
                sys.exit()
            if time.monotonic() >= until_s:
                return False
        self._line.recv()
        return True


class Child:
    """A process that works, and reports (what, value) to ``hear`` in a thread here."""

    def __init__(self, work: Callable[[Talk], None], hear: Callable[[str, Any], None]) -> None:
        self._hear = hear
        self._line, there = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(
            target=_work, args=(work, there, os.getpid())
        )
        self._process.start()
        there.close()

    def listen(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                self._hear(*self._line.recv())
        except (EOFError, OSError):
            self._hear("ended", None)

    def ask(self) -> None:
        self._line.send(None)

    def close(self) -> None:
        self._process.terminate()
        self._process.join(_ENDS_S)
        self._process.kill()  # it waits for a storage, and has not seen that it is to end
        self._process.join()


def _work(work: Callable[[Talk], None], line: Connection, server: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this one
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # and with it what it has started
    with contextlib.suppress(BrokenPipeError):  # the server has gone
        work(Talk(line, server))


_INTERVAL_S: Final = 2.0
_WINDOWS_S: Final = (60, 3600, 86_400)
_REST: Final = 5
"""Seconds of rest per second of a look."""
_AGES_S: Final = (60, 3600, 86_400, 7 * 86_400)
_PINS: Final = 20
"""That the page names."""
_PINS_S: Final = 600
"""How long pins are remembered: finding them lists the folder of each chunk."""


def between_looks_s(given_s: float | None, catalog: Catalog, usual_s: float) -> float:
    """Return the seconds between two looks. Raises ConfigError for an invalid ``given_s``."""
    interval_s = given_s if given_s is not None else catalog.look_s or usual_s
    if not interval_s > 0:
        text = f"--interval must be a positive number of seconds, found {interval_s!r}"
        raise ConfigError(text)
    return interval_s


# -- vua top --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Traffic(Report):
    """The changes between two looks."""

    directory: str
    nbytes: int
    max_bytes: float | None
    free_nbytes: int | None
    seconds: float
    namespaces: Sequence[Mapping[str, Any]]
    chunks: int
    counts: Mapping[str, int]
    saved: Totals | None

    def describe(self) -> object:
        return {
            "directory": self.directory,
            "nbytes": self.nbytes,
            "max_bytes": self.max_bytes,
            "free_nbytes": self.free_nbytes,
            **requests_of(self.counts),
            "chunks": self.chunks,
            "seconds": round(self.seconds, 3),
            "namespaces": self.namespaces,
            "saved_today": self.saved and self.saved.describe(),
        }

    def show(self) -> None:
        """Print a line for all, and a row per namespace."""
        text = f"{self.directory}: {counted(self.chunks, 'chunk')}, {size(self.nbytes)}"
        text += "" if self.max_bytes is None else f" of at most {size(self.max_bytes)}"
        text += "" if self.free_nbytes is None else f"; {size(self.free_nbytes)} of the disk free"
        print(f"{text}{cost(self.counts)}; over {self.seconds:.3f} s")
        if self.saved:
            print(f"today: {self.saved}")
        head = ["namespace", "model", " chunks", " size", " new/s", " used/s", " gone/s"]
        head += [f" used in {text}" for text in ("1 min", "1 h", "1 day")] + ["salts"]
        table(head, [_row(one) for one in self.namespaces])


def _row(one: Mapping[str, Any]) -> list[object]:
    salts = [f"{salt}:{count}" for salt, count in one["salts"].items() if salt != "-"]
    head = [one["namespace"][:SHORT], one["model"], one["chunks"], size(one["nbytes"])]
    rates = [one["new_per_s"], one["used_per_s"], one["gone_per_s"]]
    return [*head, *rates, *one["used_within"].values(), " ".join(salts) or "-"]


@command("top")
@click.option(
    "--interval",
    "interval_s",
    metavar="TIME",
    type=duration_s,
    help="between looks; default 2s, of a bucket 60s",
)
@click.option("--once", is_flag=True, help="look once, over one interval")
def top(
    directory: str, interval_s: float | None = None, *, once: bool = False, output: Output
) -> int:
    """Show repeatedly what is stored, used, new and gone; ``once``: over one interval.

    Raises ConfigError, StorageError.
    """
    catalog = open_catalog(directory)
    interval_s = between_looks_s(interval_s, catalog, _INTERVAL_S)
    with explaining(directory):
        before, began_s = _snapshots(catalog, {}), time.monotonic()
        while True:
            time.sleep(interval_s)
            now, now_s = _snapshots(catalog, before), time.monotonic()
            report = _compared(catalog, now, now_s - began_s)
            if output.is_for_people and not once:
                clear_screen()
            output.show(report)
            if once:
                return SOUND
            before, began_s = now, now_s


def _snapshots(catalog: Catalog, past: Mapping[str, Snapshot]) -> dict[str, Snapshot]:
    with progress() as show, catalog.namespaces(show) as (found, _):
        return {space.name: space.snapshot(past.get(space.name)) for space in found}


def _compared(catalog: Catalog, now: dict[str, Snapshot], took_s: float) -> Traffic:
    newest = (
        int(times.mtimes_ns.max(initial=0)) for one in now.values() for times in one.times.values()
    )
    now_ns = max([time.time_ns(), *newest])  # mtimes are by the server's clock, which may be ahead
    rows = [_compare(one, now_ns, took_s) for _, one in sorted(now.items())]
    nbytes = sum(round(one.chunk_nbytes * one.chunks) for one in now.values())
    chunks = sum(one.chunks for one in now.values())
    use, free_nbytes = catalog.quick_use(), None
    if use is not None:
        nbytes, free_nbytes = use.nbytes, use.free_nbytes
    limits = catalog.limits() if use is None else use.limits
    return Traffic(
        *(catalog.where, nbytes, limits["max_bytes"], free_nbytes, took_s, rows, chunks),
        counts=dict(catalog.counts),
        saved=saved_today(catalog.where),
    )


def _compare(now: Snapshot, now_ns: int, took_s: float) -> dict[str, Any]:
    salts = sorted(now.salts.items(), key=lambda one: -one[1])
    return {
        "namespace": now.name,
        "model": now.model,
        "chunks": now.chunks,
        "nbytes": round(now.chunk_nbytes * now.chunks),
        "new_per_s": round(now.new / took_s, 3),
        "new_nbytes_per_s": round(now.new * now.chunk_nbytes / took_s),
        "used_per_s": round(now.used / took_s, 3),
        "gone_per_s": round(now.gone / took_s, 3),
        "used_within": {
            str(window): sum(
                int((now_ns - times.mtimes_ns <= window * 10**9).sum())
                for times in now.times.values()
            )
            for window in _WINDOWS_S
        },
        "salts": dict(salts[:10]),
    }


# -- for the page ---------------------------------------------------------------------------------


def watch(directory: str, talk: Talk) -> None:
    """Look until the server ends.

    Sends "usage", "namespaces", "saved", "look", "progress" and "problem".
    """
    seen: dict[str, Snapshot] | None = None
    pins: dict[str, list[str]] = {}
    pins_s = time.monotonic()
    while True:
        began_s, least_s = time.monotonic(), _INTERVAL_S
        if began_s - pins_s > _PINS_S:
            pins, pins_s = {}, began_s
        try:
            catalog = open_catalog(directory)
            least_s = catalog.look_s or _INTERVAL_S
            seen = _report(catalog, seen, pins, talk)
        except (VUAError, OSError) as problem:
            talk.tell("problem", plain(str(problem)))
        took_s = time.monotonic() - began_s
        talk.wait(max(least_s, _REST * took_s))


def _report(
    catalog: Catalog,
    seen: dict[str, Snapshot] | None,
    pins: dict[str, list[str]],
    talk: Talk,
) -> dict[str, Snapshot]:
    """Look once.

    Args:
        catalog: at what.
        seen: what the last look found; None before the first.
        pins: known pinned chunks by namespace, to which more are added.
        talk: receives the report.
    """
    usage = catalog.quick_use()
    if usage is not None:
        told = {"nbytes": usage.nbytes, "chunks": usage.chunks, "exact": usage.exact}
        limits = {"limits": dict(usage.limits), "free_nbytes": usage.free_nbytes}
        talk.tell("usage", {**told, **limits})
    now: dict[str, Snapshot] = {}
    past, summaries = seen or {}, []
    with catalog.namespaces(talk.show) as (found, _):
        for number, space in enumerate(found, 1):
            now[space.name] = one = space.snapshot(past.get(space.name))
            if space.name not in pins:
                pins[space.name] = list(space.pins())
            summaries.append(_summary(catalog, space, one, pins[space.name]))
            talk.show("looking", number, len(found), amount=one.chunks, unit="chunk")
    total = {what: sum(getattr(one, what) for one in now.values())
             for what in ("new", "used", "gone")}  # fmt: skip
    total["gone"] += sum(one.chunks for name, one in past.items() if name not in now)
    talk.tell("namespaces", summaries)
    saved = saved_today(catalog.where)
    talk.tell("saved", str(saved or ""))
    talk.tell("look", None if seen is None else total)
    return now


def _summary(
    catalog: Catalog, space: NamespaceCatalog, now: Snapshot, pins: list[str]
) -> dict[str, object]:
    description = space.description
    layout, times = description.layout, now.times.values()
    newest_ns = max((int(one.mtimes_ns.max(initial=0)) for one in times), default=0)
    return {
        "namespace": now.name,
        "model": plain(now.model),
        "description": catalog.state(description),
        "dtype": None if layout is None else plain(layout.dtype),
        "chunk_tokens": None if layout is None else layout.chunk_tokens,
        "chunks": now.chunks,
        "nbytes": round(now.chunk_nbytes * now.chunks),
        "newest_s": newest_ns / 1e9,
        "pinned": len(pins),
        "pins": pins[:_PINS],
        "ages": _ages(now, newest_ns),
    }


def _ages(now: Snapshot, newest_ns: int) -> list[int]:
    """Count chunks by the time since their last use: `_AGES_S`, and longer."""
    now_ns = max(time.time_ns(), newest_ns)  # the server's clock may be ahead of this host's
    within = [
        sum(int((now_ns - one.mtimes_ns <= age_s * 10**9).sum()) for one in now.times.values())
        for age_s in _AGES_S
    ]
    return [int(count) for count in np.diff([0, *within, now.chunks])]
