"""An engine without a model: vLLM's scheduler, VUA's connector, a worker with the fake model.

`Worker.execute` calls the hooks in the order of `GPUModelRunner.execute_model` of vLLM 0.32 (model
runner 1, which the CPU worker uses): `handle_preemptions`, then `KVConnectorModelRunnerMixin`.
`Engine.step` is what `EngineCore.step` and `step_with_batch_queue` of vLLM 0.32 do.
"""

from __future__ import annotations

import atexit
import random
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sim.truth import Cache, Chain, Oracle, Shape, first_read, layer_name
from small_models import make_model
from vua.vllm import CONNECTOR

NULL_BLOCK = 0
"""What vLLM puts into a table where a window needs nothing."""


class Wrong(AssertionError):  # noqa: N818 - what a test fails with
    """The simulation found something that must never happen."""


@dataclass
class Row:
    """One request, as far as a model runner knows it."""

    chain: Chain
    tables: list[list[int]]
    """Per cache group. Of blocks that vLLM has freed behind a window the numbers stay."""
    end: int = 0
    """The position after the last token that was sampled for it."""


@cache
def _wrapper() -> Any:
    """By what vLLM calls its workers; the connector looks for it among its callers."""
    from vllm.distributed import kv_transfer
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    class Wrapper(WorkerWrapperBase):
        def make_connector(self, vllm_config: Any, kv_cache_config: Any) -> None:
            kv_transfer.ensure_kv_transfer_initialized(vllm_config, kv_cache_config)

    return Wrapper


