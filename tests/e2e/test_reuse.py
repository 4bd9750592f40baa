"""What one engine stored another one loads, and never do the tokens change."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest

from e2e.architectures import gemma3, gemma3n, gpt_oss
from e2e.controls import exchange_for_noise
from e2e.damage import stored
from e2e.harness import (
    PROMPT,
    RESET,
    Batch,
    Copied,
    EngineTest,
    Phase,
    loadable,
    needs_windows,
    run,
    shared,
    tokens,
)
from vua.cli import main

pytestmark = pytest.mark.vllm

TAIL = tokens(90, seed=2)


def explained(root: Path, prompt: Sequence[int], block: int) -> int:
    """How many tokens of a prompt `vua explain` says that an engine with such blocks loads."""
    with NamedTemporaryFile("w") as file, redirect_stdout(io.StringIO()) as out:
        json.dump(list(prompt), file)
        file.flush()
        main(["explain", str(root), "--tokens", file.name, "--json", "--block-tokens", str(block)])
    (one,) = json.loads(out.getvalue())["namespaces"]
    return int(one["loads"][str(block)])


@pytest.mark.thorough
@needs_windows
class PartingTest(EngineTest):
    """Prompts with one system prompt of 900 tokens: the second one loads of it already."""

    def check(self, prompts: list[list[int]], whole: int, second: int, **engine: Any) -> None:
        """``whole``: the tokens of it that can be loaded; ``second``: by the second prompt."""
        one, two, *others = prompts
        parts = [[one], [two], *([others] if len(others) > 9 else [[each] for each in others])]
        steps = [step for part in parts for step in (Batch(part, max_tokens=1), RESET)]

        served = self.serve(*steps, engine=engine)

        self.assertEqual([0, second], served.cached[:2])
        self.assertEqual({whole}, {*served.cached[2:]})

    def test_windows(self) -> None:
        """A window of 128 tokens, and none: all prompts load all of it, as without windows."""
        shares = gemma3n(*["sliding_attention", "full_attention"] * 2)
        for model, prompts in ((gpt_oss(), 24), (gemma3(), 5), (shares, 5)):
            with self.subTest(model.name):
                super().setUp()
                self.check(shared(prompts), 896, 896, model=str(model))


class ReuseTest(EngineTest):
    def test_warm_equals_cold(self) -> None:
        """A new process loads all whole chunks of a known prompt and gives the same tokens."""
        batch = Batch([PROMPT])
        for dtype in ("float32", "bfloat16"):
            with self.subTest(dtype):
                engine = {"dtype": dtype}
                expected = self.baseline(batch, engine=engine)
                cold = self.serve(batch, engine=engine)
                warm = self.serve(batch, engine=engine)

                self.assertNotEqual(cold.pid, warm.pid)
                self.assertEqual([expected, expected], [cold.tokens, warm.tokens])
                self.assertEqual([[0], [640]], [cold.cached, warm.cached])
                self.assertEqual(10, cold.counts["chunks_saved"])
                self.assertEqual({"chunks_loaded": 10, "tokens_loaded": 640}, warm.counts)
        self.assertEqual(20, len(stored(self.root)))

    @pytest.mark.thorough
    def test_forked_copy(self) -> None:
        """A forked copy of an engine's process neither loads nor stores, and says so once."""
        other = tokens(300, seed=9)
        (expected,) = self.fill(Batch([PROMPT]))
        (others,) = self.baseline(Batch([other]))
        before = set(stored(self.root))

        served = self.serve(
            Batch([PROMPT]), Copied(Batch([PROMPT, other])), Copied(Batch([other])), Batch([PROMPT])
        )

        self.assertEqual([640, 0, 0, 0, 640], served.cached)
        self.assertEqual([expected, expected, others, others, expected], served.tokens)
        self.assertEqual(before, set(stored(self.root)))
        self.assertEqual(2, served.log.count("a forked copy of an engine's process"))

    @pytest.mark.thorough
    def test_partial_prefix(self) -> None:
        """A prompt that shares a beginning with a stored one loads the shared whole chunks."""
        self.fill(Batch([PROMPT]))
        batch = Batch([PROMPT[:400] + TAIL])
        expected = self.baseline(batch)

        first = self.serve(batch)
        second = self.serve(batch)

        self.assertEqual([expected, expected], [first.tokens, second.tokens])
        self.assertEqual([[384], [448]], [first.cached, second.cached])
        self.assertEqual(1, first.counts["chunks_saved"])

    @pytest.mark.thorough
    def test_prefix_cache_of_the_engine(self) -> None:
        """The engine's own hit is kept and only what lies beyond it is loaded."""
        engine = {"enable_prefix_caching": True}
        batches = (Batch([PROMPT[:200]]), Batch([PROMPT]), RESET, Batch([PROMPT]), Batch([PROMPT]))
        expected = self.baseline(*batches, engine=engine)

        cold = self.serve(*batches, engine=engine)
        warm = self.serve(*batches, engine=engine)

        self.assertEqual([expected, expected], [cold.tokens, warm.tokens])
        self.assertEqual([0, 192], cold.cached[:2])
        self.assertEqual([192, 640, 640, 672], warm.cached)
        self.assertEqual(192 + (640 - 192) + 640, warm.counts["tokens_loaded"])

    @pytest.mark.thorough
    def test_hit_of_the_engine_ends_inside_a_chunk(self) -> None:
        """A load that begins inside a chunk, behind the engine's own hit, brings only the rest."""
        engine = {"enable_prefix_caching": True}
        self.fill(Batch([PROMPT]), engine=engine)
        batches = (Batch([PROMPT[:35]]), Batch([PROMPT]))
        expected = self.baseline(*batches, engine=engine)

        warm = self.serve(*batches, engine=engine)

        self.assertEqual(expected, warm.tokens)
        self.assertEqual([0, 640], warm.cached)
        self.assertEqual({"chunks_loaded": 10, "tokens_loaded": 608}, warm.counts)

    @pytest.mark.thorough
    def test_blocks_and_chunks_of_all_sizes(self) -> None:
        """Chunks need not be whole blocks, nor blocks whole chunks."""
        batch = Batch([PROMPT, PROMPT[:500] + TAIL])
        sizes = [(32, 96), (64, 96), (128, 32), (128, 96)]
        blocks = [32, 64, 128]
        plain = run(*(Phase([batch], engine={"block_size": block}) for block in blocks))
        expected = {block: served.tokens for block, served in zip(blocks, plain, strict=True)}
        phases = [
            self.phase(
                batch, engine={"block_size": block}, extra={"chunk_tokens": chunk}, root=root
            )
            for block, chunk in sizes
            for root in [self.root.with_name(f"{block}-{chunk}")]
        ]
        cold, warm = run(*phases), run(*phases)
        for (block, chunk), first, second in zip(sizes, cold, warm, strict=True):
            with self.subTest(block=block, chunk=chunk):
                whole = [len(prompt) // chunk for prompt in batch.prompts]
                self.assertEqual([expected[block]] * 2, [first.tokens, second.tokens])
                self.assertEqual(
                    [
                        loadable(prompt, stored=count, chunk=chunk, block=block)
                        for prompt, count in zip(batch.prompts, whole, strict=True)
                    ],
                    second.cached,
                )
                root = self.root.with_name(f"{block}-{chunk}")
                said = [explained(root, prompt, block) for prompt in batch.prompts]
                self.assertEqual(second.cached, said)

    @pytest.mark.thorough
    def test_preemption(self) -> None:
        """Requests that are thrown out of a tiny cache and resumed give the same tokens."""
        prompts = [tokens(300, seed=100 + at) for at in range(6)]
        batch = Batch(prompts, max_tokens=120)
        for prefix_caching in (False, True):
            with self.subTest(prefix_caching=prefix_caching):
                shutil.rmtree(self.root, ignore_errors=True)
                roomy = {"enable_prefix_caching": prefix_caching, "max_model_len": 512}
                engine = roomy | {"num_gpu_blocks_override": 45}
                expected = self.baseline(batch, engine=roomy)
                cold = self.serve(batch, engine=engine)
                warm = self.serve(batch, engine=engine)

                self.assertEqual(expected, cold.tokens)
                self.assertEqual(expected, warm.tokens)
                self.assertEqual([256] * 6, warm.cached)
                self.assertGreaterEqual(warm.counts["tokens_loaded"], 6 * 256)
                self.assertGreater(cold.counts["preemptions"], 0)
                self.assertGreater(warm.counts["preemptions"], 0)

    @pytest.mark.thorough
    def test_other_payloads_give_other_tokens(self) -> None:
        """Negative control: the loaded bytes, not the prompt alone, decide what is generated."""
        batch = Batch([PROMPT])
        expected = self.fill(batch)
        exchange_for_noise(self.root, PROMPT)

        warm = self.serve(batch)

        self.assertEqual([640], warm.cached)
        self.assertEqual({"chunks_loaded": 10, "tokens_loaded": 640}, warm.counts)
        self.assertNotEqual(expected, warm.tokens)


class SeparationTest(EngineTest):
    @pytest.mark.thorough
    def test_cache_salt(self) -> None:
        """A request loads what was stored with its own salt, and nothing else."""
        self.fill(Batch([PROMPT]))
        batches = (Batch([PROMPT], salt="a"), Batch([PROMPT], salt="b"), Batch([PROMPT]))
        expected = self.baseline(*batches)

        first = self.serve(*batches[:2])
        second = self.serve(*batches)

        self.assertEqual(expected[:2], first.tokens)
        self.assertEqual(expected, second.tokens)
        self.assertEqual([0, 0], first.cached)
        self.assertEqual([640, 640, 640], second.cached)
        self.assertEqual(30, len(stored(self.root)))

    @pytest.mark.thorough
    def test_producer_and_consumer(self) -> None:
        """A producer stores and does not load; a consumer loads and does not store."""
        batches = (Batch([PROMPT]), Batch([TAIL]))
        expected = self.baseline(*batches)
        producer: dict[str, Any] = {"transfer": {"kv_role": "kv_producer"}}
        consumer: dict[str, Any] = {"transfer": {"kv_role": "kv_consumer"}}

        nothing = self.serve(*batches, **consumer)
        self.assertEqual([], stored(self.root))

        once = self.serve(batches[0], **producer)
        again = self.serve(batches[0], **producer)
        warm = self.serve(*batches, **consumer)

        self.assertEqual([expected, expected], [nothing.tokens, warm.tokens])
        self.assertEqual([expected[:1]] * 2, [once.tokens, again.tokens])
        self.assertEqual([[0, 0], [0], [0]], [nothing.cached, once.cached, again.cached])
        self.assertEqual([640, 0], warm.cached)
        self.assertEqual(10, len(stored(self.root)))
