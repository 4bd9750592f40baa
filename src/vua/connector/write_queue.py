"""The saving half of a worker: chunks copied out of the cache, written in the background.

What storage is too slow for is dropped, not queued: there are as many buffers as chunks may wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vua.connector.breaker import StorageGuard
from vua.connector.config import ConnectorConfig
from vua.connector.events import FileEventLog
from vua.connector.group_transfer import GroupTransfer
from vua.connector.log import logger
from vua.connector.memory import Memory
from vua.connector.metadata import SaveOrder
from vua.connector.metrics import Recorder
from vua.errors import StorageError
from vua.format.keys import ChunkKey
from vua.io.breaker import Breaker
from vua.io.workers import Attempt, Workers
from vua.store.store import EntryWriter

__all__ = ["WriteQueue"]

log = logger("worker")

_THREADS = 1
"""Native code writes the files of one save with threads of its own."""


@dataclass(frozen=True, slots=True)
class _Save:
    """One chunk on its way to storage."""

    group: GroupTransfer
    saver: EntryWriter
    """Taken when it is copied: after a reset it must not get into the new epoch."""
    key: ChunkKey
    slab: Any
    proven: Callable[[], bool]
    """Whether it was computed with the weights of its epoch."""
    pin: bool = False
    """Whether it, and so all of its prefix, is to stay."""
    ttl_s: float | None = None
    """See :class:`vua.connector.request.SaveHints`."""


class WriteQueue:
    """One rank's saves. Called from the worker's thread only; writes on threads of its own."""

    def __init__(
        self,
        config: ConnectorConfig,
        rank: int,
        stats: Recorder,
        watch: FileEventLog | None,
        memory: Memory,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start threads as ``config`` says; count for ``rank`` in ``stats``, tell ``watch``.

        What was copied is stored only if ``memory`` then holds the weights that it held before.
        ``clock`` gives seconds.
        """
        self._memory, self._clock = memory, clock
        self._stats, self._rank, self._watch = stats, rank, watch
        self._threads: Workers[_Save] = Workers(
            _THREADS, timeout_s=config.timeouts.io_s, name="vua-save", clock=clock
        )
        self._guard = StorageGuard("saves", Breaker(clock=clock))
        self._lock = threading.Lock()
        self._copied: list[_Save] = []
        self._pending = 0
        self._warned: set[str] = set()

    @property
    def pending(self) -> int:
        """How many chunks are copied out and not yet written."""
        return self._pending

    def close(self) -> bool:
        """Write what is waiting; whether the storage let all of it end in time."""
        return self._threads.close()

    def copy_out(self, group: GroupTransfer, keys: Sequence[ChunkKey], order: SaveOrder) -> None:
        """Copy chunks of one group out of the cache, to be written after :meth:`hand_over`.

        Args:
            group: whose they are.
            keys: the chunks, in the order of the prompt.
            order: tells the blocks that hold them, and what to do with the files.
        """
        for at, key in enumerate(keys if group.writes else ()):
            if not self._guard.allows():
                self._stats.add("vua_chunks_saved_total", len(keys) - at, "paused")
                return
            slab = group.save_slabs.take()
            if slab is None:
                self._stats.add("vua_chunks_saved_total", len(keys) - at, "dropped")
                self._warn_once("full", "storage is slower than the engine: chunks are not stored")
                return  # a later chunk without its prefix would never be found
            group.gather(slab, key, order.block_ids)
            self._count_pending(1)
            pin = order.hints.pin and at == len(keys) - 1  # holds those before it too
            ttl_s, proven = order.hints.ttl_s, self._memory.proof()
            save = _Save(group, group.saver(slab), key, slab, proven, pin, ttl_s)
            self._copied.append(save)
            if len(self._copied) >= group.save_limit // 2:  # buffers have to come back, too
                self.hand_over()

    def hand_over(self) -> None:
        """Have what was copied written.

        Only now, since threads that write beside the copies take cores, the memory's bandwidth and
        the GIL from the engine's thread, which waits for the copies ("caller blocked" in C3).
        """
        copied, self._copied = self._copied, []
        for at, save in enumerate(copied):
            try:
                self._threads.submit(self._write, save)
            except RuntimeError as problem:  # not a single thread can be started
                self._warn_once("threads", f"chunks are not stored: {problem}")
                for left in copied[at:]:
                    left.group.save_slabs.give_back(left.slab)
                    self._count_save(left, "error", 0.0)
                return

    def _write(self, attempt: Attempt[_Save]) -> None:
        save = attempt.what
        outcome, began = "error", self._clock()
        try:
            save.group.copied(save.slab)
            if not save.proven():
                outcome = "reset"
                return
            save.saver.ttl_s = save.ttl_s
            written = save.saver.save(save.key)
            outcome = "written" if written else "refused" if save.saver.refused else "present"
            capacity = save.saver.store.capacity
            if save.pin and capacity is not None:
                capacity.pin(save.key.name)
        except StorageError as problem:
            self._warn_once(type(problem).__name__, f"chunks are not stored: {problem}")
        except Exception:  # a save that breaks costs hits, never a request
            log.exception("chunk %s was not stored", save.key.name[:12])
        finally:
            save.group.save_slabs.give_back(save.slab)  # not earlier: a write may still read it
            if attempt.settle():
                self._guard.went(well=outcome != "error")
                self._count_save(save, outcome, self._clock() - began)

    def give_up(self) -> None:
        """Forget the saves that hang; the chunks are not stored."""
        for attempt in self._threads.overdue():
            if not attempt.started:
                attempt.what.group.save_slabs.give_back(attempt.what.slab)
            self._guard.went(well=False)
            self._count_save(attempt.what, "timeout", 0.0)

    def _count_save(self, save: _Save, outcome: str, seconds: float) -> None:
        self._count_pending(-1)
        self._stats.add("vua_chunks_saved_total", label=outcome)
        current = save.saver.store is save.group.store  # not of an epoch that was left
        if self._watch is not None and current and outcome in ("written", "present"):
            self._watch.stored(save.key, save.group.shard)
        if outcome == "written":
            group = save.group
            self._stats.observe("vua_save_seconds", seconds)
            nbytes = group.shard.payload_nbytes(group.group.layout)
            self._stats.add("vua_stored_bytes_total", nbytes)
            if self._rank == 0 and group.number == 0:
                self._stats.add("vua_stored_tokens_total", save.key.stop - save.key.start)

    def _count_pending(self, by: int) -> None:
        with self._lock:
            self._pending += by
            self._stats.set("vua_pending_saves", self._pending, str(self._rank))

    def _warn_once(self, cause: str, text: str) -> None:
        if cause not in self._warned:
            self._warned.add(cause)
            log.warning("VUA: %s", text)
