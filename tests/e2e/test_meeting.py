"""Transformers and vLLM compute what is shared alike; what is not, they were seen not to."""

from __future__ import annotations

import unittest
from typing import Any

import pytest

from e2e.harness import driver, models, needs_vllm
from e2e.meeting import SAME
from vua.format.shared_config import unshared

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

CASES: list[tuple[str, dict[str, Any], bool]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}, True),
    ("llama", {"partial_rotary_factor": 0.5}, False),
    ("stablelm", {"use_qkv_bias": True}, True),
    ("mixtral", {"hidden_act": "gelu"}, False),
    ("gemma", {}, True),
    ("gemma", {"hidden_act": "silu"}, False),
]
"""Model type, what its config says, whether both compute the same."""


@needs_vllm
class MeetingTest(unittest.TestCase):
    def test_shared_and_apart(self) -> None:
        """Each case is computed by both engines, and judged from the config that each resolved."""
        for number, (kind, edits, same) in enumerate(CASES):
            with self.subTest(f"{kind} {edits}"):
                folder = str(models() / f"meeting-{number}")
                job = {"model_type": kind, "edits": edits, "folder": folder}
                (found,) = driver().ask([{"meet": job}])["phases"]
                self.assertEqual(same, found["distance"] <= SAME)
                for engine in ("transformers", "vllm"):
                    self.assertEqual(same, unshared(found[engine]) == "")
