"""How the connector is named, configured, and refuses what it does not understand."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import pytest

from e2e.damage import stored
from e2e.harness import PROMPT, Batch, EngineTest, run

pytestmark = pytest.mark.vllm

BATCH = Batch([PROMPT])


class SettingsTest(EngineTest):
    def refused(self, **settings: Any) -> str:
        """The error with which an engine does not start."""
        (served,) = run(self.phase(BATCH, **settings))
        self.assertIsNotNone(served.problem)
        return str(served.problem)

    @pytest.mark.thorough
    def test_unknown_setting(self) -> None:
        """A misspelt setting stops the start, and the message names the nearest one."""
        problem = self.refused(extra={"chunk_token": 64})

        self.assertIn("no key 'chunk_token'; the nearest is 'chunk_tokens'", problem)
        self.assertFalse(self.root.exists())

    @pytest.mark.thorough
    def test_directory_is_a_file(self) -> None:
        """A path that cannot be a directory stops the start."""
        self.root.write_text("")

        self.assertIn("expected a directory, found a file", self.refused())

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
