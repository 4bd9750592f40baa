"""An engine without a model: vLLM's scheduler, VUA's connector, the fake worker, one process.

`Engine.step` is what `EngineCore.step` and `step_with_batch_queue` of vLLM 0.32 do.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from sim.truth import Chain, Shape, layer_name
from sim.worker import Worker, Wrong
from small_models import make_model
from vua.vllm import CONNECTOR

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
