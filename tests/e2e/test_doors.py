"""What an engine's life brings, by VUA's connector and by its tier below vLLM's offloading."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from e2e import kinds
from e2e.checkpoints import IMAGE_TOKEN, with_biases
from e2e.damage import stored
from e2e.harness import (
    PROMPT,
    RESET_ALL,
    SETTLE,
    Batch,
    Change,
    Driver,
    EngineTest,
    Phase,
    Served,
    Step,
    driver,
    llama,
    make_llava,
    models,
    run,
    shared,
    tier_at,
)
from e2e.harness import tokens as random_tokens
from e2e.trouble import another_setup, newer, one_identity, sleep
from small_models import make_model

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

BATCH = Batch([PROMPT], max_tokens=12)
BY_NAME = {"kv_connector": "VUA", "kv_connector_module_path": None}
LEAST = 600
"""Tokens of the prompt of 700 that each kind of model loads at least: whole blocks of any size."""


class Events:
    """What an engine's life brings, by either door; mixed into tests."""

    served: Callable[..., Served]

    def test_adapters(self) -> None:
        """Named by content: at the same place another one finds nothing."""
        one, two = (str(kinds.strong_adapter(self.root.with_name(f"a{n}"), seed=n)) for n in (1, 2))
        in_turn = [Batch([PROMPT], loras=[path], max_tokens=12) for path in (one, two)]
        cold = self.served(*in_turn, engine=kinds.ADAPTERS)
        warm = self.served(*reversed(in_turn), engine=kinds.ADAPTERS)
        kinds.strong_adapter(Path(one), seed=3)
        other = self.served(in_turn[0], engine=kinds.ADAPTERS)

        self.assertEqual([0, 0], cold.cached)
        self.assertEqual(cold.tokens, warm.tokens[::-1])
        self.assertGreaterEqual(min(warm.cached), LEAST)
        self.assertEqual([0], other.cached)
        self.assertNotIn(other.tokens[0], cold.tokens)

    def test_pictures(self) -> None:
        """Named by their content, whatever a client calls them."""
        engine = {"model": str(make_llava(models() / "llava")), "skip_tokenizer_init": False}
        look = [*random_tokens(128, seed=2), IMAGE_TOKEN, *random_tokens(200, seed=3)]
        one, two = (Batch([look], images=[at], image_names=["mine"]) for at in (1, 2))
        cold, other, warm = (self.served(each, engine=engine) for each in (one, two, one))

        self.assertNotEqual(cold.tokens, other.tokens)
        self.assertEqual(cold.tokens, warm.tokens)
        self.assertLessEqual(other.cached[0], 128)
        self.assertGreaterEqual(warm.cached[0], 320)

    def test_two_engines_at_once(self) -> None:
        """Both store the same prompts; what lies there then is right."""
        batch = Batch([random_tokens(700, seed=seed) for seed in range(6)], max_tokens=12)
        with ThreadPoolExecutor() as threads:
            both = [threads.submit(self.served, batch, by=by) for by in (driver(), Driver())]
        warm = self.served(batch)

        for one in both:
            self.assertEqual(warm.tokens, one.result().tokens)
        self.assertGreaterEqual(min(warm.cached), LEAST)

    def test_where_prompts_part(self) -> None:
        """Prompts with one system prompt: from the second on it is loaded."""
        for model, least in self.parting():
            self.setUp()
            steps = [step for one in shared(3) for step in (Batch([one]), SETTLE, RESET_ALL)]
            served = self.served(*steps, engine={"model": str(model)})
            self.assertGreaterEqual(served.cached[1], least)
            self.assertGreaterEqual(min(served.cached[2:]), 0.95 * 896)

    def test_sleep(self) -> None:
        """K and V survive it; with other weights after it new ones count alone."""
        other = make_model(models() / "trained", family="llama", seed=2)
        slept = self.served(
            *(BATCH, SETTLE, Change(sleep, Path()), BATCH, Change(sleep, other)),
            *(BATCH, RESET_ALL, BATCH, SETTLE, RESET_ALL, BATCH),
        )
        self.assertEqual([0, 0], [slept.cached[0], slept.cached[2]])
        self.assertGreaterEqual(min(slept.cached[1], slept.cached[4]), LEAST)
        old, new = slept.tokens[0], slept.tokens[2]
        self.assertNotEqual(old, new)
        self.assertEqual([old, old, new, new, new], slept.tokens)
        again = self.served(BATCH)
        self.assertGreaterEqual(again.cached[0], LEAST)
        self.assertEqual(slept.tokens[0], again.tokens[0])

    def replaced(self, place: Path) -> Served:
        """What an engine serves when other weights lie at the path of those before."""
        shutil.copytree(llama(), place)
        cold = self.served(BATCH, engine={"model": str(place)})
        shutil.rmtree(place)
        shutil.copytree(make_model(models() / "other", family="llama", seed=2), place)

        other = self.served(BATCH, engine={"model": str(place)})
        self.assertEqual([0], other.cached)
        self.assertNotEqual(cold.tokens, other.tokens)
        return other

    def test_other_weights_at_the_same_path(self) -> None:
        """They load nothing."""
        self.replaced(models() / f"replaced-{type(self).__name__}")

    def test_salts(self) -> None:
        """Another salt finds nothing, nor does a request without; the same salt does."""
        mine, yours = (Batch([PROMPT], salt=salt, max_tokens=12) for salt in ("mine", "yours"))
        cold = self.served(mine)
        for other in (yours, BATCH):
            self.assertEqual([0], self.served(other).cached)
        warm = self.served(mine)
        self.assertGreaterEqual(warm.cached[0], LEAST)
        self.assertEqual(cold.tokens, warm.tokens)