class Worker:
    """One rank. `execute` is a step of the engine."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, shape: Shape, seed: int) -> None:
        """Make the connector's worker half, then the KV cache, as `Worker` does."""
        from vllm.distributed import kv_transfer
        from vllm.model_executor.models.utils import extract_layer_index

        self._config = vllm_config
        model = torch.nn.Linear(8, 8)  # what the K/V are said to be of
        wrapper = _wrapper()()
        wrapper.worker = SimpleNamespace(model_runner=model, get_model=lambda: model)
        wrapper.make_connector(vllm_config, kv_cache_config)
        self.connector: Any = kv_transfer.get_kv_transfer_group()
        found = kv_cache_config.kv_cache_groups
        groups = [[extract_layer_index(name) for name in group.layer_names] for group in found]
        block_size = found[0].kv_cache_spec.block_size
        self.cache = Cache(shape, groups, kv_cache_config.num_blocks, block_size)
        self.connector.register_kv_caches(self.cache.layers)
        self._oracles = [Oracle(shape, layers, block_size) for layers in groups]
        self._windows = [shape.windows[layers[0]] for layers in groups]
        self._random = random.Random(seed)
        self._rows: dict[str, Row] = {}
        self._poisoned: set[int] = set()
        self._drafts = getattr(vllm_config.speculative_config, "num_speculative_tokens", 0) or 0
        self.counts: Counter[str] = Counter()
        self.drafts: Any = None

    def close(self) -> None:
        """End the connector's worker half; what waits to be saved is saved."""
        from vllm.distributed import kv_transfer

        kv_transfer.ensure_kv_transfer_shutdown()

    def execute(self, output: Any, chains: dict[str, Chain], free: Iterable[int]) -> Any:
        """Run one step; blocks that are ``free`` now hold nothing any more."""
        from vllm.forward_context import set_forward_context
        from vllm.v1.outputs import DraftTokenIds
        from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

        mixin = KVConnectorModelRunnerMixin
        self.connector.handle_preemptions(output.kv_connector_metadata)
        fresh = set(free) - self._poisoned
        self._poisoned = set(free)
        self.cache.poison([NULL_BLOCK, *fresh], self._random.randrange(256))
        self._update(output, chains)
        self.drafts = None
        if not output.total_num_scheduled_tokens:
            self.counts["empty steps"] += 1
            return mixin.kv_connector_no_forward(output, self._config)
        metadata = dict.fromkeys(self.cache.layers, self)
        deferred = self._drafts > 0
        with (
            set_forward_context(metadata, self._config),
            mixin.maybe_get_kv_connector_output(output, defer_finalize=deferred) as transferred,
        ):
            sampled = self._forward(output)
        if deferred:
            ids = list(output.num_scheduled_tokens)
            self.drafts = DraftTokenIds(ids, [self._propose(i, sampled[i]) for i in ids])
            mixin.finalize_kv_connector()
        return self._answer(sampled, transferred)

    def _update(self, output: Any, chains: dict[str, Chain]) -> None:
        for request_id in output.finished_req_ids:
            self._rows.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self._rows[new.req_id] = Row(chains[new.req_id], [list(t) for t in new.block_ids])
        cached = output.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            row, fresh = self._rows[request_id], cached.new_block_ids[at]
            if request_id in cached.resumed_req_ids:
                row.tables = [list(table) for table in fresh]
            elif fresh is not None:
                for table, more in zip(row.tables, fresh, strict=True):
                    table.extend(more)

    def _forward(self, output: Any) -> dict[str, list[int]]:
        """Write K/V, check all that attention would then read, sample.

        In this order, as in each layer: a request may share blocks that another one fills in the
        same step.
        """
        started = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        known = {new.req_id: len(new.prompt_token_ids) for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            started[request_id] = cached.num_computed_tokens[at]
            prompt = len(self._rows[request_id].chain.prompt)
            known[request_id] = prompt + cached.num_output_tokens[at]
        scheduled = output.num_scheduled_tokens
        for layer in self.cache.layers:
            self.connector.wait_for_layer_load(layer)
        sampled = {}
        for request_id, count in scheduled.items():
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            start, row = started[request_id], self._rows[request_id]
            stop = start + count - len(drafts)
            right = row.chain.tokens(stop, stop + len(drafts) + 1)
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == right[accepted]:
                accepted += 1
            for group, table in enumerate(row.tables):
                self.cache.write(group, table, start, row.chain.hashes(start, stop, drafts))
            sampled[request_id] = right[: accepted + 1] if stop >= known[request_id] else []
            row.end = stop + accepted + 1
            self.counts["computed tokens"] += count
            self.counts["rejected drafts"] += len(drafts) - accepted
        for request_id, count in scheduled.items():
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            self._check(request_id, started[request_id], count, drafts)
        for name, layer in self.cache.layers.items():
            self.connector.save_kv_layer(name, layer, self)
        return sampled

    def _check(self, request_id: str, start: int, count: int, drafts: Sequence[int]) -> None:
        """Compare every slot that attention reads for tokens ``start`` and following."""
        row = self._rows[request_id]
        hashes = row.chain.hashes(0, start + count - len(drafts), drafts)
        for group, table in enumerate(row.tables):
            first = first_read(start, self._windows[group])
            index = self._oracles[group].wrong_block(self.cache, table, hashes, first)
            if index is not None:
                message = f"{request_id}: block {index} of {start} + {count} tokens"
                raise Wrong(f"{message} holds a wrong value (group {group}, its table: {table})")
            self.counts["checked tokens"] += len(hashes) - first

    def _propose(self, request_id: str, sampled: Sequence[int]) -> list[int]:
        if not sampled:
            return []
        row = self._rows[request_id]
        drafts = row.chain.tokens(row.end, row.end + self._drafts)
        if self._random.random() < 0.5:
            drafts[self._random.randrange(len(drafts))] += 1
        return drafts

    @staticmethod
    def _answer(sampled: dict[str, list[int]], transferred: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={request_id: at for at, request_id in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=transferred,
        )


MAX_MODEL_LEN = 1024
LAYOUT = "LBHNC"  # what the CPU workers ask for
LOADS_PER_TURN = 6
"""A request that is promised more loads than this without ever computing runs in circles."""


@dataclass(frozen=True)
class Settings:
    root: Path
    shape: Shape
    block_size: int = 32
    blocks: int = 64
    max_num_batched_tokens: int = 256
    max_num_seqs: int = 6
    prefix_caching: bool = False
    asynchronous: bool = False
    """Whether the next step is scheduled before the last one's output is known."""
    drafts: int = 0
    role: str = "kv_both"
    extra: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


@cache
def scratch() -> Path:
    place = Path(tempfile.mkdtemp(prefix="vua-sim-model-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place


@cache
def model(layers: int, heads: int, dim: int) -> Path:
    """A checkpoint whose KV cache has the fake model's size; only its identity is used."""
    place = scratch() / f"llama-{layers}-{heads}-{dim}"
    return make_model(place, layers=layers, kv_heads=heads, head_dim=dim, dtype="bfloat16")


def join_world(config: Any) -> None:
    """Be the only rank of a distributed group, as every vLLM worker is at least."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import model_parallel_is_initialized

    if not model_parallel_is_initialized():
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{scratch() / 'world'}", 0, "gloo")
            initialize_model_parallel()


def leave_world() -> None:
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()


def vllm_config(settings: Settings) -> Any:
    """The configuration that vLLM makes of its command line."""
    from vllm.engine.arg_utils import EngineArgs

    shape, drafts = settings.shape, {"num_speculative_tokens": settings.drafts}
    drafts |= {"method": "ngram", "prompt_lookup_max": 3}
    extra = {"shared_storage_path": str(settings.root), "strict": True}
    extra |= {"load_policy": "always", "witness_every": 0}  # here computing takes no time at all
    extra |= settings.extra
    config = EngineArgs(
        model=str(model(len(shape.windows), shape.heads, shape.dim)),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        block_size=settings.block_size,
        enable_prefix_caching=settings.prefix_caching,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        speculative_config=drafts if settings.drafts else None,
        kv_transfer_config={
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": "vua.vllm.kv_connector_v1",
            "kv_role": settings.role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        },
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = settings.blocks
    config.cache_config.kv_cache_layout = LAYOUT
    config.scheduler_config.async_scheduling = settings.asynchronous  # CPU workers refuse it
    return config


def kv_cache_config(settings: Settings, config: Any) -> Any:
    """The layers in groups, as vLLM forms them."""
    import torch
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    shape, specs = settings.shape, {}
    same = {"block_size": settings.block_size, "dtype": torch.bfloat16}
    same |= {"num_kv_heads": shape.heads, "head_size": shape.dim}
    for number, window in enumerate(shape.windows):
        spec = MLAAttentionSpec(**same) if shape.latent else FullAttentionSpec(**same)
        specs[layer_name(number)] = (
            SlidingWindowSpec(sliding_window=window, **same) if window > 0 else spec
        )
    groups = get_kv_cache_groups(config, specs)
    return KVCacheConfig(
        num_blocks=settings.blocks * len(groups),
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        kv_cache_layout=LAYOUT,
        hash_block_size=settings.block_size,
        cache_hit_alignment_tokens=settings.block_size,
    )


@dataclass
class Load:
    tokens: int
    blocks: list[int]
    """The blocks that it fills, where vLLM recomputes single blocks; else none."""
    failed: set[int] = field(default_factory=set)


class Engine:
    def __init__(self, settings: Settings) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        config = vllm_config(settings)
        caches = kv_cache_config(settings, config)
        join_world(config)
        self.worker = Worker(config, caches, settings.shape, settings.seed)
        self.scheduler: Any = (AsyncScheduler if settings.asynchronous else Scheduler)(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=settings.block_size,
            hash_block_size=settings.block_size,
        )
        found = self.worker.connector.get_handshake_metadata()
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): found})
        hash_function = get_hash_fn_by_name("sha256_cbor")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(settings.block_size, hash_function)
        self._queue: deque[tuple[Any, Any]] = deque()
        self._in_flight = 2 if settings.asynchronous else 1
        self.chains: dict[str, Chain] = {}
        self.answers: dict[str, list[int]] = {}
        self.wanted: dict[str, int] = {}
        self._block_size = settings.block_size
        self.loading: dict[str, Load] = {}
        """The running load of each request that has one."""
        self.loaded: dict[str, int] = {}
        """Of each request: how many tokens its last load has brought, of those it attends to."""
        self._failed: set[str] = set()
        self._disappointed: set[str] = set()
        """Requests of which a load has failed: they are computed, none is loaded again."""
        self._plain = not any(settings.shape.windows)
        self._turns: Counter[str] = Counter()
        self.counts = self.worker.counts

    def add(self, request_id: str, chain: Chain, max_tokens: int) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self.chains[request_id] = chain
        self.answers[request_id], self.wanted[request_id] = [], max_tokens
        self.scheduler.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=list(chain.prompt),
                sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                pooling_params=None,
                cache_salt=chain.salt,
                block_hasher=self._hasher,
            )
        )

    def abort(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self.counts["aborted loads"] += request_id in self.loading
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.wanted.pop(request_id, None)

    @property
    def unfinished(self) -> list[str]:
        return [i for i, wanted in self.wanted.items() if len(self.answers[i]) < wanted]

    @property
    def busy(self) -> bool:
        return bool(self._queue) or self.scheduler.has_requests()

    def step(self) -> None:
        self.counts["steps"] += 1
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._watch_loads(output)
            result = self.worker.execute(output, self.chains, self._free_blocks())
            self._queue.append((output, result))
            self.counts["preemptions"] += len(output.preempted_req_ids or ())
            if len(self._queue) < self._in_flight:
                return
        if not self._queue:
            return
        output, result = self._queue.popleft()
        self._watch_received(result.kv_connector_output)
        for answers in self.scheduler.update_from_output(output, result).values():
            for answer in answers.outputs:
                self.answers[answer.request_id] += answer.new_token_ids
        if self.worker.drafts is not None and self._in_flight == 1:
            self.scheduler.update_draft_token_ids(self.worker.drafts)

    def _free_blocks(self) -> list[int]:
        """Blocks that belong to nobody, and that vLLM's prefix cache does not offer either."""
        pool = self.scheduler.kv_cache_manager.block_pool.blocks
        return [b.block_id for b in pool if b.ref_cnt == 0 and b.block_hash is None]

    def _watch_loads(self, output: Any) -> None:
        for request_id in output.num_scheduled_tokens:
            self._turns.pop(request_id, None)
            if request_id in self.loading:
                raise Wrong(f"{request_id} is computed while its load is running")
        for order in output.kv_connector_metadata.loads:
            if order.request_id in self.loading:
                raise Wrong(f"{order.request_id}: a second load was ordered beside the first")
            if order.request_id in self._disappointed:
                raise Wrong(f"{order.request_id} is loaded again after a load of it has failed")
            self.loading[order.request_id] = self._load(order)
            self._turns[order.request_id] += 1
            self.counts["loads"] += 1
            if self._turns[order.request_id] > LOADS_PER_TURN:
                raise Wrong(f"{order.request_id} is loaded again and again and never computed")

    def _load(self, order: Any) -> Load:
        first = min(part.start for part in order.parts)
        stop = self.scheduler.requests[order.request_id].num_computed_tokens
        if {part.stop for part in order.parts} != {stop}:
            raise Wrong(f"{order.request_id}: {stop} tokens were promised and ordered: {order}")
        if not self._plain:
            return Load(stop, [])
        (table,) = order.block_ids
        return Load(stop - first, table[first // self._block_size : -(-stop // self._block_size)])

    def _watch_received(self, transferred: Any) -> None:
        if transferred is None:
            return
        failed = transferred.invalid_block_ids or set()
        self.counts["failed blocks"] += len(failed)
        whole = transferred.failed_recving or set()
        self.counts["failed as a whole"] += len(whole)
        self._failed |= whole
        for load in self.loading.values():
            load.failed |= failed.intersection(load.blocks)
        for request_id in transferred.finished_recving or ():
            load = self.loading.pop(request_id, None)
            if load is None:
                raise Wrong(f"{request_id} is reported as received and was not loading")
            lost = len(load.failed) * self._block_size
            loaded = 0 if request_id in self._failed else load.tokens - lost
            if lost or request_id in self._failed:
                self._disappointed.add(request_id)
            self._failed.discard(request_id)
            self.loaded[request_id] = loaded
            self.counts["loaded tokens"] += loaded

    def reset_prefix_cache(self, *, running: bool) -> None:
        """Forget vLLM's own prefix cache, with ``running`` by preempting all requests."""
        self.counts["resets"] += 1
        held = self.scheduler.kv_holding_waiting or self.loading or self._in_flight > 1
        # vLLM refuses to preempt everything while anything else holds blocks
        self.scheduler.reset_prefix_cache(reset_running_requests=running and not held)

    def check_empty(self) -> None:
        """Nothing is left of any request: no block, no queue entry, no load."""
        scheduler, manager = self.scheduler, self.scheduler.kv_cache_manager
        left = {
            "requests": list(scheduler.requests),
            "running": scheduler.running,
            "waiting": list(scheduler.waiting) + list(scheduler.kv_holding_waiting),
            "received": scheduler.finished_recving_kv_req_ids,
            "failed": scheduler.failed_recving_kv_req_ids,
            "deferred frees": list(scheduler.deferred_frees),
            "loading": self.loading,
            "tables": [m.req_to_blocks for m in manager.coordinator.single_type_managers],
            "blocks": [b for b in manager.block_pool.blocks if b.ref_cnt and not b.is_null],
        }
        left["tables"] = [table for table in left["tables"] if table]
        left = {name: what for name, what in left.items() if what}
        if left:
            raise Wrong(f"left behind after the last request: {left}")

    def check_answers(self) -> None:
        """Every request that was not aborted got its tokens, the right ones, each once."""
        for request_id, wanted in self.wanted.items():
            chain, answer = self.chains[request_id], self.answers[request_id]
            expected = chain.tokens(len(chain.prompt), len(chain.prompt) + wanted)
            if answer != expected:
                raise Wrong(f"{request_id}: expected the tokens {expected}, found {answer}")

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.close()
