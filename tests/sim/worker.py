"""A worker with the fake model: keeps block tables and calls the connector as vLLM's runner does.

The order of the hooks is that of `GPUModelRunner.execute_model` of vLLM 0.32 (model runner 1, which
the CPU worker uses): `handle_preemptions`, then vLLM's own `KVConnectorModelRunnerMixin`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from sim.truth import Cache, Chain, Oracle, Shape, first_read

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
