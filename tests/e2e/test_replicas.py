"""Data parallelism: a server's replicas share what one of them has stored.

Those of a dense model, that is. With experts, replicas compute each step together, which vLLM 0.32
cannot on CPUs (its communicator there has no `all_gatherv`); that they have one namespace and the
same files too is in test_vllm_identity.
"""

from __future__ import annotations

import pytest

from e2e.controls import exchange_for_noise
from e2e.damage import stored
from e2e.harness import PROMPT, Batch
from e2e.serving import ServerTest, complete, scraped, starting, transfer
from vua.storage.description import descriptions

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

REPLICAS = ["--data-parallel-size", "2", "--api-server-count", "1", *transfer()]
"""Forks of several API servers would have no metrics: those are collected as new processes."""
OTHER = PROMPT[::-1]
UNTIL_STORED = {"vua": {"wait_s": 20}}


class ReplicasTest(ServerTest):
    def test_two_replicas(self) -> None:
        """Each replica loads what the other one stored: the same tokens, and others of noise."""
        with starting(self.root, REPLICAS, forked=True) as ready:
            expected = self.baseline(Batch([PROMPT]), Batch([OTHER]))
            (address,) = ready()
            for at, (prompt, first, second) in enumerate(((PROMPT, 0, 1), (OTHER, 1, 0))):
                found = [
                    complete(address, prompt, replica=first),
                    complete(address, prompt, replica=second, kv_transfer_params=UNTIL_STORED),
                ]
                self.assertEqual([expected[at]] * 2, found)
            self.assertEqual([640, 640], self.loaded(address))
            exchange_for_noise(self.root, OTHER)
            noise = [complete(address, OTHER, replica=one) for one in (0, 1)]
            self.assertEqual([1280, 1280], self.loaded(address))

        self.assertEqual([noise[0]] * 2, noise)
        self.assertNotEqual(expected[1], noise[0])
        self.assertEqual(1, len(list(descriptions(self.root))))
        self.assertEqual(20, len(stored(self.root)))

    def loaded(self, address: str) -> list[float]:
        series = scraped(address)
        labels = (f'engine="{one}",model_name="tiny"' for one in (0, 1))
        return [series[f"vua_loaded_tokens_total{{{each}}}"] for each in labels]
