"""A model that is not its files, or changes: its own tokens, and nothing of it for anybody else."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import unittest
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from importlib import util
from typing import Any

import pytest
import torch

from model_changes import CHANGES, ONLY_BEFORE, PLACES
from transformers_case import GREEDY, TransformersTest, computed, empty, prompt_of
from vua import InputError

PROMPT = prompt_of(100)
PROMPT[0, 3::9] = 5  # the row of the embedding that one of the changes is of
KINDS = (
    "rows of the embedding",
    ".data in place",
    "a new Parameter",
    "the rotary buffer",
    "an epsilon",
    "a forward hook",
    "a patched forward",
    "a layer less",
)
"""Of the changes: of weights, with and without a sign in the tensor, buffers, values, functions and
layers. The campaign (`e2e.transformers_campaign`) takes all."""


def noise() -> torch.Generator:
    """The same each time."""
    return torch.Generator().manual_seed(5)


@contextmanager
def changed(model: Any, name: str) -> Iterator[Any]:
    """A model while one of its places is changed, or after a change that stays."""
    if name in PLACES:
        with PLACES[name](model):
            yield model
    else:
        yield {**CHANGES, **ONLY_BEFORE}[name](model, noise()) or model


class ChangedModelTest(TransformersTest):
    def plain(self, model: Any, prompt: torch.Tensor = PROMPT) -> list[int]:
        """What a model says without VUA."""
        torch.manual_seed(7)
        out: list[int] = model.generate(prompt, **GREEDY)[0].tolist()
        return out

    def loaded(self, model: Any) -> int:
        """How many tokens a model finds stored."""
        return int(self.prefixes(model).load(PROMPT).num_tokens)

    @pytest.mark.thorough
    def test_control(self) -> None:
        """Unchanged models share, in another block and after a load of the same weights."""
        model = self.load()
        with self.reusing(model):
            expected = self.plain(model)
            model.load_state_dict(self.load().state_dict())
            self.assertEqual(expected, self.plain(model))
        self.assertEqual(96, self.loaded(self.load()))
        self.assertEqual(0, self.loaded(self.load(attn_implementation="sdpa")))  # its own

    def test_a_function_that_is_replaced(self) -> None:
        """Of torch's, in the block and before it: own tokens, own caches, none for a clean one."""
        self.check_changes("a function of torch.nn.functional")

    @pytest.mark.thorough
    def test_changes(self) -> None:
        """So with any other change of a model."""
        self.check_changes(*KINDS, *ONLY_BEFORE, "double", "training mode")

    @pytest.mark.thorough
    def test_places(self) -> None:
        """Wherever else a function, a value or a weight may live."""
        self.check_changes(*PLACES)

    def check_changes(self, *names: str) -> None:
        """Change a model before a block, and between two calls of one."""
        other = PROMPT.flip(1)
        plain, plainly, differ = self.plain(self.load()), self.plain(self.load(), other), 0
        for name in names:
            with self.subTest(name):
                self.store = self.root / f"before {name}"
                with changed(self.load(), name) as model:
                    expected = self.plain(model)
                    with self.reusing(model) as prefixes:
                        self.assertEqual(expected, self.plain(model))
                        if name in PLACES:
                            self.assertEqual(96, prefixes.load(PROMPT).num_tokens)
                        self.assertEqual(expected, self.plain(model))
                differ += expected != plain
                self.check_clean((PROMPT, plain, [0] if expected != plain else [0, 96]))
                if name in ONLY_BEFORE:
                    continue
                self.store, model = self.root / f"between {name}", self.load()
                with self.reusing(model):
                    self.assertEqual(plain, self.plain(model))
                    with changed(model, name):
                        for _ in range(2):
                            self.assertEqual(expected, self.plain(model))
                        self.plain(model, other)
                    if name in PLACES:
                        self.assertEqual(plain, self.plain(model))
                self.check_clean((PROMPT, plain, [96]), (other, plainly, [0, 96]))
        self.assertGreater(2 * differ, len(names))  # changes matter

    def check_clean(self, *asked: tuple[torch.Tensor, list[int], list[int]]) -> None:
        """A model as it was loaded says what it says, and finds one of these numbers of tokens."""
        reader = self.load()
        with self.reusing(reader) as prefixes:
            for prompt, plain, loaded in asked:
                self.assertIn(prefixes.load(prompt).num_tokens, loaded)
                self.assertEqual(plain, self.plain(reader, prompt))

    def test_within_a_call(self) -> None:
        """A change while tokens are generated, or a hook on and off: nothing of it is stored."""
        from transformers import LogitsProcessor

        class Changing(LogitsProcessor):
            def __init__(self, model: Any) -> None:
                self.model, self.handle = model, None

            def __call__(self, _: Any, scores: torch.Tensor) -> torch.Tensor:
                self.model.model.layers[0].self_attn.v_proj.weight.data *= 1.5
                return scores

        class Hooking(Changing):
            handle: Any

            def __call__(self, _: Any, scores: torch.Tensor) -> torch.Tensor:
                if self.handle is not None:
                    self.handle.remove()
                mlp = self.model.model.layers[0].mlp
                self.handle = mlp.register_forward_hook(lambda *args: args[2] * 3)
                return scores

        for kind in (Changing, Hooking):
            with self.subTest(kind.__name__):
                model = self.load()
                with self.reusing(model):
                    processor = kind(model)
                    model.generate(PROMPT, logits_processor=[processor], **GREEDY)
                    if processor.handle is not None:
                        processor.handle.remove()
                self.assertEqual(0, self.loaded(self.load()))

    @pytest.mark.thorough
    def test_own_identity(self) -> None:
        """A changed model finds in another process what it stored in this one: by its bytes."""
        for name in ("rows of the embedding", "an epsilon", "rounded", "the rotary buffer"):
            with self.subTest(name):
                self.store = self.root / name.replace(" ", "-")
                found = []
                for _ in range(2):
                    model = self.load()
                    CHANGES[name](model, noise())
                    found.append(self.loaded(model))
                    with self.reusing(model):
                        self.plain(model)
                self.assertEqual([0, 96], found)

    @pytest.mark.thorough
    def test_said_once(self) -> None:
        """One line says that a model cannot be stored now, and why; later it can be again."""
        model = self.load()
        with self.reusing(model) as prefixes:
            self.plain(model)
            model.train()
            with self.assertLogs("vua.transformers", "WARNING") as logs:
                self.plain(model)
                self.plain(model)
            model.eval()
            self.assertEqual(96, prefixes.load(PROMPT).num_tokens)
        self.assertEqual(1, len(logs.output))
        self.assertIn("training mode, expected model.eval()", logs.output[0])

    @pytest.mark.thorough
    def test_autocast(self) -> None:
        """What autocast computes is not stored, in the block or by hand."""
        model = self.load()
        with self.reusing(model), torch.autocast("cpu", torch.bfloat16):
            self.plain(model)
        prefixes = self.prefixes(model)
        cache = prefixes.load(PROMPT).cache
        with torch.autocast("cpu", torch.bfloat16):
            computed(model, PROMPT, cache)
        self.assertEqual(0, prefixes.save(PROMPT, cache))
        self.assertEqual(0, self.loaded(self.load()))

    def test_ids_that_were_edited(self) -> None:
        """A cache is stored for the ids that it was computed for, and for no others."""
        from transformers import LogitsProcessor

        class Editing(LogitsProcessor):
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                input_ids[:, 40] = 7
                return scores

        model, edited = self.load(), PROMPT.clone()
        edited[0, 40] = 7
        expected = self.plain(model, edited)
        with self.reusing(model) as prefixes:
            with self.assertLogs("vua.transformers", "WARNING") as logs:
                model.generate(PROMPT.clone(), logits_processor=[Editing()], **GREEDY)
            self.assertIn("K of other tokens than input_ids, from token 40 on", logs.output[0])
            own = computed(model, PROMPT, empty(prefixes))
            with self.assertRaisesRegex(InputError, "K of other tokens"):
                prefixes.save(edited, own)
            self.assertEqual(expected, self.plain(model, edited))
            self.assertEqual(4, prefixes.save(PROMPT, own))  # control: two are in both

    def test_other_beginning(self) -> None:
        """K and V of the same last tokens after another beginning are not stored for this one."""
        model = self.load()
        other = torch.cat([PROMPT[:, :48].flip(1), PROMPT[:, 48:]], dim=1)
        with self.reusing(model) as prefixes:
            cache = computed(model, PROMPT, empty(prefixes))
            self.plain(model, other[:, :49])
            with self.assertRaisesRegex(InputError, "K of other tokens"):
                prefixes.save(other, cache)

    @pytest.mark.thorough
    def test_copies(self) -> None:
        """A copy or a pickle of the model inside of the block is a plain model."""
        model = self.load()
        expected = self.plain(model)
        with self.reusing(model):
            copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
            torch.save(model, io.BytesIO())
            for other in (copied, pickled):
                self.assertIs(other, other.generate.__self__)
                self.assertEqual(expected, self.plain(other))
            self.assertEqual(expected, self.plain(model))
            mine = model.generate = lambda *_, **__: None
        self.assertIs(mine, model.generate)

    @pytest.mark.thorough
    def test_what_transformers_makes_of_a_call(self) -> None:
        """Settings, padding token and mask are transformers' own, both ways."""
        from transformers import GenerationConfig

        ids = torch.cat([torch.full((1, 40), 3), PROMPT], dim=1)
        ones = torch.ones_like(ids)

        def model() -> Any:
            made = self.load()
            made.generation_config.pad_token_id, made.generation_config.eos_token_id = 3, None
            return made

        def ask(asked: Any, **call: Any) -> list[int]:
            config = GenerationConfig(max_new_tokens=6, do_sample=False)
            out: list[int] = asked.generate(ids, generation_config=config, **call)[0].tolist()
            return out

        inferred, whole = ask(model()), ask(model(), attention_mask=ones)
        self.assertNotEqual(inferred, whole)  # the mask matters
        for first, second in (({}, {"attention_mask": ones}), ({"attention_mask": ones}, {})):
            self.store = self.root / f"{len(first)}"
            with self.reusing(asked := model()):
                for call in (first, second, first, second):
                    self.assertEqual(whole if call else inferred, ask(asked, **call))


