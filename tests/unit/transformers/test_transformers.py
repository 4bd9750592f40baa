"""The adapter for Hugging Face transformers: the same tokens with a stored prefix as without."""

from __future__ import annotations

import shutil
import threading
from typing import Any, cast
from unittest import mock

import pytest
import torch

from e2e.checkpoints import edit
from helpers import in_child, keys_of, weights_known_later
from small_models import make_model
from transformers_case import CHUNK, GREEDY, WINDOW, TransformersTest, computed, empty, prompt_of
from vua import ConfigError, InputError
from vua.capacity.upkeep import parted_at, saved_at
from vua.format.identity import Identity, config_digest, counted_fields, named_by
from vua.format.layout import KVLayout
from vua.weights import weights_fingerprint

PROMPT = prompt_of(150)


def generate(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """The ids and what the model greedily adds to them."""
    call = {**GREEDY, "max_new_tokens": 12, "min_new_tokens": 12}
    return cast("torch.Tensor", model.generate(ids, past_key_values=cache, **call))


def chunks(ids: torch.Tensor) -> int:
    """How many whole chunks a cache has after `generate` returned these ids."""
    return (ids.shape[1] - 1) // CHUNK


class TestTransformers(TransformersTest):
    def stored(self, model: Any, prompt: torch.Tensor = PROMPT) -> torch.Tensor:
        """What the model generates for the prompt, after storing the prompt's prefix."""
        prefixes = self.prefixes(model)
        cache = empty(prefixes)
        out = generate(model, prompt, cache)
        self.assertEqual(chunks(out), prefixes.save(out, cache))
        return out

    @pytest.mark.thorough
    def test_loaded_bytes(self) -> None:
        """A loaded cache holds bit for bit what was saved, in any dtype."""
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            with self.subTest(dtype):
                model = self.load(dtype=dtype)
                prefixes = self.prefixes(model)
                cache = computed(model, PROMPT, empty(prefixes))
                saved = prefixes.save(PROMPT, cache)
                found = self.prefixes(model).load(PROMPT)

                self.assertEqual((9, 144), (saved, found.num_tokens))
                for one, other in zip(cache.layers, found.cache.layers, strict=True):
                    self.assertTrue(torch.equal(one.keys[:, :, :144], other.keys))
                    self.assertTrue(torch.equal(one.values[:, :, :144], other.values))

    @pytest.mark.thorough
    def test_other_models(self) -> None:
        """Other weights, settings or dtypes find nothing, even at the same path."""
        self.stored(self.load())
        path = make_model(self.root / "changing")
        same = self.load(path)
        self.assertEqual(144, self.prefixes(same).load(PROMPT).num_tokens)
        make_model(path, seed=1)  # replaces it
        other = make_model(self.root / "b")
        edit(other / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
        others = {
            "new weights, same path": (self.load(path), {}),
            "config": (self.load(other), {}),
            "dtype": (self.load(dtype=torch.bfloat16), {}),
            "epoch": (self.load(), {"epoch": "2"}),
            "chunk": (self.load(), {"chunk_tokens": 8}),
        }
        for name, (model, settings) in others.items():
            with self.subTest(name):
                self.assertEqual(0, self.prefixes(model, **settings).load(PROMPT).num_tokens)

    @pytest.mark.thorough
    def test_until_the_weights_are_known(self) -> None:
        """Nothing is loaded and nobody waits; then all is found, what was computed before, too.

        Not what did not fit in memory, nor what was computed before the weights changed.
        """
        for name, most, loud, found in (
            ("kept", 1 << 30, 1.0, 144),
            ("does not fit", 1 << 10, 1.0, 0),
            ("changed", 1 << 30, 2.0, 0),
        ):
            with self.subTest(name):
                self.store = self.root / name
                model, other = self.load(), PROMPT.flip(1)
                expected = self.stored(model)
                with (
                    weights_known_later() as go,
                    mock.patch("vua.store.identified._EARLY_NBYTES", most),
                    mock.patch("vua.transformers.cache._START_WAIT_S", 0.01),
                    self.assertLogs("vua.transformers", "INFO") as logs,
                ):
                    prefixes = self.prefixes(model)
                    for ids in (PROMPT, other):
                        prefix = prefixes.load(ids)
                        output = generate(model, ids, prefix.cache)
                        saved = prefixes.save(output, prefix.cache)
                        self.assertEqual((0, 0), (prefix.num_tokens, saved))
                        prefix.cache.layers[0].keys.zero_()  # it is its caller's again
                        if ids is PROMPT:
                            self.assertEqual(expected.tolist(), output.tolist())
                    self.assertFalse(prefixes.ready(0.01))
                    with torch.no_grad():
                        model.model.norm.weight.data *= loud
                    go.set()
                    self.assertTrue(prefixes.ready())
                    prefixes.close()
                self.assertIn("MB read", "".join(logs.output))
                with torch.no_grad():
                    model.model.norm.weight.data /= loud
                again = self.prefixes(model)
                self.assertEqual([144, found], [again.load(i).num_tokens for i in (PROMPT, other)])

    @pytest.mark.thorough
    def test_forked_child(self) -> None:
        """A forked child loads and saves, though a thread held the lock that it then needs."""
        model, other = self.load(), PROMPT.flip(1)
        self.stored(model)
        prefixes = self.prefixes(model)
        cache = computed(model, other, empty(prefixes))
        self.assertEqual(144, prefixes.load(PROMPT).num_tokens)

        def use() -> None:
            self.assertEqual(144, prefixes.load(PROMPT).num_tokens)
            self.assertEqual(9, prefixes.save(other, cache))
            self.assertTrue(prefixes.ready(60))
            prefixes.close()

        held, free = threading.Event(), threading.Event()

        def hold() -> None:
            with prefixes._state.stored._lock:  # race: the fork comes while another thread holds it
                held.set()
                free.wait(60)

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()
        try:
            ended = in_child(use)
        finally:
            free.set()
            holder.join()
        self.assertEqual("well", ended)
        self.assertEqual(144, prefixes.load(other).num_tokens)

    @pytest.mark.thorough
    def test_forked_before_the_weights_are_known(self) -> None:
        """A child looks for them itself: the thread that did is not there."""
        model = self.load()
        self.stored(model)
        with (
            weights_known_later() as go,
            mock.patch("vua.transformers.cache._START_WAIT_S", 0.01),
        ):
            prefixes = self.prefixes(model)

        def use() -> None:
            self.assertTrue(prefixes.ready(30))
            self.assertEqual(144, prefixes.load(PROMPT).num_tokens)

        try:
            ended = in_child(use)
            self.assertFalse(prefixes.ready(0))
        finally:
            go.set()
        self.assertEqual("well", ended)
        self.assertTrue(prefixes.ready())

    def test_weights_that_cannot_be_told(self) -> None:
        """Known at once: an error; later: one line in the log, misses, and `ready` says why."""
        model = self.load()
        problem = mock.patch(
            "vua.store.identified.identify_weights", side_effect=ConfigError("no way")
        )
        with problem, self.assertRaisesRegex(ConfigError, "no way"):
            self.prefixes(model)
        with problem, mock.patch("vua.store.identified.Identification.wait", return_value=False):
            prefixes = self.prefixes(model)
        for thread in threading.enumerate():
            if thread.name == "vua-identify":
                thread.join(60)
        with self.assertLogs("vua.transformers", "WARNING") as logs:
            for _ in range(2):
                self.assertEqual(0, prefixes.load(PROMPT).num_tokens)
        self.assertEqual(1, len(logs.output))
        self.assertRaises(ConfigError, prefixes.ready)

    def test_identity(self) -> None:
        """The identity has the fields that vLLM gives it, wherever the model lies."""
        from vua.transformers import identity_of

        path = self.path("qwen3")
        model = self.load(path)
        config = named_by("vllm", model.config.get_text_config().to_dict())
        expected = Identity(
            model=config_digest(config),
            weights=weights_fingerprint(path),
            kv_dtype="F32",
            rope="neox",
            epoch="e",
            chunk_tokens=CHUNK,
            name=path.name,
        )

        found = identity_of(model, chunk_tokens=CHUNK, epoch="e")
        self.assertEqual(expected, found)
        self.assertEqual(counted_fields(config), found.counted)
        layout = KVLayout(2, kv_heads=2, k_dim=32, v_dim=32, dtype="F32", chunk_tokens=CHUNK)
        self.assertEqual(layout, self.prefixes(model).layout)

    def test_short_inputs(self) -> None:
        """At least one token is left to compute; parts of chunks are not stored."""
        model = self.load()
        prefixes = self.prefixes(model)
        self.assertEqual(0, prefixes.save(PROMPT, empty(prefixes)))
        cache = computed(model, PROMPT[:, :40], empty(prefixes))

        self.assertEqual(0, prefixes.save(PROMPT[0, :15], cache))
        self.assertEqual(2, prefixes.save(PROMPT[0].tolist(), cache))
        self.assertEqual(0, prefixes.save(PROMPT, cache))
        for length, expected in ((0, 0), (1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (40, 32)):
            self.assertEqual(expected, prefixes.load(PROMPT[:, :length]).num_tokens)

    def mixed(self) -> Any:
        """A model with a layer that attends to everything between two with a window."""
        from transformers import Gemma3ForCausalLM, Gemma3TextConfig

        path = self.models / "mixed"
        if not path.exists():
            kinds = ["sliding_attention", "full_attention", "sliding_attention"]
            torch.manual_seed(5)
            config = Gemma3TextConfig(
                hidden_size=64,
                num_attention_heads=4,
                num_key_value_heads=2,
                num_hidden_layers=3,
                head_dim=16,
                intermediate_size=128,
                vocab_size=512,
                sliding_window=WINDOW,
                layer_types=kinds,
                initializer_range=0.1,
                eos_token_id=2,
                pad_token_id=3,
            )
            Gemma3ForCausalLM(config).save_pretrained(path)
        return self.load(path)

    def count(self, group: str) -> int:
        """How many files of a group of layers are stored."""
        return sum(path.name.startswith(group) for path in self.store.rglob("*.safetensors"))

    @pytest.mark.thorough
    def test_groups(self) -> None:
        """Layers with a window are a group of their own, of which a load reads what it needs."""
        from transformers import DynamicCache

        model = self.mixed()
        out = self.stored(model)
        self.assertEqual((10, 10), (self.count("w40.l0-2"), self.count("l0-1")))
        for key in keys_of(out[0].tolist(), CHUNK)[:6]:  # what the window of 144 tokens left behind
            next(self.store.rglob(f"{key.name}/w40.*")).unlink()
        for cut, whole in ((150, 144), (140, 0), (40, 0)):
            with self.subTest(cut=cut):
                ids = PROMPT[:, :cut]
                expected = generate(model, ids, DynamicCache())
                found = self.prefixes(model).load(ids)
                self.assertEqual(whole, found.num_tokens)
                self.assertEqual(expected.tolist(), generate(model, ids, found.cache).tolist())
        self.assertEqual(out.tolist(), generate(model, PROMPT, DynamicCache()).tolist())

    @pytest.mark.thorough
    def test_nothing_but_what_was_loaded(self) -> None:
        """What a window has left behind is not stored as zeros when the cache is saved again."""
        from transformers import DynamicCache

        model = self.mixed()
        self.stored(model)
        prefixes = self.prefixes(model)
        found = prefixes.load(PROMPT)
        longer = torch.cat([PROMPT[:, :144], PROMPT[:, :60]], dim=1)
        out = generate(model, longer, found.cache)
        expected = generate(model, longer, DynamicCache())
        for path in self.store.rglob("*.safetensors"):  # nothing of it is stored any more
            path.unlink()
        prefixes.save(out, found.cache)
        self.assertEqual((0, 13), (prefixes.load(longer[:, :100]).num_tokens, self.count("l0-1")))
        again = prefixes.load(longer)
        self.assertEqual(192, again.num_tokens)
        self.assertEqual(expected.tolist(), out.tolist())
        self.assertEqual(expected.tolist(), generate(model, longer, again.cache).tolist())

    @pytest.mark.thorough
    def test_where_prompts_part(self) -> None:
        """What is noted is what is stored of each row, also where it is not loaded."""
        model = self.load()
        self.stored(model)
        other, both = PROMPT.clone(), torch.cat([PROMPT, PROMPT])
        other[0, 100], both[1, 3] = 3, 3
        prefixes = self.prefixes(model)
        for ids in (PROMPT, other, both, PROMPT[:, :CHUNK]):
            prefixes.load(ids)
        prefixes.close()
        ((_, noted),) = parted_at(self.store).items()
        ends = {"whole": 2, "128": 1, "16": 1, "short": 1}
        self.assertEqual({prefixes.identity.namespace: ends}, noted)

    def test_seconds_saved(self) -> None:
        """Three measured prefills give a load its price."""
        model = self.load()
        self.stored(model)
        prefixes = self.prefixes(model)
        for first in range(3):
            other = torch.cat([PROMPT[:, first : first + 1], PROMPT], dim=1)
            self.assertEqual(0, (prefix := prefixes.load(other)).num_tokens)
            prefixes.save(other, computed(model, other, prefix.cache))
        self.assertEqual(144, prefixes.load(PROMPT).num_tokens)
        prefixes.close()
        self.assertEqual(144, sum(one.priced_tokens for one in saved_at(self.store).values()))

    @pytest.mark.thorough
    def test_what_was_loaded_is_not_looked_at(self) -> None:
        """A save begins where a load ended; a hole is found by the next load, and filled."""
        from vua.store.writer import EntryWriter
        from vua.transformers.model import Description

        model = self.load()
        out = self.stored(model)
        prefixes = self.prefixes(model)
        prefix = prefixes.load(PROMPT)
        with (
            mock.patch.object(Description, "change") as checked,
            mock.patch.object(EntryWriter, "save") as written,
        ):
            self.assertEqual(0, prefixes.save(PROMPT, prefix.cache))
        self.assertEqual((0, 0), (checked.call_count, written.call_count))

        keys = keys_of(out[0].tolist(), CHUNK)
        shutil.rmtree(next(self.store.rglob(keys[3].name)))
        prefix = prefixes.load(out)
        self.assertEqual(3 * CHUNK, prefix.num_tokens)
        again = generate(model, out, prefix.cache)
        self.assertGreater(prefixes.save(again, prefix.cache), 0)
        self.assertEqual(chunks(out) * CHUNK, prefixes.load(out).num_tokens)
        other = PROMPT.clone()
        other[0, 20] += 1  # not what was loaded
        with self.assertRaisesRegex(InputError, "from token 20 on"):
            prefixes.save(other, prefixes.load(PROMPT).cache)

    @pytest.mark.thorough
    def test_batch_of_windows(self) -> None:
        """In a batch a hit may end within a chunk; its window is read to just there."""
        model = self.mixed()
        mask = torch.ones((2, 150), dtype=torch.long)
        mask[1, :23] = 0
        ids = torch.cat([PROMPT, PROMPT.flip(1)])
        batch = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 9, "do_sample": False}
        expected = model.generate(**batch)
        with self.reusing(model) as prefixes:
            for _ in range(2):
                self.assertEqual(expected.tolist(), model.generate(**batch).tolist())
            self.assertEqual(135, prefixes.load(ids, attention_mask=mask).num_tokens)

    def test_refused_caches(self) -> None:
        """Caches that were not loaded here, or have other rows or dtypes, are refused in words."""
        from transformers import DynamicCache, StaticCache

        model = self.load()
        prefixes, other = self.prefixes(model), self.prefixes(model)
        half = empty(prefixes)
        for number, layer in enumerate(computed(model, PROMPT, DynamicCache()).layers):
            half.update(layer.keys.half(), layer.values.half(), number)
        whole = computed(model, PROMPT, empty(prefixes))
        static = StaticCache(config=model.config, max_cache_len=200)
        for message, ids, cache in (
            (r"a DynamicCache that load\(\) .* did not return", PROMPT, DynamicCache()),
            ("a StaticCache that load", PROMPT, static),
            ("_NotedCache that load", PROMPT, empty(other)),
            ("F16.*expected", PROMPT, half),
            (r"\(1, 2, 150, 32\).*expected", PROMPT.repeat(2, 1), whole),
        ):
            with self.subTest(message), self.assertRaisesRegex(InputError, message):
                prefixes.save(ids, cache)
        self.assertEqual(1, self.count(""))  # the probe

    def test_damage(self) -> None:
        """A damaged chunk shortens the prefix, and the same tokens follow."""
        model = self.load()
        expected = self.stored(model)
        files = sorted(self.store.rglob("*.safetensors"))
        self.assertTrue(files)
        for file in files[:3]:
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        with self.assertLogs("vua", "WARNING"):
            found = self.prefixes(model).load(PROMPT)

        self.assertLess(found.num_tokens, 144)
        self.assertEqual(expected.tolist(), generate(model, PROMPT, found.cache).tolist())


WHOLE = PROMPT.shape[1] // CHUNK * CHUNK


class TestOtherEngines(TransformersTest):
    def model(self, family: str = "llama", *, otherwise: bool = False) -> Any:
        """The model; ``otherwise``: its files are the same, and it computes something else."""
        model = self.load(self.path(family))
        if otherwise:
            model.model.layers[0].post_attention_layernorm.variance_epsilon = 0.5
        return model

    def save(self, model: Any, ids: torch.Tensor = PROMPT, **settings: Any) -> Any:
        """Let a model compute ids and store them; what it is stored with."""
        prefixes = self.prefixes(model, **settings)
        self.assertEqual(
            ids.shape[1] // CHUNK, prefixes.save(ids, computed(model, ids, empty(prefixes)))
        )
        return prefixes

    def by_vllm(self) -> set[str]:
        """The chunks under vLLM's name."""
        from vua.transformers import identity_of

        folder = self.store / identity_of(self.model(), chunk_tokens=CHUNK).namespace
        return {path.parent.name for path in folder.glob("??/*/*.safetensors")}

    def test_loads(self) -> None:
        """A model finds what vLLM stored for its files if it computes the same, else nothing.

        After three differences nothing is compared any more.
        """
        self.save(self.model(), share=True)
        chunks = self.by_vllm()
        self.assertEqual(WHOLE // CHUNK, len(chunks))
        self.assertEqual(WHOLE, self.prefixes(self.model()).load(PROMPT).num_tokens)
        other = self.prefixes(self.model(otherwise=True))
        with self.assertLogs("vua.transformers", "WARNING") as said:
            for _ in range(3):
                self.assertEqual(0, other.load(PROMPT).num_tokens)
        self.assertEqual(1, len(said.output))
        self.assertIn("what vLLM has stored for its files is not what this model", said.output[0])
        with mock.patch("vua.transformers.model.run", side_effect=AssertionError):
            self.assertEqual(0, other.load(PROMPT).num_tokens)

    def test_not_asked(self) -> None:
        """Unless it is asked to, nothing is stored under vLLM's name."""
        self.save(self.model())
        self.assertEqual(set(), self.by_vllm())
        self.assertEqual(WHOLE, self.prefixes(self.model()).load(PROMPT).num_tokens)

    def test_shares_beside_what_agrees(self) -> None:
        """What is shared goes on from what is stored if a load has found that to agree."""
        self.save(self.model(), PROMPT[:, :100], share=True)
        chunks = self.by_vllm()
        model = self.model(otherwise=True)
        other = self.save(model, share=True)  # nothing was loaded, so nothing compared
        self.assertEqual(chunks, self.by_vllm())
        longer = torch.cat([PROMPT[:, :100], PROMPT], dim=1)
        loaded = other.load(longer)
        self.assertEqual(96, loaded.num_tokens)  # its own, so nothing is compared
        cache = computed(model, longer[:, 96:], loaded.cache)
        self.assertGreater(other.save(longer, cache), 0)
        self.assertEqual(chunks, self.by_vllm())
        self.assertEqual(WHOLE, other.load(PROMPT).num_tokens)  # its own

        model = self.model()
        right = self.prefixes(model, share=True)
        self.assertEqual(96, right.load(PROMPT).num_tokens)
        cache = computed(model, PROMPT[:, 96:], right.load(PROMPT).cache)
        self.assertEqual((WHOLE - 96) // CHUNK, right.save(PROMPT, cache))
        self.assertLess(chunks, self.by_vllm())
        self.assertEqual(WHOLE, self.prefixes(self.model()).load(PROMPT).num_tokens)

    def test_windows_alone(self) -> None:
        """Loaded windows of another engine are not stored a second time; nor is that an error."""
        model = self.model("mistral")
        self.assertEqual(WINDOW, model.config.sliding_window)
        self.save(model, share=True)
        prefixes = self.prefixes(model)
        cache = prefixes.load(PROMPT).cache
        self.assertEqual(WHOLE, cache.get_seq_length())
        computed(model, PROMPT[:, WHOLE:], cache)
        self.assertEqual(0, prefixes.save(PROMPT, cache))
        self.assertEqual(
            WHOLE // CHUNK, prefixes.save(PROMPT, computed(model, PROMPT, empty(prefixes)))
        )

    def test_not_its_files(self) -> None:
        """A model that is not what its files hold neither finds nor shares."""
        self.save(self.model(), PROMPT[:, :100], share=True)
        chunks, tuned = self.by_vllm(), self.model()
        with torch.no_grad():
            tuned.model.layers[1].mlp.up_proj.weight.mul_(1.01)
        with self.assertLogs("vua.transformers", "WARNING") as said:
            prefixes = self.prefixes(tuned, share=True)
        self.assertIn("stored for itself", said.output[0])
        self.assertEqual(0, prefixes.load(PROMPT).num_tokens)
        self.save(tuned)
        self.assertEqual(chunks, self.by_vllm())
