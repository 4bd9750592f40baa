"""`reuse_prefixes`: calls of `generate` as programs have them, with stored prefixes and without."""

from __future__ import annotations

import copy
import functools
import re
import sys
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch

from helpers import ROOT
from transformers_case import GREEDY, TransformersTest, prompt_of
from vua import InputError, StorageError
from vua.capacity.hit_density import UseLog

PROMPT = prompt_of(100)


def padded(*rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """A batch of sequences (T,), padded on the left with a token that means something elsewhere."""
    width = max(len(row) for row in rows)
    ids, mask = torch.full((len(rows), width), 7), torch.zeros((len(rows), width), dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, width - len(row) :], mask[number, width - len(row) :] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def of_probe(frame: FrameType) -> bool:
    """Whether VUA itself computes."""
    back: FrameType | None = frame
    while back is not None and not back.f_code.co_filename.endswith("transformers/probe.py"):
        back = back.f_back
    return back is not None


class GenerationTest(TransformersTest):
    model: Any

    @classmethod
    def setUpClass(cls) -> None:
        """One model for all tests."""
        super().setUpClass()
        cls.model = cls.load()

    def setUp(self) -> None:
        """Count what the model computes."""
        super().setUp()
        self.columns: list[int] = []
        compute = type(self.model.model).forward

        @functools.wraps(compute)
        def counted(module: Any, *args: Any, **named: Any) -> Any:
            if not of_probe(sys._getframe()):
                ids = named["input_ids"]
                self.columns.append(0 if ids is None else ids.shape[1])
            return compute(module, *args, **named)

        self.enterContext(mock.patch.object(type(self.model.model), "forward", counted))

    def ask(self, **call: Any) -> tuple[list[list[int]], int]:
        """What is generated, and how many columns were computed in the first pass."""
        torch.manual_seed(3)
        self.columns.clear()
        output = self.model.generate(**{**GREEDY, **call})
        return output.tolist(), self.columns[0]

    def check(self, loaded: int, *, last: str = "", **call: Any) -> None:
        """The same call without VUA, cold and warm: the same tokens; so many columns loaded."""
        expected, width = self.ask(**call)
        with self.reusing(self.model):
            cold = self.ask(**call)
            warm = self.ask(**call)
        self.assertEqual((expected, width), cold, last)
        self.assertEqual((expected, width - loaded), warm, last)

    def test_one_sequence(self) -> None:
        """In the simplest form; outside of the block the model is as it was."""
        self.check(96, input_ids=PROMPT)
        self.assertNotIn("generate", self.model.__dict__)
        self.assertEqual(100, self.ask(input_ids=PROMPT)[1])
        with self.reusing(self.model):
            call = {**GREEDY, "max_new_tokens": 16, "min_new_tokens": 16}
            out = self.model.generate(PROMPT, **call)  # what was generated is stored, too
            longer = torch.cat([out, PROMPT[:, :12]], dim=1)
            self.assertEqual(16, self.ask(input_ids=longer)[1])

    def test_start(self) -> None:
        """The lines of the page Start run as they stand, and store."""
        text = (ROOT / "docs" / "quickstart.md").read_text("utf-8")
        (block,) = re.findall(r"```python\n([^`]*reuse_prefixes[^`]*)```", text)
        inputs = {**GREEDY, "input_ids": PROMPT}
        code = block.replace("/mnt/kv", str(self.store))
        self.assertNotEqual(block, code)
        exec(code, {"model": self.model, "inputs": inputs})
        with self.reusing(self.model) as prefixes:
            self.assertTrue(prefixes.ready())

    @pytest.mark.thorough
    def test_one_request_counts_once(self) -> None:
        """A prompt that is loaded, and stored with what was generated, is one logged request."""
        with self.reusing(self.model):
            for _ in range(2):  # stored, then loaded
                self.ask(input_ids=PROMPT)
            self.ask(input_ids=torch.cat([PROMPT, PROMPT[:, :50]], dim=1))
        used = [len(one.chunks) for one in UseLog(self.store).records()]
        self.assertEqual([6, 6, 9], [chunks for chunks in used if chunks > 1])  # 1: the probe

    @pytest.mark.thorough
    def test_left_padding(self) -> None:
        """Of a batch as many columns are loaded as all rows have; padding does not matter."""
        rows = PROMPT[0], PROMPT[0, :70].flip(0), PROMPT[0, :83]
        self.check(94, **padded(*rows))  # 30 columns of padding, 64 of 70 tokens
        with self.reusing(self.model):
            self.assertEqual(4, self.ask(input_ids=PROMPT)[1])  # stored without the padding
            self.assertEqual(6, self.ask(input_ids=rows[1][None])[1])
            strange = padded(rows[0], PROMPT[0, 3:90])
            self.assertEqual(87, self.ask(**strange)[1])  # one row is new, but begins with padding
            strange = padded(rows[0], PROMPT[0].roll(3))
            self.assertEqual(100, self.ask(**strange)[1])
            short = padded(rows[0], PROMPT[0, 90:])
            self.assertEqual(10, self.ask(**short)[1])  # the other row is all padding until there

    def test_values_matter(self) -> None:
        """With other K and V in the cache other tokens follow: equal tokens prove something."""
        from vua.transformers import PrefixCache

        batch = padded(PROMPT[0], PROMPT[0, :70].flip(0))
        expected, _ = self.ask(**batch)
        load = PrefixCache.load

        def forged(*args: Any, **kwargs: Any) -> Any:
            prefix = load(*args, **kwargs)
            for layer in prefix.cache.layers:
                layer.values = layer.values.flip(2)
            return prefix

        with self.reusing(self.model):
            self.ask(**batch)
            with mock.patch.object(PrefixCache, "load", forged):
                wrong, columns = self.ask(**batch)
        self.assertEqual(6, columns)
        self.assertTrue(all(one != other for one, other in zip(wrong, expected, strict=True)))

    @pytest.mark.thorough
    def test_ways_of_generating(self) -> None:
        """Beams, sampling, several sequences, penalties, results as objects, stopping criteria."""
        batch = padded(PROMPT[0], PROMPT[0, :90].flip(0))
        ways: dict[str, dict[str, Any]] = {
            "beams": {"num_beams": 3},
            "several beams": {"num_beams": 3, "num_return_sequences": 2},
            "sampling": {"do_sample": True, "temperature": 0.8},
            "several": {"do_sample": True, "num_return_sequences": 3},
            "sampling beams": {"do_sample": True, "num_beams": 2},
            "penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
            "dynamic": {"cache_implementation": None, "use_cache": True},
            "dynamic in words": {"cache_implementation": "dynamic"},
        }
        for name, way in ways.items():
            with self.subTest(name):
                self.store = self.root / name
                self.check(90, last=name, **batch, **way)

    @pytest.mark.thorough
    def test_ends(self) -> None:
        """Sequences of a batch that end early: what follows their end is not stored."""
        from vua.transformers import PrefixCache

        batch = padded(PROMPT[0], PROMPT[0, :90].flip(0))
        first = self.ask(**batch, max_new_tokens=40)[0]
        end = first[0][103]
        with self.reusing(self.model) as prefixes:
            assert isinstance(prefixes, PrefixCache)
            with mock.patch.object(prefixes, "save", wraps=prefixes.save) as save:
                self.model.generate(**batch, eos_token_id=end, pad_token_id=5, max_new_tokens=40)
        stored = save.call_args.args[0]
        ended = [row.index(end, 100) for row in first if end in row[100:]]
        self.assertEqual(min(ended) + 1, stored.shape[1])

    @pytest.mark.thorough
    def test_streams_and_pipelines(self) -> None:
        """A streamer gets the same tokens; a pipeline's calls go through it."""
        from transformers import AutoTokenizer, pipeline
        from transformers.generation.streamers import BaseStreamer

        class Streamer(BaseStreamer):
            def __init__(self) -> None:
                self.got: list[list[int]] = []

            def put(self, value: torch.Tensor) -> None:
                self.got.append(value.flatten().tolist())

            def end(self) -> None:
                self.got.append([])

        streamed = []
        for _ in range(2):
            with self.reusing(self.model):
                streamer = Streamer()
                self.ask(input_ids=PROMPT, streamer=streamer)
            streamed.append((streamer.got, self.columns[0]))
        self.assertEqual(streamed[0][0], streamed[1][0])
        self.assertEqual([100, 4], [columns for _, columns in streamed])

        tokenizer = AutoTokenizer.from_pretrained(self.path())
        tokenizer.padding_side = "left"
        text = " ".join(f"t{n}" for n in range(10, 90))
        writes = pipeline("text-generation", model=self.model, tokenizer=tokenizer, device="cpu")
        expected = writes([text, text + " t5 t6 t7"], batch_size=2, **GREEDY)
        with self.reusing(self.model):
            for _ in range(2):
                self.columns.clear()
                again = writes([text, text + " t5 t6 t7"], batch_size=2, **GREEDY)
                self.assertEqual(expected, again)
            self.assertLess(self.columns[0], 20)

    @pytest.mark.thorough
    def test_without_a_prefix(self) -> None:
        """What cannot begin with a prefix is generated as ever, and the log says why, once."""
        from transformers import DynamicCache

        batch, assistant = {"input_ids": PROMPT}, copy.deepcopy(self.model)
        calls: dict[str, dict[str, Any]] = {
            "assistant_model": {**batch, "assistant_model": assistant},
            "assisted_generation": {**batch, "prompt_lookup_num_tokens": 2},
            "DynamicCache": {**batch, "cache_implementation": "static"},
            "use_cache": {**batch, "use_cache": False},
            "past_key_values": {**batch, "past_key_values": DynamicCache},
            "inputs_embeds": {"inputs_embeds": self.model.get_input_embeddings()(PROMPT)},
            "position_ids": {**batch, "position_ids": torch.arange(3, 103)[None]},
            "padding token": {"input_ids": PROMPT, "pad_token_id": int(PROMPT[0, 5])},
            "left end": {**batch, "attention_mask": (torch.arange(100) < 90).long()[None]},
            "output_hidden_states": {
                **batch,
                "return_dict_in_generate": True,
                "output_hidden_states": True,
            },
        }

        def run(call: dict[str, Any]) -> Any:
            torch.manual_seed(3)
            call = {
                name: each() if name == "past_key_values" else each for name, each in call.items()
            }
            output = self.model.generate(**{**GREEDY, **call})
            return (
                output.tolist() if isinstance(output, torch.Tensor) else output.sequences.tolist()
            )

        for word, call in calls.items():
            expected = run(call)
            with self.subTest(word), self.reusing(self.model):
                self.model.generate(PROMPT, **GREEDY)
                with self.assertLogs("vua.transformers", "WARNING") as logs:
                    for _ in range(2):
                        self.assertEqual(expected, run(call))
                self.assertEqual(1, len(logs.output))
                self.assertIn(word, logs.output[0])

    def test_trouble(self) -> None:
        """Storage that fails costs a line in the log, never the call."""
        from vua.transformers.layers import StoredLayers

        expected, _ = self.ask(input_ids=PROMPT)
        with self.reusing(self.model):
            with (
                mock.patch.object(
                    StoredLayers, "save", side_effect=StorageError("the disk is gone")
                ),
                self.assertLogs("vua.transformers", "WARNING") as logs,
            ):
                self.assertEqual((expected, 100), self.ask(input_ids=PROMPT))
            self.assertIn("the disk is gone", logs.output[0])
            self.assertEqual((expected, 100), self.ask(input_ids=PROMPT))
            with self.assertRaises(TypeError):
                self.model.generate(PROMPT, max_new_tokens="many")

    def test_refused_batches(self) -> None:
        """Of `load` and `save` themselves: padding elsewhere, masks of other shapes."""
        from transformers import DynamicCache

        right = {"attention_mask": (torch.arange(100) < 90).long()[None]}
        prefixes = self.prefixes(self.model)
        refused = {
            "left end": lambda: prefixes.load(PROMPT, **right),
            "same shape": lambda: prefixes.save(
                PROMPT, DynamicCache(), attention_mask=torch.ones(2, 100)
            ),
            "expected one sequence": lambda: prefixes.load(PROMPT[None]),
        }
        for message, attempt in refused.items():
            with self.subTest(message), self.assertRaisesRegex(InputError, message):
                attempt()
