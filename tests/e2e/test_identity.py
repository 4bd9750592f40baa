"""What one engine stored no other one loads that would have computed other K and V."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from e2e import trouble
from e2e.checkpoints import remade
from e2e.damage import CHUNK, chunk_files, stored
from e2e.harness import (
    PROMPT,
    RESET,
    RESET_ALL,
    SETTLE,
    Batch,
    Call,
    Change,
    EngineTest,
    Exchange,
    Phase,
    Served,
    llama,
    models,
    needs_vllm,
    run,
    tokens,
)
from e2e.kinds import ADAPTERS, strong_adapter

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]


class LoraTest(EngineTest):
    def setUp(self) -> None:
        super().setUp()
        self.paths = [str(strong_adapter(self.root.with_name(f"a{n}"), seed=n)) for n in (1, 2)]

    def ask(self, *adapters: str | None) -> Batch:
        """The same prompt with each of the adapters; None: without."""
        return Batch([PROMPT] * len(adapters), loras=adapters)

    def warm(self, *batches: Batch) -> Served:
        return self.serve(*batches, engine=ADAPTERS)

    def test_each_has_its_own(self) -> None:
        """Requests with either adapter share nothing; each finds its own again.

        Those without are not cached: vLLM's CPU build may apply the adapter in the last slot to
        them. A prompt with an adapter is computed beside them as it is alone.
        """
        one, two = self.paths
        in_turn = [self.ask(one), self.ask(two), self.ask(None)]
        expected = self.fill(*in_turn, engine=ADAPTERS)
        self.assertEqual(3, len(set(map(tuple, expected))))  # they do change the tokens
        self.assertEqual(20, len(stored(self.root)))

        for batches in (in_turn, [self.ask(one, two), self.ask(None)]):
            warm = self.warm(*batches)
            self.assertEqual([expected, [640, 640, 0]], [warm.tokens, warm.cached])
            self.assertEqual(2 * 640, warm.counts["tokens_loaded"])
        beside = self.warm(Batch([PROMPT, tokens(30, seed=4)], loras=[one, None]))
        self.assertEqual(expected[:1], beside.tokens[:1])
        self.assertEqual(20, len(stored(self.root)))

        plain = self.serve(Batch([PROMPT]))  # an engine that knows no adapters
        self.assertEqual([expected[2:], [0]], [plain.tokens, plain.cached])

    def test_loaded_anew_in_place(self) -> None:
        """Under its number and name: the first one's chunks and blocks are left."""
        one, two = self.paths
        engine = {**ADAPTERS, "enable_prefix_caching": True}
        old, new = (self.baseline(self.ask(path), engine=engine) for path in (one, two))
        longer = Batch([PROMPT + PROMPT[:200]], loras=[one])
        served = self.serve(
            *(self.ask(one), Exchange(Path(two), Path(one)), Change(trouble.add, Path(one))),
            *(longer, RESET, self.ask(one), RESET, self.ask(one)),
            engine=engine,
        )
        self.assertEqual(old, served.tokens[:1])
        self.assertEqual(new * 2, served.tokens[2:])
        self.assertEqual(0, served.cached[2])  # nothing of what began with the first one's blocks
        self.assertEqual(640, served.cached[3])


BATCH = Batch([PROMPT])


def flipped(name: str, weight: torch.Tensor) -> torch.Tensor:
    """The embedding's rows in another order."""
    return weight.flip(0) if "embed_tokens" in name else weight