@unittest.skipUnless(util.find_spec("transformers"), "transformers is not installed")
class TensorsTest(unittest.TestCase):
    def setUp(self) -> None:
        """A model with a tied tensor, an odd size, no elements, and another dtype."""
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 7))
        model[1].weight = torch.nn.Parameter(torch.randn(3, 5).to(torch.bfloat16))
        model.register_buffer("empty", torch.empty(0, 3))
        model.register_buffer("passing", torch.arange(11, dtype=torch.int16), persistent=False)
        model.tied = model[0]
        self.model = model

    def test_sums(self) -> None:
        """One element by an array changes the sum, in any tensor; put back, it is the same."""
        from vua.transformers.probe import sums

        before = sums(self.model)
        self.assertEqual(before, sums(self.model))
        for tensor in (self.model[0].bias, self.model[1].bias, self.model.passing):
            array = tensor.detach().numpy()
            array[2] += 1
            self.assertNotEqual(before, sums(self.model))
            array[2] -= 1
        self.model[1].weight.data[0, 0] *= 2
        self.assertNotEqual(before, sums(self.model))

    @pytest.mark.gpu
    def test_sums_on_a_gpu(self) -> None:
        """One element changes the sum there; the same bytes elsewhere have the same."""
        from vua.transformers.probe import sums

        model = self.model.to("cuda")
        before = sums(model)
        model[0].weight.data = model[0].weight.data.clone()
        self.assertEqual(before, sums(model))
        model[0].weight.data[3, 3] += 1
        self.assertNotEqual(before, sums(model))

    def test_digest(self) -> None:
        """Names, dtypes, shapes and bytes count; what is not saved does not."""
        from vua.transformers.probe import digest

        go = threading.Event()
        before = digest(self.model, go)
        self.model.passing += 1
        self.assertEqual(before, digest(self.model, go))
        self.model[0].weight.data = self.model[0].weight.data.view(7, 5)
        other = digest(self.model, go)
        self.assertNotEqual(before, other)
        self.model[0].weight.data[3, 3] += 1
        self.assertNotEqual(other, digest(self.model, go))
        go.set()
        with self.assertRaises(CancelledError):
            digest(self.model, go)

    def test_bytes(self) -> None:
        """Zeros of another sign and another dtype are other bytes."""
        from vua.transformers.probe import same_bytes

        zeros = torch.zeros(3)
        self.assertTrue(same_bytes(zeros, zeros.clone()))
        self.assertFalse(same_bytes(zeros, -zeros))
        self.assertFalse(same_bytes(zeros, zeros.int()))
