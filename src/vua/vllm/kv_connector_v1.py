"""vLLM's KV connector: ``VUAStorageConnector_V1``, and its metrics.

vLLM creates one instance in the scheduler's process and one in each worker; both are this class,
which only forwards each hook to the responsible half (`scheduler`, `worker`). A cache may cost
hits, never a request: an error inside a hook is logged and treated as "nothing cached"; a failed
load is reported so that vLLM recomputes its tokens (``kv_load_failure_policy="recompute"``).

Metrics: once per step vLLM takes the new ones as :class:`VUAStats`, adds up those of all ranks and
of the scheduler's half, sends them to the front end (pickled between workers, msgpack to the API
server) and passes them to :class:`VUAPromMetrics`. vLLM takes stats only in steps: work that ends
while the engine is idle appears after the next step.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from vua.connector.cache_spec import Model, UncachedError
from vua.connector.config import ConnectorConfig
from vua.connector.group_transfer import Rank
from vua.connector.log import logger
from vua.connector.metadata import (
    ConnectorMetadata,
    ScheduledRequest,
    ScheduledStep,
    Tables,
    WorkerOutput,
)
from vua.connector.metrics import Families, Series, add_up, summary
from vua.connector.scheduler import SchedulerSide
from vua.connector.setup import code_of, joined
from vua.connector.worker import WorkerSide
from vua.errors import ConfigError, VUAError
from vua.io import forks
from vua.security.keyring import check_keys
from vua.store.place import locate
from vua.vllm import cache_spec
from vua.vllm.cache_spec import describe, layer_number
from vua.vllm.engine_identity import ENGINE, find_weights, setup_of
from vua.vllm.engine_worker import memory_of
from vua.vllm.support import (
    announce,
    check_starts,
    check_version,
)
from vua.weights import Identification


@dataclass
class VUAStats(KVConnectorStats):
    """Metrics since the last time: ``data`` is a `vua.connector.metrics.Series`."""

    def reset(self) -> None:
        self.data: Series = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> VUAStats:
        """Add the content of ``other``, which stays unchanged, to this one; return this one."""
        add_up(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return summary(self.data)


class VUAPromMetrics(KVConnectorPromMetrics):
    """Exposes and updates `vua.connector.metrics.METRICS`. One per front-end process."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._families = Families(labelnames, [*per_engine_labelvalues.values()], metric_types)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._families.add(transfer_stats_data, self.per_engine_labelvalues[engine_idx])


def step_of(output: Any) -> ScheduledStep:
    """Return what a step computes, from vLLM's ``SchedulerOutput``."""
    tokens, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    requests = [
        ScheduledRequest(
            new.req_id, new.num_computed_tokens, tokens[new.req_id], new.block_ids, begins=True
        )
        for new in output.scheduled_new_reqs
    ]
    requests += [
        ScheduledRequest(
            name,
            cached.num_computed_tokens[at],
            tokens[name],
            cached.new_block_ids[at] or (),
            begins=name in cached.resumed_req_ids,
        )
        for at, name in enumerate(cached.req_ids)
    ]

    def tables(name: str) -> Tables:
        return output.kv_connector_block_state.get_block_ids(name)

    return ScheduledStep(requests, tables)


log = logger()
_UNCACHED: Final = "this engine is served without a stored KV cache"

# What the two halves exchange must have the types that vLLM expects.
KVConnectorMetadata.register(ConnectorMetadata)
KVConnectorWorkerMetadata.register(WorkerOutput)


@dataclass(frozen=True)
class RunningCode(KVConnectorHandshakeMetadata):
    """What the scheduler's half learns of each worker before the first request."""

    digest: str


