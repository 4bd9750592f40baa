"""Pictures whose embeddings another process computes: vLLM's ECExampleConnector, and a directory.

An engine that only encodes writes embeddings into a directory, another one reads them there.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from e2e.controls import exchange_for_noise
from e2e.harness import Batch, EngineTest, Phase, make_llava, models, run, tokens
from e2e.pictures import IMAGE_TOKEN

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

BEFORE = 128  # tokens in front of the picture
LOOK = [*tokens(BEFORE, seed=2), IMAGE_TOKEN, *tokens(200, seed=3)]
WHOLE = (len(LOOK) + 62) // 32 * 32
"""What can be loaded of it, in blocks of 32: a picture has 64 tokens, and the last is computed."""
ONE, TWO = (Batch([LOOK], images=[seed]) for seed in (1, 2))
ALLOWED = {"allow": ["other_encoders"]}


class EncodersTest(EngineTest):
    def setUp(self) -> None:
        """Have a model that sees, and encode two pictures in an engine that does nothing else."""
        super().setUp()
        self.model = {
            "model": str(make_llava(models() / "llava-encoders")),
            "skip_tokenizer_init": False,
        }
        self.encoded = made = models() / "encoded"
        self.alone = self.baseline(ONE, TWO, engine=self.model)
        self.assertNotEqual(*self.alone)
        if not made.exists():
            (encoder,) = run(Phase([ONE, TWO], engine=self.with_encoder("ec_producer")))
            self.assertIsNone(encoder.problem)
            self.assertEqual([[], []], encoder.tokens)
        self.encoded = self.root.with_name("encoded")
        shutil.copytree(made, self.encoded)
        self.assertEqual(2, len(self.files()))
        self.reader = self.with_encoder("ec_consumer")

    def with_encoder(self, role: str) -> dict[str, Any]:
        extra = {"shared_storage_path": str(self.encoded)}
        transfer = {
            "ec_connector": "ECExampleConnector",
            "ec_role": role,
            "ec_connector_extra_config": extra,
        }
        return {**self.model, "ec_transfer_config": transfer}

    def files(self) -> list[Path]:
        return sorted(self.encoded.glob("*/encoder_cache.safetensors"))

    def test_the_other_process_encodes(self) -> None:
        """An engine without VUA sees what lies in the directory: exchanged, the other picture."""
        one, two = self.files()
        aside = one.with_name("aside")
        for source, target in ((one, aside), (two, one), (aside, two)):
            shutil.move(source, target)
        (exchanged,) = run(Phase([ONE, TWO], engine=self.reader))
        self.assertEqual(self.alone[::-1], exchanged.tokens)

    def test_restart(self) -> None:
        """What one engine stored another one loads, also one that encodes for itself.

        The loaded pictures need no embeddings. Another picture loads what is in front of it.
        """
        cold = self.serve(ONE, engine=self.reader, extra=ALLOWED)
        self.assertEqual([self.alone[:1], [0]], [cold.tokens, cold.cached])
        shutil.rmtree(self.encoded)
        warm = self.serve(ONE, TWO, engine=self.reader, extra=ALLOWED)
        itself = self.serve(ONE, engine=self.model)

        self.assertGreater(WHOLE, BEFORE + 64)
        self.assertEqual([self.alone, [WHOLE, BEFORE]], [warm.tokens, warm.cached])
        self.assertEqual(WHOLE + BEFORE, warm.counts["tokens_loaded"])
        self.assertEqual([self.alone[:1], [WHOLE]], [itself.tokens, itself.cached])
        self.assertEqual(WHOLE, itself.counts["tokens_loaded"])

    def test_negative_control(self) -> None:
        """With noise in the place of what is in front of the picture other tokens come out."""
        self.serve(ONE, engine=self.reader, extra=ALLOWED)
        exchange_for_noise(self.root, LOOK[:BEFORE])
        noisy = self.serve(ONE, engine=self.reader, extra=ALLOWED)

        self.assertEqual(WHOLE, noisy.counts["tokens_loaded"])
        self.assertNotEqual(self.alone[:1], noisy.tokens)

    def test_not_allowed(self) -> None:
        """Without the operator's word a prompt with a picture is computed, and the log says why."""
        served = [self.serve(ONE, engine=self.reader) for _ in range(2)]

        self.assertEqual([self.alone[:1]] * 2, [each.tokens for each in served])
        self.assertEqual([[0], [0]], [each.cached for each in served])
        self.assertIn("another process computes their embeddings", served[0].log)
