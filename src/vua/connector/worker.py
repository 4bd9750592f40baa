"""The connector's half in each worker: moves chunks between files and the engine's paged KV cache.

Loads run on their own threads, into blocks that are unused until they are reported. Saves copy the
blocks out on the engine's thread, after the forward pass and before anything may overwrite them,
and are written in the background. Nothing here raises for storage failures: a chunk that cannot be
loaded is reported as blocks with load errors, one that cannot be stored is dropped.

The worker's half of the witness (:class:`Comparisons`, see `vua.connector.witness`) compares chunks
that it has computed with the files that hold them. The engine's thread only copies the chunk out of
its blocks, as for a save; a separate thread reads the file and compares.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from vua import native
from vua.connector.cache_spec import Model, UncachedError
from vua.connector.config import ConnectorConfig
from vua.connector.device_transfer import DeviceGroupTransfer, lies_on_device, open_gds
from vua.connector.group_transfer import (
    GroupTransfer,
    PageLayouts,
    Rank,
    ShardFiles,
    Tables,
)
from vua.connector.log import logger
from vua.connector.metadata import (
    ComparisonResult,
    ConnectorMetadata,
    LoadOrder,
    Reporter,
    Verdict,
    WitnessOrder,
    WorkerOutput,
)
from vua.connector.metrics import Recorder, Series, record_requests
from vua.connector.opening import OpenedNamespace, Opening, close_within
from vua.connector.weights_watch import EngineState
from vua.connector.write_queue import WriteQueue
from vua.device.gds import Gds
from vua.device.staging import Fence
from vua.errors import ConfigError
from vua.format.identity import Identity
from vua.format.keys import ChunkKey
from vua.io.pool import Breaker, Job, Pool
from vua.io.words import counted
from vua.weights import Identification, Weights


class _Comparison(NamedTuple):
    number: int
    """That of its order."""
    chunks: list[tuple[GroupTransfer, ChunkKey, Any]]
    """The computed ones, each in a buffer for saves."""

    def computed(self, at: int) -> list[torch.Tensor]:
        group, _, buffer = self.chunks[at]
        group.fetch([buffer])
        return [array[0] for array in buffer.arrays]

    def give_back(self) -> None:
        for group, _, buffer in self.chunks:
            group.save_buffers.give_back(buffer)


class Comparisons:
    """One rank's comparisons. Each order gets one verdict. Called from the worker's thread only."""

    def __init__(self, config: ConnectorConfig, reporter: Reporter, *, quantised: bool) -> None:
        """Start no thread yet; ``quantised`` as in :func:`vua.store.agreement.tolerance`."""
        self._quantised, self._reporter = quantised, reporter
        self._pool = Pool[_Comparison](
            1, "vua-witness", timeout_s=config.timeouts.io_s, late=self._is_late
        )
        self.give_up, self.close = self._pool.give_up, self._pool.close

    def begin(self, order: WitnessOrder, groups: Sequence[GroupTransfer]) -> None:
        """Copy an order's chunks out of the engine's blocks and compare them in the background."""
        what = _Comparison(order.number, [])
        try:
            for number, keys in order.parts:
                for key in keys:
                    buffer = groups[number].save_buffers.take()
                    if buffer is None:
                        what.give_back()
                        self.tell(order.number, "all buffers are in use")
                        return
                    what.chunks.append((groups[number], key, buffer))
                    groups[number].gather([buffer], [key], [order.block_ids])
            self._pool.submit(self._compare, what)
        except Exception as problem:  # an error costs a comparison, never a request
            log.exception("a chunk could not be copied to be compared")
            what.give_back()
            self.tell(order.number, f"{problem}")

    def tell(self, number: int, why: str, found: Sequence[ComparisonResult] = ()) -> None:
        """Give an order's verdict: what was found, or why nothing was."""
        with self._reporter.writing() as report:
            report.verdicts.append(Verdict(number, tuple(found), "" if found else why))

    def _is_late(self, job: Job[_Comparison]) -> None:
        if not job.started:
            job.what.give_back()
        self.tell(job.what.number, "the storage does not answer")

    def _compare(self, job: Job[_Comparison]) -> None:
        found, why = list[ComparisonResult](), "there was no whole chunk to compare"
        try:
            for at, (group, key, _) in enumerate(job.what.chunks):
                result = ShardFiles(group.store, group.shard).agreement(
                    *(key, partial(job.what.computed, at), group.group.layers),
                    quantised=self._quantised,
                )
                job.progress()
                if isinstance(result, str):
                    why = f"chunk {key.name[:12]}: its file is {result}"
                else:
                    found.append(result)
        except Exception:  # no error of a read may cost a request
            log.exception("a chunk could not be compared")
            found, why = [], "an error, see the log"
        finally:
            job.what.give_back()
            if job.settle():
                self.tell(job.what.number, why, found)