class VUAStorageConnector_V1(KVConnectorBase_V1, SupportsHMA):  # noqa: N801
    """Stores prompts' KV caches in a directory and loads those that any process stored there."""

    _copied = False

    def __init__(
        self,
        vllm_config: Any,
        role: KVConnectorRole,
        kv_cache_config: Any = None,
    ) -> None:
        """Read the settings and begin to identify the engine's weights.

        Does not wait for the identification (a second at most): the namespace is opened when it
        ends.

        Raises ConfigError for unusable settings, an unusable path, an unknown version of vLLM, or a
        model that vLLM does not start with a connector, so that a mistake appears at start-up. An
        engine whose KV cache cannot be stored correctly is served uncached, and so is one for which
        anything else fails: no other error ends a start.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._config = ConnectorConfig.from_extra_config(transfer.kv_connector_extra_config)
        check_version()
        check_starts(vllm_config)
        locate(self._config.shared_storage_path, security=self._config.security)
        check_keys(self._config.security)
        self.scheduler: SchedulerSide | None = None
        self.worker: WorkerSide | None = None
        self._unused: SchedulerSide | None = None
        """The scheduler's half of an engine of which a worker is unable."""
        self._unable = False
        """Whether the scheduler's half is still to be told that this worker does nothing."""
        forks.watch(self)
        self._ahead: Identification | None = None
        """In the first worker: begins before the scheduler's half does, see `_make_worker`."""
        self._failures: set[str] = set()
        self._lost: set[str] = set()
        """Requests whose loads this worker could not begin: the engine waits for them."""
        self._model: Any = None
        self._idle = False
        self._handled = id(None)
        """The id of the exception that the caller of the engine handles when a step begins."""
        try:
            model = describe(vllm_config, kv_cache_config, self._config)
            if role == KVConnectorRole.SCHEDULER:
                announce(transfer)
                self.scheduler = SchedulerSide(
                    *(model, self._config),
                    loads=transfer.is_kv_consumer,
                    saves=transfer.is_kv_producer,
                    identification=Identification(partial(find_weights, vllm_config)),
                )
            else:
                self.worker = self._make_worker(vllm_config, model)
        except Exception as problem:  # noqa: BLE001 - whatever breaks, the engine starts
            self._unable = True
            self._go_without(_UNCACHED, problem)

    def _go_without(self, what: str, problem: Exception) -> None:
        """Say in one line what does not work, and why; raise ``problem`` again if it is strict."""
        known = isinstance(problem, UncachedError | VUAError)
        if self._config.strict and not known:
            raise problem
        text = [f"{problem}"] if known else traceback.format_exception_only(problem)
        level = logging.WARNING if known else logging.ERROR
        log.log(level, "VUA: %s: %s", what, " ".join("".join(text).split()))
        log.debug("VUA: %s", what, exc_info=problem)

    def after_fork(self) -> None:
        """Do nothing in a copy of this process, whose threads are missing; see `vua.io.forks`."""
        if self.scheduler is not None or self.worker is not None:
            self._left = (self.scheduler, self.worker)  # the parent's, must not be closed here
            self.scheduler = self.worker = None
            if not VUAStorageConnector_V1._copied:  # its two halves may be in one process
                VUAStorageConnector_V1._copied = True
                log.warning("VUA: a forked copy of an engine's process neither loads nor stores")

    def _make_worker(self, vllm_config: Any, model: Model) -> WorkerSide:
        from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

        rank = Rank(get_pp_group().rank_in_group, get_tensor_model_parallel_rank())
        if not any(rank):
            # The scheduler's half, which asks for the weights, is made only after the engine has
            # warmed up. What is read until then is remembered, and not read again.
            self._ahead = Identification(partial(find_weights, vllm_config))
        memory = memory_of(vllm_config)
        self._model = memory.model
        return WorkerSide(model, self._config, rank, memory, self._ahead)

    @contextmanager
    def _guarded(self) -> Generator[None]:
        """Continue if a hook's work raises: an unexpected error costs hits, not the engine."""
        try:
            yield
        except Exception as problem:  # whatever breaks, requests are served
            if self._config.strict:
                raise
            cause = f"{type(problem).__name__}: {problem}"
            if cause not in self._failures:
                self._failures.add(cause)
                log.exception("VUA: an error in the connector; this step continues without it")

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a cache may drop a save, so a preempted request need not be recomputed for it."""
        return False

    # -- metrics ------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> VUAStats | None:
        side = self.scheduler or self.worker
        with self._guarded():
            data = None if side is None else side.take_stats()
            return None if data is None else VUAStats(data=data)
        return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> VUAStats | None:
        return VUAStats(data={} if data is None else data)

    @classmethod
    def build_prom_metrics(cls, *given: Any, **named: Any) -> VUAPromMetrics:
        return VUAPromMetrics(*given, **named)

    def shutdown(self) -> None:
        for side in (self.scheduler, self.worker, self._unused):
            if side is not None:
                side.shutdown()
        if self._ahead is not None:
            self._ahead.close()

    # -- scheduler's process ------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens beyond the local hit can be loaded; None: ask again."""
        side = self.scheduler
        with self._guarded():
            if side is not None:
                return side.matched_tokens(request, num_computed_tokens)
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        side = self.scheduler
        if side is not None:
            with self._guarded():
                side.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        side = self.scheduler
        if side is None:
            return ConnectorMetadata()
        orders = ConnectorMetadata(identity=side.identity, writer=side.writer, epoch=side.epoch)
        orders.doubt = side.doubt
        with self._guarded():
            orders.loads = side.take_loads()
        with self._guarded():
            orders.adapters = side.adapters.take_wanted()
        with self._guarded():
            side.add_saves(orders, step_of(scheduler_output))
        return orders

    def update_connector_output(self, connector_output: Any) -> None:
        side = self.scheduler
        received = connector_output.finished_recving or set()
        failed = connector_output.failed_recving or set()
        blocks = connector_output.invalid_block_ids or set()
        notes = connector_output.kv_connector_worker_meta
        if side is not None and isinstance(notes, WorkerOutput):  # before the ends of these loads
            with self._guarded():
                side.learn(notes)
            if notes.unable:
                log.warning("VUA: %s: a worker loads and stores nothing", _UNCACHED)
                self.scheduler, self._unused = None, side
        if side is not None and (received or failed or blocks):  # not always in one step
            with self._guarded():
                side.received(received, failed, blocks)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; its blocks may be freed at once, saves have copied them."""
        side = self.scheduler
        if side is not None:
            with self._guarded():
                side.finished(request)
        return False, None

    def reset_cache(self) -> bool | None:
        """Use nothing stored before the workers have compared their weights. False: impossible."""
        side = self.scheduler
        if side is None:
            return None
        with self._guarded():
            side.reset()
            return True
        return False

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Learn which code each worker runs, and so the engine's setup."""
        codes = [one.digest for one in metadata.values() if isinstance(one, RunningCode)]
        if self.scheduler is not None and len(codes) == self.scheduler.model.workers:
            with self._guarded():
                self.scheduler.be_of(joined(setup_of(self._vllm_config), codes))

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        self.set_xfer_handshake_metadata(metadata)

    # -- worker processes ---------------------------------------------------------------------

    def get_handshake_metadata(self) -> RunningCode | None:
        """Return a digest of all code that this worker's model can reach; None: unknown."""
        model = None if self.worker is None else self._model
        with self._guarded():
            return None if model is None else RunningCode(code_of(model, ENGINE.aside).digest)
        return None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self.worker is None:
            return
        try:
            groups = self._kv_cache_config.kv_cache_groups
            tables = {name: n for n, group in enumerate(groups) for name in group.layer_names}
            own = cache_spec.own_caches(kv_caches, tables)
            layer_of = {name: layer_number(name) for name in own}
            self.worker.register(own, layer_of, tables, cache_spec)
        except ConfigError:
            raise  # GPUDirect Storage is required and does not work
        except Exception as problem:  # noqa: BLE001 - whatever breaks, requests are served
            self._go_without("this worker loads and stores nothing", problem)
            self._unable = True

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take a step's orders before its forward pass: its loads need not wait for it."""
        super().bind_connector_metadata(connector_metadata)
        self._handled = id(sys.exc_info()[1])
        side = self.worker
        if side is not None and isinstance(connector_metadata, ConnectorMetadata):
            with self._guarded():
                side.mark_loads(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        self._idle = isinstance(orders, ConnectorMetadata) and orders.idle
        if not isinstance(orders, ConnectorMetadata):
            return
        begun = False
        with self._guarded():
            if self.worker is not None:
                self.worker.start_loads(orders)
                begun = True
        if not begun:  # the scheduler's half has ordered them all the same
            self._lost |= {one.request_id for one in orders.loads}

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: no forward pass reads a block before its load is reported."""

    def save_kv_layer(self, *given: Any, **named: Any) -> None:
        """Do nothing: all layers are saved together in :meth:`wait_for_save`."""

    def wait_for_save(self) -> None:
        """Copy complete chunks out of the cache before their blocks can be overwritten.

        They are written while the engine continues.
        """
        side, orders = self.worker, self._get_connector_metadata()
        if side is None or not isinstance(orders, ConnectorMetadata):
            return
        # vLLM asks in a `finally`, so of a pass that failed, too: later layers hold old K and V
        computed = id(sys.exc_info()[1]) == self._handled
        with self._guarded():
            side.copy_out(orders, computed=computed)
        with self._guarded():
            side.saves.hand_over()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        lost, side = self._lost, self.worker
        if side is None:
            return None, lost
        with self._guarded():
            side.saves.forget(finished_req_ids)
        with self._guarded():
            return None, side.take_received(idle=self._idle) | lost
        return None, lost

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """As :meth:`get_finished`, with the requests whose loads failed completely."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self._lost
        self._lost = set()
        if self.worker is not None:
            with self._guarded():
                results.failed_recving |= self.worker.take_failed()
        return results

    def build_connector_worker_meta(self) -> WorkerOutput | None:
        """Return how long ended loads took, and what was learnt of files."""
        unable, self._unable = self._unable, False  # told once
        if unable:
            return WorkerOutput(unable=True)
        with self._guarded():
            return None if self.worker is None else self.worker.take_notes()
        return None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that a load did not fill; vLLM recomputes them."""
        with self._guarded():
            return set() if self.worker is None else self.worker.take_failed_blocks()
        return set()


VUA: Final = VUAStorageConnector_V1
"""Where vLLM has no plug-in of VUA's, which chooses, this is it."""
