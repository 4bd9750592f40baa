"""Data parallelism: a server's replicas share what one of them has stored."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from helpers import soak
from vllm_e2e.controls import exchange_for_noise
from vllm_e2e.damage import stored
from vllm_e2e.harness import PROMPT, Batch, EngineTest, llama, needs_windows
from vllm_e2e.serving import complete, scraped, starting, transfer
from vllm_e2e.test_models import gpt_oss
from vua.directory import namespaces

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

REPLICAS = ["--data-parallel-size", "2", *transfer()]
OTHER = PROMPT[::-1]
UNTIL_STORED = {"vua": {"wait_s": 20}}


class ReplicasTest(EngineTest):
    def setUp(self) -> None:
        """Skip where vLLM's server cannot start at all."""
        super().setUp()
        try:
            version("vllm")
        except PackageNotFoundError:
            self.skipTest("no distribution is called vllm, and its server asks for its version")

    def check(self, model: Path, *more: str, forked: bool) -> None:
        """Each replica loads what the other one stored: the same tokens, and others of noise."""
        with starting(self.root, [*REPLICAS, *more], forked=forked, model=model) as ready:
            batches = Batch([PROMPT]), Batch([OTHER])
            expected = self.baseline(*batches, engine={"model": str(model)})
            (address,) = ready()
            for prompt, first, second in ((PROMPT, 0, 1), (OTHER, 1, 0)):
                found = [
                    complete(address, prompt, replica=first),
                    complete(address, prompt, replica=second, kv_transfer_params=UNTIL_STORED),
                ]
                self.assertEqual([expected.pop(0)] * 2, found)
            self.assertEqual([640, 640], self.loaded(address))
            exchange_for_noise(self.root, OTHER)
            noise = [complete(address, OTHER, replica=one) for one in (0, 1)]
            self.assertEqual([1280, 1280], self.loaded(address))

        self.assertEqual([noise[0]] * 2, noise)
        self.assertNotEqual(found, noise)
        self.assertEqual(1, len(list(namespaces(self.root))))

    def loaded(self, address: str) -> list[float]:
        """How many tokens each replica has loaded."""
        series = scraped(address)
        labels = (f'engine="{one}",model_name="tiny"' for one in (0, 1))
        return [series[f"vua_loaded_tokens_total{{{each}}}"] for each in labels]

    def test_two_replicas(self) -> None:
        """Replicas of a dense model, each by itself."""
        # forks of a server that was asked for one have no metrics in common
        self.check(llama(), "--api-server-count", "1", forked=True)

        self.assertEqual(20, len(stored(self.root)))

    @soak
    @needs_windows
    def test_replicas_with_experts(self) -> None:
        """Replicas of a model with experts, which step together."""
        self.check(gpt_oss(), forked=False)
