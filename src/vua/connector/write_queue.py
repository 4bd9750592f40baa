"""The saving half of a worker: chunks copied out of the cache, written in the background.

The engine never waits for storage: there are buffers for two of its full steps. Chunks that do not
fit are not queued but reported to the scheduler's half, which orders them again from the first
missing chunk when there are buffers. No chunk is stored after a missing one: it would never be
found.

The number of writing threads is the one that makes the storage fastest, measured while chunks wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

from vua.connector.config import ConnectorConfig
from vua.connector.group_transfer import GroupTransfer, ShardFiles, outcomes_of
from vua.connector.log import WarnOnce, logger
from vua.connector.metadata import Reporter, SaveOrder
from vua.connector.metrics import Recorder
from vua.connector.weights_watch import EngineState
from vua.errors import StorageError
from vua.format.keys import ChunkKey
from vua.io.pool import Breaker, Job, Pool

_MOST: Final = 16
_WRITES: Final = 8
"""Writes per thread count that are measured before it is judged; at least two for each thread."""
_FASTER: Final = 1.15
"""A change to twice the threads must be this much faster, to half of them at most this much
slower."""
_FIRST_PAUSE: Final = 8
_MAX_PAUSE: Final = 256
"""Measurements until another thread count is tried again; doubled after each useless try."""


class WriterCount:
    """Doubles or halves the number of threads, and keeps the faster one. Thread-safe.

    A local file system may be as fast with one thread as the machine can copy; one over a network
    takes some milliseconds per file and many files at a time. Only times in which work waits are
    meaningful, so an empty queue restarts the measurement.
    """

    def __init__(self, *, most: int = _MOST, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with one thread; never return more than ``most``. ``clock`` returns seconds."""
        self.threads = 1
        self._most, self._clock, self._lock = most, clock, threading.Lock()
        self._best, self._best_rate = 1, 0.0
        self._pause, self._wait, self._up = _FIRST_PAUSE, 0, True
        self._begin(0)

    def _begin(self, unmeasured: int) -> None:
        """Measure from now on, without the next writes, which began with other threads."""
        self._left_out, self._writes, self._nbytes = unmeasured, 0, 0
        self._since = self._clock()

    def wrote(self, nbytes: int, waiting: int) -> int:
        """Note that a file was written while so many waited; return :attr:`threads`."""
        with self._lock:
            if not waiting:
                self._begin(0)
            elif self._left_out:
                self._begin(self._left_out - 1)
            else:
                self._writes, self._nbytes = self._writes + 1, self._nbytes + nbytes
                if self._writes >= max(_WRITES, 2 * self.threads):
                    self._judge(self._nbytes / max(1e-9, self._clock() - self._since))
            return self.threads

    def _judge(self, rate: float) -> None:
        before, tried = self.threads, self.threads - self._best
        factor = _FASTER if tried < 0 else 1 / _FASTER
        if not tried:
            self._best_rate = rate
            self._wait -= 1
        elif rate * factor > self._best_rate:
            self._best, self._best_rate = before, rate
            self._pause, self._wait = _FIRST_PAUSE, 0  # and further in this direction
        else:
            self._up = not self._up
            self._wait, self._pause = self._pause, min(2 * self._pause, _MAX_PAUSE)
        self.threads = self._best
        if self._wait <= 0:
            other = 2 * self._best if self._up else self._best // 2
            if 1 <= other <= self._most:
                self.threads = other
            else:
                self._up = not self._up
                self._wait = self._pause
        self._begin(max(before, self.threads) if self.threads != before else 0)


log = logger("worker")

_WRITE_NBYTES: Final = 64 << 20
"""The most that one call writes: its buffers are free when all of it is stored."""
_MAX_HOLES: Final = 1000
"""Requests with a missing chunk that are remembered: the running ones."""


