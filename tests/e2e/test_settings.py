"""How the connector is named, configured, and refuses what it does not understand."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

import pytest

from e2e.damage import stored
from e2e.harness import PROMPT, Batch, EngineTest

pytestmark = pytest.mark.vllm

BATCH = Batch([PROMPT])


class SettingsTest(EngineTest):
    @pytest.mark.thorough
    def test_by_name_alone(self) -> None:
        """An installed VUA is found by vLLM by the connector's name, without a module path."""
        try:
            distribution("vua")
        except PackageNotFoundError:
            self.skipTest("vua is not installed, only on the path")
        expected = self.fill(BATCH, transfer={"kv_connector_module_path": None})

        warm = self.serve(BATCH, transfer={"kv_connector_module_path": None})

        self.assertEqual([expected, [640]], [warm.tokens, warm.cached])
        self.assertEqual(10, len(stored(self.root)))

    @pytest.mark.thorough
    def test_default_policy(self) -> None:
        """Without kv_load_failure_policy, where vLLM's default is "fail", the log warns of it."""
        served = self.serve(BATCH, transfer={"kv_load_failure_policy": None})

        self.assertEqual(1, served.log.count('kv_load_failure_policy is "fail"'))
