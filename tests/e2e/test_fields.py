"""Settings that are in no key change neither the names of chunks nor their K and V."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from e2e.damage import CHUNK, chunk_files
from e2e.harness import PROMPT, SETTLE, Batch, EngineTest, needs_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

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
    "enable_lora": True,
    "generation_config": "vllm",
    "kv_cache_memory_bytes": 48 << 20,
    "load_format": "safetensors",
    "logprobs_mode": "raw_logits",
    "max_cpu_loras": 3,
    "max_logprobs": 3,
    "max_loras": 2,
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