@dataclass(frozen=True, slots=True)
class _Save:
    group: GroupTransfer
    files: ShardFiles | None
    """Taken when they are copied: after a reset they must not get into the new epoch. None: not
    known then, see `WriteQueue.release`."""
    keys: Sequence[ChunkKey]
    buffers: Sequence[Any]
    """One for each, adjacent in memory."""
    proven: Callable[[], bool]
    """Whether they were computed with the weights of their epoch."""
    order: SaveOrder
    pin: bool
    """Whether the last one, and so all of its prefix, is pinned."""

    def part(self, first: int, stop: int) -> _Save:
        pin = self.pin and stop == len(self.keys)
        return replace(self, keys=self.keys[first:stop], buffers=self.buffers[first:stop], pin=pin)

    def free(self) -> None:
        """Release the buffers; not while a write may still read them."""
        for buffer in self.buffers:
            self.group.save_buffers.give_back(buffer)


class _Hole(NamedTuple):
    token: int
    again: bool
    """Whether to order it again when there are buffers; False if storage has failed."""


class WriteQueue:
    """One rank's saves. Called from the worker's thread only; writes on its own threads."""

    def __init__(
        self,
        config: ConnectorConfig,
        rank: int,
        stats: Recorder,
        memory: EngineState,
        reporter: Reporter,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start threads as ``config`` says; count for ``rank`` in ``stats``.

        Copied chunks are stored only if ``memory`` then holds the same weights as before.
        ``reporter`` gets `WorkerOutput.unsaved` and ``retry``. ``clock`` returns seconds.
        """
        self._memory, self._reporter, self._clock = memory, reporter, clock
        self._stats, self._rank = stats, rank
        self._writers = WriterCount()
        self._breaker = Breaker("saves", logger("storage"), clock=clock)
        self._pool = Pool[_Save](
            *(self._writers.threads, "vua-save"),
            timeout_s=config.timeouts.io_s,
            breaker=self._breaker,
            late=self._is_late,
            clock=clock,
        )
        self._lock = threading.Lock()
        self._copied: list[_Save] = []
        self._held: list[_Save] = []
        """Copied before it was known where to write them."""
        self._first_files: Sequence[ShardFiles] | None = None
        """Where those are written, by the numbers of their groups; empty: nowhere."""
        self.pending = 0
        """How many chunks are copied out and not yet written."""
        self._count_pending(0)  # the metric is there from the first step on
        self._holes: dict[str, _Hole] = {}
        self._warn_once = WarnOnce(log)

    def close(self, timeout_s: float) -> int:
        """Write waiting chunks, for ``timeout_s`` at most; return how many are not stored."""
        self._pool.close(timeout_s=timeout_s)
        return self.pending

    def refuse(
        self, orders: Sequence[SaveOrder], groups: Sequence[GroupTransfer], *, again: bool
    ) -> None:
        """Copy nothing of these orders; with ``again`` they are to be ordered again later."""
        for order in orders:
            self._count_refused(order, groups, "dropped" if again else "reset")
            self._leave(order, order.start, again=again)

    def _count_refused(
        self, order: SaveOrder, groups: Sequence[GroupTransfer], outcome: str
    ) -> None:
        chunks = sum(len(keys) for number, keys in order.parts if groups[number].writes)
        self._stats.add("vua_chunks_saved_total", chunks, outcome)

    def copy_out(self, orders: Sequence[SaveOrder], groups: Sequence[GroupTransfer]) -> None:
        """Copy a step's chunks out of the cache, to be written after :meth:`hand_over`.

        Those of a group at once: on a GPU each call takes time of the engine's thread.
        """
        proven = self._memory.proof()
        taken = [save for order in orders for save in self._with_buffers(order, groups, proven)]
        self._count_pending(sum(len(save.keys) for save in taken))
        try:
            for group in groups:
                if mine := [save for save in taken if save.group is group]:
                    group.gather(
                        [buffer for save in mine for buffer in save.buffers],
                        [key for save in mine for key in save.keys],
                        [save.order.block_ids for save in mine for _ in save.keys],
                    )
        except Exception:
            self._lose(taken)
            raise
        self._copied += taken

    def _with_buffers(
        self, order: SaveOrder, groups: Sequence[GroupTransfer], proven: Callable[[], bool]
    ) -> list[_Save]:
        """Take buffers for an order's chunks, in each group up to the first without a buffer.

        An order that begins after a missing chunk was made before the scheduler's half knew of it.
        """
        hole = self._holes.get(order.request_id)
        if hole is not None and order.start > hole.token:
            self._count_refused(order, groups, "dropped")
            return []
        with self._lock:
            self._holes.pop(order.request_id, None)
        return [
            save
            for number, keys in order.parts
            if groups[number].writes
            for save in self._take_buffers(order, groups[number], keys, proven)
        ]

    def _take_buffers(
        self,
        order: SaveOrder,
        group: GroupTransfer,
        keys: Sequence[ChunkKey],
        proven: Callable[[], bool],
    ) -> list[_Save]:
        keys = [key for key in keys if not self._behind_hole(order, key)]
        files: ShardFiles | None = getattr(group, "files", None)
        taken: list[Any] = []
        for key in keys:
            paused = not self._breaker.allows()
            buffer = None if paused else group.save_buffers.take()
            if buffer is None:
                left = len(keys) - len(taken)
                outcome = "paused" if paused else "dropped"
                self._stats.add("vua_chunks_saved_total", left, outcome)
                if not paused and files is None:
                    self._warn_once("early", "until the weights are known, no more prompts fit")
                elif not paused:
                    self._warn_once("full", "storage is slower than the engine")
                self._leave(order, key.start, again=not paused)
                break
            taken.append(buffer)
        if not taken:
            return []
        whole = _Save(group, files, keys[: len(taken)], taken, proven, order, order.pin)
        apart = [at for at in range(1, len(taken)) if taken[at - 1].number + 1 != taken[at].number]
        return [whole.part(*ends) for ends in pairwise((0, *apart, len(taken)))]

    def _behind_hole(self, order: SaveOrder, key: ChunkKey) -> bool:
        hole = self._holes.get(order.request_id)
        return hole is not None and key.start > hole.token

    def _leave(self, order: SaveOrder, token: int, *, again: bool) -> None:
        """Note that an order's chunk that begins with ``token``, and those after it, are missing.

        For any thread.
        """
        with self._lock:
            hole = self._holes.pop(order.request_id, None)
            if hole is not None:
                token, again = min(token, hole.token), again and hole.again
            self._holes[order.request_id] = _Hole(token, again)
            with self._reporter.writing() as report:
                report.lacks(order.request_id, token)
            if len(self._holes) > _MAX_HOLES:
                del self._holes[next(iter(self._holes))]

    def ask_again(self, groups: Sequence[GroupTransfer]) -> None:
        """Report the requests that are to try again, if an eighth of the buffers is free.

        With one at a time chunks would be ordered as often.
        """
        if self._holes and all(
            group.save_buffers.left >= max(1, group.save_limit // 8) for group in groups
        ):
            with self._lock:
                again = [name for name, hole in self._holes.items() if hole.again]
            if again:
                with self._reporter.writing() as report:
                    report.retry.update(again)

    def forget(self, request_ids: Collection[str]) -> None:
        """Forget requests that have no blocks any more: their missing chunks stay missing."""
        if self._holes:
            with self._lock:
                for request_id in self._holes.keys() & set(request_ids):
                    if self._holes[request_id].again:  # otherwise some of it may still wait
                        del self._holes[request_id]

    def hand_over(self, held: Sequence[_Save] = ()) -> None:
        """Start writing the copied chunks; or those ``held`` back before, on any thread.

        Only now, since threads that write beside the copies take cores, memory bandwidth and the
        GIL from the engine's thread, which waits for the copies ("caller blocked" in C3).
        """
        copied = held
        if not held:
            copied, self._copied = self._copied, []
        if any(save.files is None for save in copied):
            with self._lock:
                if self._first_files is None:
                    self._held += copied
                    return
        saves = [part for save in copied for part in self._parts(save)]
        for at, save in enumerate(saves):
            try:
                self._pool.submit(self._write, save)
            except RuntimeError as problem:  # not a single thread can be started
                self._warn_once("threads", f"chunks are not stored: {problem}")
                self._lose(saves[at:])
                return

    def release(self, files: Sequence[ShardFiles]) -> None:
        """Write what was copied before it was known where; for any thread, once.

        ``files``: those of each group; empty: it is not written.
        """
        with self._lock:
            self._first_files, held, self._held = files, self._held, []
        if held:
            self.hand_over(held)

    def _parts(self, save: _Save) -> Iterator[_Save]:
        """Divide chunks into as many parts as there are threads, none of them large.

        The engine's thread waits for the GIL whenever a thread here holds it, and each call of one
        takes as much of it for many chunks as for one.
        """
        chunks, group = len(save.keys), save.group
        most = max(1, _WRITE_NBYTES // group.shard.payload_nbytes(group.group.layout))
        size = min(most, -(-chunks // self._writers.threads))
        for first in range(0, chunks, size):
            yield save.part(first, min(first + size, chunks))

    def _lose(self, saves: Sequence[_Save]) -> None:
        for save in saves:
            save.free()
            self._count_saves(save, ["error"] * len(save.keys), 0.0)

    def _write(self, job: Job[_Save]) -> None:
        save, began = job.what, self._clock()
        outcomes: list[str] = []
        rest = "error"
        try:
            save.group.fetch(save.buffers)
            wanted = [key for key in save.keys if not self._behind_hole(save.order, key)]
            first = self._first_files
            files = save.files or (first[save.group.number] if first else None)
            if not wanted:
                rest = "dropped"
            elif files is None or not save.proven():
                rest = "reset"
            else:
                memory, name = save.group.save_buffers.memory, save.group.writer
                with files.saver(memory, name) as saver:
                    saver.prompt_chunks = save.order.prompt_chunks
                    for statuses in saver.save_each(wanted, save.buffers[0].number):
                        outcomes += outcomes_of(statuses)
                outcomes += ["refused"] * (len(wanted) - len(outcomes))
                capacity, rest = files.store.capacity, "dropped"
                if save.pin and len(wanted) == len(save.keys) and capacity is not None:
                    capacity.pin(wanted[-1].name)
        except StorageError as problem:
            self._warn_once(type(problem).__name__, f"chunks are not stored: {problem}")
        except Exception:  # a save that breaks costs hits, never a request
            log.exception("chunk %s was not stored", save.keys[0].name[:12])
        finally:
            save.free()
            if job.settle():
                outcomes += [rest] * (len(save.keys) - len(outcomes))
                for outcome in outcomes:
                    if outcome != "dropped":  # the storage was asked
                        self._breaker.went(well=outcome != "error")
                self._count_saves(save, outcomes, self._clock() - began)

    def give_up(self) -> None:
        self._pool.give_up()

    def _is_late(self, job: Job[_Save]) -> None:
        for _ in job.what.keys[1:]:  # the pool counts one failure
            self._breaker.went(well=False)
        if not job.started:
            job.what.free()
        self._count_saves(job.what, ["timeout"] * len(job.what.keys), 0.0)

    def _count_saves(self, save: _Save, outcomes: Sequence[str], seconds: float) -> None:
        group, written = save.group, outcomes.count("written")
        self._count_pending(-len(outcomes))
        for key, outcome in zip(save.keys, outcomes, strict=True):
            self._stats.add("vua_chunks_saved_total", label=outcome)
            if outcome not in ("written", "present", "dropped"):
                self._leave(save.order, key.start, again=False)
            if outcome == "written":
                self._stats.observe("vua_save_seconds", seconds / written)
                if self._rank == 0 and group.number == 0:
                    self._stats.add("vua_stored_tokens_total", key.stop - key.start)
        if written:
            nbytes = written * group.shard.payload_nbytes(group.group.layout)
            self._stats.add("vua_stored_bytes_total", nbytes)
            self._pool.limit(self._writers.wrote(nbytes, self._pool.waiting))

    def _count_pending(self, by: int) -> None:
        with self._lock:
            self.pending += by
            self._stats.set("vua_pending_saves", self.pending, str(self._rank))