log = logger("worker")

_POLL_S: Final = 0.0005
"""How often a load that has read checks whether the engine has finished with its blocks."""
_IO_SHARE: Final = 0.9
"""Share of the time for the end for loads and saves; the rest is for eviction under way."""
_IDLE_WAIT_S: Final = 0.005
"""How long a step without a forward pass waits for a load to end, see take_received()."""


class WorkerSide:
    """One rank's transfers. The hooks are called from the worker's thread only."""

    def __init__(
        self,
        model: Model,
        config: ConnectorConfig,
        rank: Rank,
        memory: EngineState | None = None,
        identification: Identification | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Move the rectangles that ``rank`` holds.

        The namespace is opened now if it is known, else in the background as soon as the
        scheduler's half names it, or the search ends. Until it is open, loads end without a token.
        Chunks to save are copied, as far as there are buffers, and written once it is open for the
        first time; the rest must be ordered again.

        Args:
            model: the engine's KV cache.
            config: the connector's settings.
            rank: which worker this is.
            memory: this worker's weights and adapters; None: constant weights, no adapters.
            identification: the search for the weights, where this process makes one: an engine
                without a request takes no step that names the namespace.
            clock: returns seconds.
        """
        self._model, self._config, self._clock = model, config, clock
        self._begun = model.identity.epoch
        self._identity: Identity | None = None
        self.stats = Recorder()
        self._place, self._rank = rank, rank.pp * len(model.groups[0].shards[0]) + rank.tp
        native.crew.share(sum(map(len, model.groups[0].shards)))  # of this machine, at most
        self.groups = [
            GroupTransfer(number, model, rank, config, self.stats)
            for number in range(len(model.groups))
        ]
        self._holds = not model.identified
        """Whether chunks are copied before it is known where they are stored."""
        self._opening = Opening(model, config, then=self._has_opened, clock=clock)
        if (opened := self._opening.take()) is not None:
            self._use(opened)
        self._loads = Pool[LoadOrder](
            *(config.worker.load_threads, "vua-load"),
            timeout_s=config.timeouts.io_s,
            breaker=Breaker("loads", logger("storage"), clock=clock),
            late=self._is_late,
            clock=clock,
        )
        self._memory = EngineState() if memory is None else memory
        self._left: str | None = None
        """The epoch whose weights this engine no longer has; None: that of the orders."""
        self._asked = self._answered = 0
        """Which doubt about the weights is being checked, and which is settled."""
        self._wanted: list[Any] = []
        self._writer = ""
        self._reporter = Reporter()
        self.saves = WriteQueue(
            *(config, self._rank, self.stats, self._memory, self._reporter), clock=clock
        )
        self._comparisons = Comparisons(config, self._reporter, quantised=model.quantised)
        self._lock = threading.Condition()
        self._after: Fence | None = None
        self._running = 0
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._registered = False
        self.gds: Gds | None = None
        self._identification = identification
        if identification is not None:
            identification.answer.add_done_callback(self._identified)

    def _identified(self, answer: Future[Weights]) -> None:
        if answer.exception() is not None:  # the scheduler's half says why
            self._holds = False
        elif self._holds and self._opening.identity is None:
            self._opening.begin(self._model.with_weights(answer.result().fingerprint).identity)

    def _has_opened(self, opened: OpenedNamespace) -> None:
        """Have what was copied before written, on the thread that has opened its namespace."""
        if self._holds:
            self._holds = False
            same = opened.model.identity.epoch == self._model.identity.epoch
            stores = zip(opened.namespace.stores, self.groups, strict=True)
            self.saves.release([ShardFiles(store, group.shard) for store, group in stores] * same)

    def _follow(self, identity: Identity | None) -> bool:
        """Open the stores of an identity in the background; whether they are open. Never waits.

        None: the same as before.
        """
        if identity is not None and identity != self._opening.identity:
            self._opening.begin(identity)
        wanted = self._opening.identity
        if wanted is None or wanted == self._identity:
            return wanted is not None
        opened = self._opening.take()
        if opened is not None:
            self._use(opened)
            with self._reporter.writing() as report:
                report.opened[wanted.namespace] = 1
        return opened is not None

    def _use(self, opened: OpenedNamespace) -> None:
        namespace = opened.namespace
        if any(group.has_replicas for group in self.groups):
            namespace.share_reads()
        for group, store in zip(self.groups, namespace.stores, strict=True):
            group.reopen(store)
        self._identity = opened.model.identity

    def _is_current(self, orders: ConnectorMetadata) -> bool:
        """Whether this step's results and reads belong to the epoch that its orders name.

        A new epoch takes the weights that are in memory at its first orders. False while doubtful
        weights are being compared.
        """
        if orders.epoch not in (self._begun, None):
            self._memory.rebase()
            self._begun, self._left = orders.epoch, None
            self._asked = self._answered = orders.doubt
        elif orders.doubt > self._asked:
            self._asked = orders.doubt
            self._memory.doubt()
        self._see_weights()  # may begin a comparison
        comparing = self._memory.comparing  # asked first: its result is available when it has ended
        self._see_weights()
        return self._left is None and not comparing

    def _see_weights(self) -> None:
        if self._left is None and (change := self._memory.weights_changed()) is not None:
            self._left = self._begun
            log.warning(
                "VUA: the weights have changed (%s): nothing that was stored is used from now on, "
                "what is stored is of an epoch of its own",
                change,
            )

    def _take_sure(self) -> dict[int, int]:
        if self._asked == self._answered or self._memory.comparing:
            return {}
        self._see_weights()
        if self._left is not None:
            return {}
        self._answered = self._asked
        return {self._asked: 1}

    def register(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        layer_of: Mapping[str, int],
        tables: Tables,
        layouts: PageLayouts,
    ) -> None:
        """Take over the engine's cache tensors.

        Args:
            kv_caches: the engine's tensor of each layer.
            layer_of: the number of each in the model.
            tables: the engine's cache group of each.
            layouts: the layout of blocks in them.

        Raises UncachedError when their form is unknown or a trial fails, and ConfigError when
        GPUDirect Storage is required and does not work.
        """
        if self._memory.unknown is not None:
            raise UncachedError(self._memory.unknown)
        if lies_on_device(kv_caches):
            groups = [
                DeviceGroupTransfer(at, self._model, self._place, self._config, self.stats)
                for at in range(len(self.groups))
            ]
            for side, before in zip(groups, self.groups, strict=True):
                side.writer = before.writer
                if self._identity is not None:
                    side.reopen(before.store)
            self.groups = [*groups]
            self.gds = open_gds(self._config, next(iter(kv_caches.values())).device)
        elif self._config.gds_mode == "required":
            raise ConfigError('gds_mode is "required", but the KV cache lies in CPU memory')
        for group in self.groups:
            group.register(kv_caches, layer_of, tables, layouts)
            group.gds = self.gds
            if not self._model.trusts_itself:
                group.try_blocks()
        self._registered = True

    def shutdown(self) -> None:
        """Finish what was ordered: all loads, and the saves that are waiting.

        Ends within ``timeouts.drain_s``, and logs how many chunks were not stored.
        """
        drain_s = self._config.timeouts.drain_s
        stop_s = time.monotonic() + drain_s

        def left_s(share: float = 1.0) -> float:
            return max(0.0, stop_s - time.monotonic() - (1 - share) * drain_s)

        if self._holds and self._identification is not None and self.saves.pending:
            self._opening.wait(left_s(_IO_SHARE))
        self._opening.close()
        self._loads.close(timeout_s=left_s(_IO_SHARE))  # saves continue meanwhile
        self._comparisons.close(timeout_s=left_s(_IO_SHARE))
        if chunks := self.saves.close(left_s(_IO_SHARE)):
            log.warning(
                "VUA: the engine ends, and %s not stored: %s within %g s (timeouts.drain_s)",
                counted(chunks, "chunk", "is", "are"),
                "the storage did not take them" if self._opening.identity else "they had no name",
                drain_s,
            )
        for group in self.groups:
            group.close()
        if self.gds is not None:
            self.gds.close()
        if self._identity is not None:  # one capacity for all
            close_within(self.groups[0].store.close, left_s())
        self._memory.close()
        self._memory = EngineState()  # the model may go

    # -- loads --------------------------------------------------------------------------------

    def mark_loads(self, orders: ConnectorMetadata) -> None:
        """Make this step's loads wait for what the engine has ordered from its device so far.

        To be called before the step's forward pass, which uses none of their blocks; if
        :meth:`start_loads` is called after it, the loads would otherwise wait for it.
        """
        self._after = self.groups[0].mark() if orders.loads else None

    def start_loads(self, orders: ConnectorMetadata) -> None:
        """Begin this step's loads; returns before they have ended.

        The engine waits for each: in any case, its end is reported.
        """
        self._wanted = orders.adapters
        current = self._is_current(orders)
        is_open = self._follow(orders.identity)
        if not orders.loads:
            return
        self._memory.adapters.record()
        with self._lock:
            self._running += len(orders.loads)
            self.stats.set("vua_pending_loads", self._running, str(self._rank))
        after, self._after = self._after or self.groups[0].mark(), None  # all on one device
        for order in orders.loads:
            try:
                if not is_open:
                    self._report(order, order.parts[0].start, "unable")
                elif not (current and self._memory.adapters.holds(order.adapter)):
                    self._report(order, order.parts[0].start, "reset")
                elif self._loads.breaker.allows():
                    self._loads.submit(partial(self._load, after=after), order)
                else:
                    self._report(order, order.parts[0].start, "paused")
            except Exception:  # the engine waits for this load: it ends, whatever breaks
                log.exception("load of request %s could not begin", order.request_id)
                self._report(order, order.parts[0].start, "error")

    def _load(self, job: Job[LoadOrder], *, after: Fence) -> None:
        order, identity, began = job.what, self._opening.identity, self._clock()
        waited_s = 0.0

        def ready() -> None:
            nonlocal waited_s
            since = self._clock()
            while job.wanted and not after.passed():
                job.progress()  # a long step of the engine is not a hang of the storage
                time.sleep(_POLL_S)
            waited_s += self._clock() - since

        proven, asked = self._memory.proof(), self._asked
        short: int | None = order.parts[0].start
        reason: str | None = "error"
        try:
            for part in order.parts:
                reached, reason = self.groups[part.group].load(part, job, ready)
                short = reached if reached < part.stop else None
                if short is not None:
                    break
            same = identity == self._opening.identity and self._left is None and proven()
            same = same and self._asked == asked  # no doubt came meanwhile
            if not (same and self._memory.adapters.holds(order.adapter)):
                short, reason = order.parts[0].start, "reset"
        except Exception:  # no error of a read may cost a request
            log.exception("load of request %s failed", order.request_id)
        finally:
            if job.settle(well=reason != "error"):
                complete = reason is None and short is None
                seconds = self._clock() - began - waited_s if complete else None
                self._report(order, short, reason, seconds)

    def _is_late(self, job: Job[LoadOrder]) -> None:
        order = job.what
        for group in self.groups:
            group.fence()  # what it has queued; from now on it queues nothing
        log.warning("load of request %s hangs and is given up", order.request_id)
        seconds = self._config.timeouts.io_s if job.started else None  # at least
        self._report(order, order.parts[0].start, "timeout", seconds)

    def _report(
        self, order: LoadOrder, short: int | None, reason: str | None, seconds: float | None = None
    ) -> None:
        """Report in the next step that a load has ended: at token ``short``, for ``reason``."""
        if reason is not None:
            self.stats.add("vua_load_stops_total", label=reason)
        if seconds is not None:  # before its end: that is taken first
            with self._reporter.writing() as report:
                report.load_s[order.request_id] = seconds
        with self._lock:
            if short is not None and self._model.plain:
                (part,), (table,), block = order.parts, order.block_ids, self._model.align
                self._failed_blocks.update(table[short // block : -(-part.stop // block)])
            elif short is not None:  # tokens before a gap are useless: windows there are nowhere
                self._failed.add(order.request_id)
            self._received.add(order.request_id)
            self._running -= 1
            self.stats.set("vua_pending_loads", self._running, str(self._rank))
            self._lock.notify()

    def take_received(self, *, idle: bool) -> set[str]:
        """Return the requests whose loads have ended, successfully or not, each once.

        ``idle``: this step computes nothing. While all requests wait for loads an engine spins in
        such steps, holding the GIL; a short wait lets the loads run.
        """
        self._loads.give_up()
        with self._lock:
            if idle and self._running and not self._received:
                self._lock.wait(_IDLE_WAIT_S)
            received, self._received = self._received, set()
        return received

    def take_notes(self) -> WorkerOutput | None:
        """Return the report of this step for the scheduler's half; None if it is empty."""
        wanted, self._wanted = self._wanted, []
        adapters = self._memory.adapters.news(wanted)
        self._comparisons.give_up()
        if self._identity is not None and self._identity == self._opening.identity:
            self.saves.ask_again(self.groups)
        sure, refused, report = self._take_sure(), self._take_refused(), self._reporter.take()
        if not (adapters or sure or refused) and self._left is None:
            return report
        report = report or WorkerOutput()
        report.adapters, report.sure, report.refused = adapters, sure, refused
        report.left_epoch = self._left
        return report

    def _take_refused(self) -> dict[bytes, bytes]:
        refused: dict[bytes, bytes] = {}
        for group in self.groups if self._identity is not None else ():
            while group.store.refused:
                prefix_hash, writer = group.store.refused.popitem()
                refused[prefix_hash] = writer
        return refused

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks that were not filled, each once."""
        with self._lock:
            failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed(self) -> set[str]:
        """Return the requests whose loads failed as a whole, each once."""
        with self._lock:
            failed, self._failed = self._failed, set()
        return failed

    # -- saves --------------------------------------------------------------------------------

    def copy_out(self, orders: ConnectorMetadata, *, computed: bool = True) -> None:
        """Copy this step's complete chunks, and those to compare, out of the cache.

        They are written by :meth:`WriteQueue.hand_over` of :attr:`saves`, to be called next.
        Nothing is copied where the step was not ``computed`` to its end.
        """
        self.saves.give_up()
        current = self._is_current(orders) and computed
        if orders.writer != self._writer:  # before what opens the first store
            self._writer = orders.writer
            for group in self.groups:
                group.writer = orders.writer
        is_open = self._follow(orders.identity)
        for asked in orders.witnesses:
            if self._registered and current and is_open:
                self._comparisons.begin(asked, self.groups)
            else:
                self._comparisons.tell(asked.number, "the worker cannot read its blocks")
        if not orders.saves:
            return
        able = self._registered and current
        holds = self._holds and orders.epoch in (self._model.identity.epoch, None)
        if not able or not (is_open or holds):
            self.saves.refuse(orders.saves, self.groups, again=able)
            return
        self._memory.adapters.record()
        held = {id(one) for one in orders.saves if self._memory.adapters.holds(one.adapter)}
        gone = [one for one in orders.saves if id(one) not in held]  # an adapter was replaced
        self.saves.refuse(gone, self.groups, again=False)
        self.saves.copy_out([one for one in orders.saves if id(one) in held], self.groups)

    def take_stats(self) -> Series | None:
        record_requests(self.stats)
        return self.stats.take()
