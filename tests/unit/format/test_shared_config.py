"""Which configs engines may share the caches of: those that were shown to be computed alike."""

from __future__ import annotations

import json
import unittest
from importlib.util import find_spec
from typing import Any

from make_shared_configs import (
    MEASURED,
    TABLE,
    is_equal,
    is_same,
    table,
)
from vua.format.identity import INTERLEAVED, NEOX
from vua.format.shared_config import unshared

ALONE = frozenset({"cohere2"})
"""Types of which vLLM and transformers compute nothing alike."""
ALWAYS: dict[str, dict[str, int]] = {
    "gptj": {"n_positions": 4096},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}
"""What checkpoints of a type say, and its class does not."""
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "attention_bias": False,
    "transformers_version": "4.40.0",
}


class TestSharedConfig(unittest.TestCase):
    def test_other_keys_and_values(self) -> None:
        """A key or a value that was not shown makes the namespace the engine's own."""
        self.assertEqual("", unshared(LLAMA))
        dynamic = {"rope_type": "dynamic", "factor": 2.0}  # counts by itself in each engine
        proportional = {"rope_type": "proportional", "partial_rotary_factor": 0.5}
        for shared, edits in (
            (True, {"rms_norm_eps": 0.25}),
            (True, {"attention_bias": True}),
            (True, {"rope_parameters": dynamic}),
            (True, {"vua.vllm": {"any": "thing"}}),
            (True, {"quantization_config": {"bits": 4}}),
            (False, {"partial_rotary_factor": 0.5}),
            (False, {"rope_parameters": proportional}),
            (False, {"layer_types": ["sliding_attention", "full_attention"]}),
            (False, {"hidden_act": "relu"}),
            (False, {"attention_bias": 1}),
            (False, {"rms_norm_eps": -1.0}),
            (False, {"rms_norm_eps": float("inf")}),
            (False, {"architectures": ["MistralForCausalLM"]}),
            (False, {"clip_qkv": 1.0}),
            (False, {"a key of next year": 1}),
            (False, {"vua.code": ["a digest"]}),
            (False, {"model_type": "gpt2"}),
        ):
            with self.subTest(edits):
                reason = unshared(LLAMA | edits)
                self.assertEqual(shared, reason == "", reason)
        marked = LLAMA | {"clip_qkv": 1.0, "vua.whole": "a digest"}  # one engine's already
        self.assertEqual("", unshared(marked))

    def test_known_traps(self) -> None:
        """What engines were seen to read differently."""
        for kind, name, value in (
            ("stablelm", "use_parallel_residual", True),
            ("gemma", "hidden_act", "silu"),
            ("gemma", "hidden_activation", "silu"),
            ("qwen3_moe", "hidden_act", "gelu"),
            ("mixtral", "hidden_act", "gelu"),
            ("gpt_oss", "layer_types", ["full_attention", "full_attention"]),
            ("qwen2", "qk_norm", True),
            ("granite", "layer_types", ["sliding_attention", "full_attention"]),
        ):
            with self.subTest(f"{kind} {name}"):
                self.assertIn(name, unshared({"model_type": kind, name: value}))
                self.assertEqual("", unshared({"model_type": kind, "num_hidden_layers": 2}))

    def test_the_table_says_what_was_measured(self) -> None:
        """All model types of known rotation; nothing that differed is among what is shared."""
        measured = json.loads(MEASURED.read_text())
        said = json.loads(TABLE.read_text())
        self.assertEqual(table(measured), said)
        self.assertEqual((NEOX | INTERLEAVED) - ALONE, said.keys() - {"*"})
        self.assertEqual(NEOX | INTERLEAVED, {one["type"] for one in measured})
        apart = [one for one in measured if "distance" in one and not is_same(one)]
        self.assertLess(20, len(apart))
        for one in apart:
            places = said["*"] | said.get(one["type"], {})
            with self.subTest(f"{one['type']} {one['name']}"):
                self.assertTrue(
                    one["type"] in ALONE
                    or any(
                        not among(value, places.get(place, [])) for place, value in one["places"]
                    )
                )

    @unittest.skipUnless(find_spec("transformers"), "transformers is not installed")
    def test_ordinary_models_are_shared(self) -> None:
        """Each class of transformers with its defaults, but for what a type always has."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        for kind in sorted((NEOX | INTERLEAVED) - ALONE):
            with self.subTest(kind):
                names = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
                config = CONFIG_MAPPING[kind](architectures=names, **ALWAYS.get(kind, {}))
                self.assertEqual("", unshared(config.to_dict()))


def among(value: object, shown: list[object]) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return "*" in shown or ("+" in shown and number) or any(is_equal(value, one) for one in shown)