def negated(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Some rows of the embedding, of the prompt's last tokens, are others."""
    if "embed_tokens" in name:
        weight[PROMPT[-8:]] *= -1
    return weight


class ChangedWeightsTest(EngineTest):
    def setUp(self) -> None:
        super().setUp()
        self.one = str(llama())
        self.other = str(remade(llama(), models() / "other-embedding", flipped))
        self.old, self.new = (self.baseline(BATCH, engine=self.of(m)) for m in self.models)
        self.assertNotEqual(self.old, self.new)

    @property
    def models(self) -> tuple[str, str]:
        return self.one, self.other

    def of(self, model: str, **settings: Any) -> dict[str, Any]:
        return {"model": model, **settings}

    def serve_both(self, *steps: Batch | Call | Change, **settings: Any) -> list[Served]:
        """Serve with changes; then by engines that start from the one and the other checkpoint."""
        phases = [Phase(steps, self.of(self.one, **settings), self.root)]
        phases += [Phase([BATCH], self.of(model), self.root) for model in self.models]
        served = run(*phases)
        self.assertEqual([None] * 3, [each.problem for each in served])
        return served

    def test_every_way(self) -> None:
        """New weights begin an epoch by themselves: no engine gives tokens of the other ones.

        By a function for the model or the worker, by vLLM's ``update_weights`` over a transport
        that tests bring along, and by whoever holds a reference, without a call.
        """
        update = {"weight_transfer_config": "files"}
        ways = ((trouble.apply, {}), (trouble.by_function, {}), (trouble.update, update))
        for how, settings in (*ways, (trouble.behind, {})):
            with self.subTest(how.__name__):
                self.root = self.root.with_name(how.__name__)
                steps = (BATCH, Change(how, Path(self.other)), *(RESET, BATCH) * 3)
                changed, *after = self.serve_both(*steps, **settings)
                self.assertEqual(self.old + 3 * self.new, changed.tokens)
                self.assertEqual([self.old, self.new], [each.tokens for each in after])
                self.assertIn("the weights have changed", changed.log)
                self.assertEqual([[640], [0]], [each.cached for each in after])
                self.assertEqual(640, changed.cached[-1])  # its own, of the new epoch

    def test_reset_after_few_rows(self) -> None:
        """A reset, as a pause brings one, after a write to some rows that nothing else tells of."""
        few = remade(llama(), models() / "last-rows", negated)
        new = self.baseline(BATCH, engine=self.of(str(few)))
        self.assertNotEqual(self.old, new)
        steps = [BATCH, RESET_ALL, BATCH, Change(trouble.behind, few), RESET_ALL, BATCH]

        changed, old, _ = self.serve_both(*steps, RESET, BATCH, RESET, BATCH)

        self.assertEqual(2 * self.old + 3 * new, changed.tokens)
        self.assertEqual([0, 640, 0], changed.cached[:3])
        self.assertEqual(640, changed.cached[-1])  # its own, of the new epoch
        self.assertEqual([self.old, [640]], [old.tokens, old.cached])

    def test_blocks_of_before(self) -> None:
        """Without a reset vLLM goes on with its own blocks of before: nothing of it is stored."""
        longer = Batch([PROMPT + PROMPT[:200]])
        reload = Call("reload_weights", {"weights_path": self.other})
        changed, old, new = self.serve_both(
            BATCH, reload, longer, RESET, longer, enable_prefix_caching=True
        )
        (right,) = self.baseline(longer, engine=self.of(self.other))
        self.assertNotEqual(right, changed.tokens[1])  # vLLM's own, with or without VUA
        self.assertEqual([right], changed.tokens[2:])
        self.assertEqual([self.old, self.new], [old.tokens, new.tokens])
        self.assertEqual(0, changed.cached[2])
        self.assertLess(10, len(stored(self.root)))


BATCH = Batch([PROMPT])
ROUNDING = 1e-4
"""Of the largest element: steps of other sizes add up in another order."""

# Of the fields in `EXCLUDED` those that a CPU can run with another value.
WHEN: dict[str, Any] = {
    "async_scheduling": False,
    "block_size": 64,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "long_prefill_token_threshold": 100,
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 2,
    "performance_mode": "throughput",
    "prefix_caching_hash_algo": "sha256_cbor",
    "scheduler_reserve_full_isl": False,
    "scheduling_policy": "priority",
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    },
    "stream_interval": 3,
}
WHERE_AND_AFTER: dict[str, Any] = {
    "allowed_local_media_path": "/",
    "disable_hybrid_kv_cache_manager": True,
    "disable_log_stats": False,
    "generation_config": "vllm",
    "kv_cache_memory_bytes": 48 << 20,
    "load_format": "safetensors",
    "logprobs_mode": "raw_logits",
    "max_logprobs": 3,
    "optimization_level": 0,
    "override_generation_config": {"temperature": 0.7},
    "safetensors_load_strategy": "eager",
    "seed": 11,
    "served_model_name": "another name",
    "shutdown_timeout": 1,
    "structured_outputs_config": {"enable_in_reasoning": True},
    "use_tqdm_on_load": False,
}
COUNTED: dict[str, Any] = {"hf_overrides": {"rms_norm_eps": 1e-2}}


def chunks(root: Path) -> dict[str, list[torch.Tensor]]:
    """K and V of the prompt's chunks, by namespace and number."""
    found = {}
    for at in range(len(PROMPT) // CHUNK):
        for path in chunk_files(root, PROMPT, at):
            tensors = load_file(path)
            place = f"{path.relative_to(root).parts[0]} {at}"
            found[place] = [
                tensors[key] for key in sorted(tensors) if tensors[key].is_floating_point()
            ]
    return found


@needs_vllm
class ExcludedFieldsTest(EngineTest):
    def stores(self, name: str, **engine: Any) -> dict[str, list[torch.Tensor]]:
        """What an engine of its own stores for the prompt."""
        root = self.root.with_name(name)
        self.serve(BATCH, SETTLE, engine=engine, root=root)
        return chunks(root)

    def distance(self, one: dict[str, Any], other: dict[str, Any]) -> float:
        """The largest difference of an element, as a part of the largest element."""
        pairs = [pair for at in one for pair in zip(one[at], other[at], strict=True)]
        self.assertGreaterEqual(len(pairs), 2 * len(one))
        return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)

    def test_other_values(self) -> None:
        """The same chunks with the same K and V, whatever the excluded fields say."""
        usual = self.stores("usual")
        self.assertEqual(10, len(usual))
        for name, fields in (("when", WHEN), ("where", WHERE_AND_AFTER)):
            with self.subTest(name):
                found = self.stores(name, **fields)
                self.assertEqual(usual.keys(), found.keys())
                self.assertLess(self.distance(usual, found), ROUNDING)

        found = self.stores("counted", **COUNTED)
        self.assertEqual(set(), usual.keys() & found.keys())
        renamed = dict(zip(found, usual.values(), strict=True))  # both in the prompt's order
        self.assertGreater(self.distance(found, renamed), 100 * ROUNDING)
