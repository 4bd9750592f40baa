"""`vua warm` with a vLLM engine of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from e2e.engine import ENVIRONMENT
from e2e.harness import PROMPT, SOURCE, Batch, EngineTest, llama
from vua.security.keyring import write_key

pytestmark = pytest.mark.vllm

ENGINE = {"dtype": "float32", "block_size": 32, "max_model_len": 2048, "enforce_eager": True,
          "kv_cache_memory_bytes": 64 << 20}  # fmt: skip


class WarmTest(EngineTest):
    def warm(self, *more: str) -> list[dict[str, Any]]:
        """Warm a prompt, and one that is too long; returns the report of each."""
        prompts = self.root.with_name("prompts.jsonl")
        prompts.write_text("\n".join(json.dumps({"prompt": one}) for one in (PROMPT, PROMPT * 3)))
        words = ["--engine", "vllm", "--model", str(llama()), "--path", str(self.root), "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "vua.cli", "warm", str(prompts), *words, *more,
             "--engine-args", json.dumps(ENGINE)],
            check=False, capture_output=True, text=True, timeout=1800,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(SOURCE)},
        )  # fmt: skip
        self.assertEqual(1, done.returncode, done.stderr[-4000:])
        report: list[dict[str, Any]] = json.loads(done.stdout)["prompts"]
        return report

    @pytest.mark.thorough
    def test_vllm(self) -> None:
        """What it stores another engine loads; a prompt that is too long is told, not fatal."""
        first, long = self.warm()
        expected = {"line": 1, "tokens": 700, "found": 0, "stored": 640, "problem": ""}
        self.assertEqual(expected, first)
        self.assertEqual((2100, None), (long["tokens"], long["found"]))
        self.assertIn("2048", long["problem"])
        self.assertEqual([640], self.serve(Batch([PROMPT])).cached)

    @pytest.mark.thorough
    def test_vllm_keyed(self) -> None:
        """With a key it stores for engines that have that key, and counts what it stored."""
        key = self.root.with_name("own.key")
        write_key(key)
        first, _ = self.warm("--key-file", str(key))
        self.assertEqual((0, 640), (first["found"], first["stored"]))
        served = self.serve(Batch([PROMPT]), extra={"security": {"key_file": str(key)}})
        self.assertEqual([640], served.cached)