class ConnectorTest(Events, EngineTest):
    def served(self, *batches: Step, by: Driver | None = None, **settings: Any) -> Served:
        """Run one engine with the connector on this test's directory."""
        (served,) = run(self.phase(*batches, **settings), by=by)
        self.assertIsNone(served.problem, served.log[-3000:])
        return served

    def test_adapters_elsewhere(self) -> None:
        """An adapter finds its chunks wherever it lies, and whatever it is called."""
        places = [self.root.with_name(name) for name in ("one", "other")]
        asked = [Batch([PROMPT], loras=[str(kinds.strong_adapter(at, seed=1))]) for at in places]
        cold, warm = (self.served(one, engine=kinds.ADAPTERS) for one in asked)
        self.assertEqual([[0], [640]], [cold.cached, warm.cached])
        self.assertEqual(cold.tokens, warm.tokens)

    def parting(self) -> Sequence[tuple[Path, int]]:
        """Models, and what the second prompt loads of a system prompt of 900 tokens."""
        by_turns = kinds.gemma3n(*("sliding_attention", "full_attention") * 2)
        return [(kinds.gpt_oss(), 896), (by_turns, 896)]


class TierTest(Events, EngineTest):
    def served(
        self,
        *batches: Step,
        engine: dict[str, Any] | None = None,
        by: Driver | None = None,
        **settings: Any,
    ) -> Served:
        """Run one engine with the tier on this test's directory."""
        trouble = settings.pop("trouble", ())
        cached = {"enable_prefix_caching": True, **(engine or {})}
        transfer = tier_at(self.root, **settings)
        phase = Phase(batches, cached, self.root, transfer=transfer, trouble=trouble)
        (served,) = run(phase, by=by)
        self.assertIsNone(served.problem, served.log[-3000:])
        return served

    def test_by_the_rule(self) -> None:
        """The configuration names VUA alone: with memory for offloading, or a model with states."""
        for given, said in (
            ({"kv_offloading_size": 1 / 16}, "0.1 GiB of the host's memory: --kv-offloading-size"),
            ({"model": str(kinds.small("Lfm2"))}, "GiB of the host's memory: layers with states"),
        ):
            engine = {"enable_prefix_caching": True, **given}
            cold, warm = (self.serve(BATCH, engine=engine, transfer=BY_NAME) for _ in range(2))
            self.assertEqual(([0], cold.tokens), (cold.cached, warm.tokens))
            self.assertGreaterEqual(warm.cached[0], LEAST)
            self.assertIn(said, warm.log)

    def test_states_without_blocks(self) -> None:
        """Without prefix caching vLLM keeps no states at blocks' ends: served uncached."""
        engine = {"model": str(kinds.small("Lfm2")), "enable_prefix_caching": False}
        served = self.serve(BATCH, engine=engine, transfer=BY_NAME)

        self.assertEqual(([0], []), (served.cached, stored(self.root)))
        self.assertEqual(self.baseline(BATCH, engine=engine), served.tokens)
        self.assertIn("for states --enable-prefix-caching", served.log)

    def test_prefix_lm(self) -> None:
        """HRM-Text's K and V depend on later tokens: none is loaded, nor what vLLM's memory has."""
        model = with_biases(models() / "hrm", "hrm_text", head_dim=32, num_hidden_layers=1)
        engine = {"model": str(model)}
        prompts = BATCH, Batch([PROMPT + random_tokens(100, seed=5)], max_tokens=12)
        expected = [tokens for one in prompts for tokens in self.baseline(one, engine=engine)]

        served = self.served(prompts[0], SETTLE, prompts[1], engine=engine)

        self.assertEqual(([0, 0], expected), (served.cached, served.tokens))
        self.assertEqual([], stored(self.root))

    def test_two_workers(self) -> None:
        """Each with a part of each row; one worker finds nothing of it."""
        cold, warm = (self.served(BATCH, engine={"tensor_parallel_size": 2}) for _ in range(2))
        self.assertEqual(([0], cold.tokens), (cold.cached, warm.tokens))
        self.assertGreaterEqual(warm.cached[0], LEAST)
        self.assertEqual([0], self.served(BATCH).cached)

    def test_another_setup(self) -> None:
        """Its rows are computed once and compared, then believed, also by others like this one."""
        cold = self.served(BATCH)
        for trouble in (another_setup, newer):
            served = self.served(BATCH, SETTLE, RESET_ALL, BATCH, trouble=[trouble])
            self.assertEqual(2 * cold.tokens, served.tokens)
            self.assertEqual(0, served.cached[0])
            self.assertGreaterEqual(served.cached[1], LEAST)

    def test_a_setup_that_computes_something_else(self) -> None:
        """Under one identity, by an unseen difference: its rows are not loaded."""
        one, other = [one_identity], [one_identity, another_setup]
        model = str(make_model(models() / "another", family="llama", seed=2))
        self.served(BATCH, trouble=one)

        served = self.served(
            BATCH, SETTLE, RESET_ALL, BATCH, engine={"model": model}, trouble=other
        )

        self.assertEqual([0, 0], served.cached)
        self.assertIn("are not what this engine computes", served.log)

    def test_preempted_requests(self) -> None:
        """Two requests that do not fit together are thrown out and continue, with equal tokens."""
        prompts = [PROMPT, random_tokens(700, seed=3)]
        batch = Batch(prompts, max_tokens=100)
        small = {"kv_cache_memory_bytes": 50 * (32 << 10), "max_model_len": 1024}
        cold = self.served(batch)

        served = self.served(batch, engine=small)

        self.assertGreater(served.counts.get("preemptions", 0), 0)
        self.assertEqual(cold.tokens, served.tokens)

    def parting(self) -> Sequence[tuple[Path, int]]:
        """As `ConnectorTest.parting`."""
        return [(kinds.gpt_oss(), 896), (kinds.small("Lfm2"), 512)]

    def test_other_weights_at_the_same_path(self) -> None:
        """Control: under one identity they load the others', and other tokens come out."""
        place = models() / "replaced"
        other = self.replaced(place)
        self.root = self.root.parent / "one"
        self.served(BATCH, engine={"model": str(llama())}, trouble=[one_identity])
        wrong = self.served(BATCH, engine={"model": str(place)}, trouble=[one_identity])
        self.assertGreaterEqual(wrong.cached[0], LEAST)
        self.assertNotEqual(other.tokens, wrong.tokens)

    def test_rows_apart(self) -> None:
        """Other sizes of blocks or elements find nothing."""
        self.served(BATCH)
        for engine in ({"block_size": 64}, {"dtype": "bfloat16"}):
            self.assertEqual([0], self.served(BATCH, engine=engine).cached)
