"""The adapter for Hugging Face transformers: the same tokens with a stored prefix as without."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest
import warnings
from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import SOON_S, in_child, keys_of
from small_models import Family, make_model
from vua import ConfigError, InputError
from vua.capacity.saved import parted_at
from vua.core import VUA, VUAConfig
from vua.format.identity import Identity, config_digest, counted_fields, named_by
from vua.weights import identify_weights, weights_fingerprint

CHUNK = 16
WINDOW = 40
PROMPT = torch.randint(4, 512, (1, 150), generator=torch.Generator().manual_seed(1))
NEW_TOKENS = 12

SECOND_PROCESS = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
from vua.transformers import PrefixCache
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="eager")
ids = torch.tensor([json.loads(sys.argv[3])])
with PrefixCache(model, sys.argv[2], chunk_tokens=16) as prefixes:
    prefix = prefixes.load(ids)
    out = model.generate(
        ids, past_key_values=prefix.cache, max_new_tokens=12, min_new_tokens=12, do_sample=False
    )
print(json.dumps([prefix.num_tokens, out[0].tolist()]))
"""


def load(path: Path, **settings: Any) -> Any:
    """The model at a path."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", **settings)


def generate(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """The ids and what the model greedily adds to them."""
    return cast(
        "torch.Tensor",
        model.generate(
            ids,
            past_key_values=cache,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
        ),
    )


def edit_config(path: Path, **changes: Any) -> Path:
    """Change keys of a checkpoint's config."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    return path


def chunks(ids: torch.Tensor) -> int:
    """How many whole chunks a cache has after `generate` returned these ids."""
    return (ids.shape[1] - 1) // CHUNK


@unittest.skipUnless(util.find_spec("transformers"), "transformers is not installed")
class TestTransformers(unittest.TestCase):
    models: tempfile.TemporaryDirectory[str]

    @classmethod
    def setUpClass(cls) -> None:
        """A folder for the models, which all tests share."""
        cls.models = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        cls.addClassCleanup(cls.models.cleanup)

    def setUp(self) -> None:
        """A store of its own."""
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.store = self.folder / "kv"
        patience = mock.patch("vua.transformers.cache._START_WAIT_S", SOON_S)
        patience.start()
        self.addCleanup(patience.stop)
        catching = warnings.catch_warnings()
        catching.__enter__()
        self.addCleanup(catching.__exit__, None, None, None)
        warnings.simplefilter("ignore")  # transformers' own

    def model_path(self, family: Family = "llama", **sizes: Any) -> Path:
        """A checkpoint that this class made once."""
        name = "-".join([family, *(f"{key}{value}" for key, value in sizes.items())])
        path = Path(self.models.name, name)
        if not path.exists():
            make_model(path, family=family, **sizes)
            if family == "mistral":
                edit_config(path, sliding_window=WINDOW)
        return path

    def prefixes(self, model: Any, **settings: Any) -> Any:
        """A PrefixCache in this test's store."""
        from vua.transformers import PrefixCache

        prefixes = PrefixCache(
            model, self.store, **{"chunk_tokens": CHUNK, "load_policy": "always", **settings}
        )
        self.addCleanup(prefixes.close)
        return prefixes

    def stored(self, model: Any, prompt: torch.Tensor = PROMPT) -> torch.Tensor:
        """What the model generates for the prompt, after storing the prompt's prefix."""
        from transformers import DynamicCache

        cache = DynamicCache()
        out = generate(model, prompt, cache)
        self.assertEqual(chunks(out), self.prefixes(model).save(out, cache))
        return out

    @pytest.mark.thorough
    def test_same_tokens(self) -> None:
        """Whatever part of a prompt is loaded, the same tokens follow, also in later turns."""
        self.check_same_tokens("llama", cuts=(150, 64, 17))

    @pytest.mark.thorough
    def test_same_tokens_of_every_family(self) -> None:
        """As above, for more models and more parts."""
        self.check_same_tokens("llama", "qwen3", "mistral", cuts=(150, 100, 65, 64, 17, 16, 1))

    def check_same_tokens(self, *families: Family, cuts: Sequence[int]) -> None:
        """Compare generated tokens after each of these parts of the prompt was loaded."""
        from transformers import DynamicCache

        for family in families:
            model = load(self.model_path(family))
            first = self.stored(model)
            for cut in cuts:
                with self.subTest(family, cut=cut):
                    ids = torch.cat([PROMPT[:, :cut], PROMPT[:, :20].flip(1)], dim=1)
                    expected = generate(model, ids, DynamicCache(config=model.config))
                    found = self.prefixes(model).load(ids)
                    actual = generate(model, ids, found.cache)

                    self.assertEqual(cut // CHUNK * CHUNK, found.num_tokens)
                    self.assertEqual(expected.tolist(), actual.tolist())
            with self.subTest(family, turn=2):
                ids = torch.cat([first, PROMPT[:, :10]], dim=1)
                expected = generate(model, ids, DynamicCache(config=model.config))
                found = self.prefixes(model).load(ids)

                self.assertEqual(chunks(first) * CHUNK, found.num_tokens)
                self.assertEqual(expected.tolist(), generate(model, ids, found.cache).tolist())
                more = self.prefixes(model).save(expected, found.cache)
                self.assertEqual(chunks(expected) - chunks(first), more)

    @pytest.mark.thorough
    def test_loaded_bytes(self) -> None:
        """A loaded cache holds bit for bit what was saved, in any dtype."""
        from transformers import DynamicCache

        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            with self.subTest(dtype):
                model = load(self.model_path(), dtype=dtype)
                cache = DynamicCache()
                model(PROMPT, past_key_values=cache)
                saved = self.prefixes(model).save(PROMPT, cache)
                found = self.prefixes(model).load(PROMPT)

                self.assertEqual((9, 144), (saved, found.num_tokens))
                for one, other in zip(cache.layers, found.cache.layers, strict=True):
                    self.assertTrue(torch.equal(one.keys[:, :, :144], other.keys))
                    self.assertTrue(torch.equal(one.values[:, :, :144], other.values))

    @pytest.mark.thorough
    def test_second_process(self) -> None:
        """Another process finds the prefix and generates the same tokens."""
        path = self.model_path()
        expected = self.stored(load(path))
        ran = subprocess.run(
            [
                *(sys.executable, "-W", "ignore", "-c", SECOND_PROCESS),
                *(str(path), str(self.store), json.dumps(PROMPT[0].tolist())),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )

        self.assertEqual([144, expected[0].tolist()], json.loads(ran.stdout))

    def test_values_matter(self) -> None:
        """A store with random V gives other tokens: equal tokens prove something."""
        model = load(self.model_path())
        expected = self.stored(model)
        found = self.prefixes(model).load(PROMPT)
        generator = torch.Generator().manual_seed(2)
        forged = [
            (layer.keys, torch.randn(layer.values.shape, generator=generator))
            for layer in found.cache.layers
        ]
        store = self.folder / "forged"
        identity = self.prefixes(model).identity
        with VUA(VUAConfig(split_factor=CHUNK), store, identity=identity) as vua:
            vua.put(PROMPT[:, :144], forged)
        self.store = store
        wrong = self.prefixes(model).load(PROMPT)

        self.assertEqual(144, wrong.num_tokens)
        self.assertNotEqual(expected.tolist(), generate(model, PROMPT, wrong.cache).tolist())

    @pytest.mark.thorough
    def test_other_models(self) -> None:
        """Other weights, settings or dtypes find nothing, even at the same path."""
        self.stored(load(self.model_path()))
        path = make_model(self.folder / "changing")
        same = load(path)
        self.assertEqual(144, self.prefixes(same).load(PROMPT).num_tokens)
        make_model(path, seed=1)  # replaces it
        rope = {"rope_type": "default", "rope_theta": 5e5}
        others = {
            "new weights, same path": (load(path), {}),
            "config": (load(edit_config(make_model(self.folder / "b"), rope_parameters=rope)), {}),
            "dtype": (load(self.model_path(), dtype=torch.bfloat16), {}),
            "epoch": (load(self.model_path()), {"epoch": "2"}),
            "chunk": (load(self.model_path()), {"chunk_tokens": 8}),
        }
        for name, (model, settings) in others.items():
            with self.subTest(name):
                self.assertEqual(0, self.prefixes(model, **settings).load(PROMPT).num_tokens)

    @pytest.mark.thorough
    def test_ten_rows_of_the_embedding(self) -> None:
        """A checkpoint with a few tokens trained has caches of its own; put back, it has all."""
        path = make_model(self.folder / "trained")
        file = path / "model.safetensors"
        before = file.read_bytes()
        prompt = torch.cat([torch.arange(100, 110), torch.arange(200, 274)])[None]
        self.stored(load(path), prompt)
        tensors = load_file(file)
        tensors["model.embed_tokens.weight"][100:110] += 0.5
        save_file(tensors, file, {"format": "pt"})
        self.assertEqual(0, self.prefixes(load(path)).load(prompt).num_tokens)
        file.write_bytes(before)
        self.assertEqual(80, self.prefixes(load(path)).load(prompt).num_tokens)

    def test_other_files_of_the_same_weights(self) -> None:
        """Sharded otherwise, with other metadata, with a trainer's files beside: all is found."""
        self.stored(load(self.model_path()))
        model, path = load(self.model_path()), self.folder / "sharded"
        model.save_pretrained(path, max_shard_size="300KB")
        self.assertLess(1, len([*path.glob("*.safetensors")]))
        (path / "training_args.bin").write_bytes(b"of no use")

        self.assertEqual(144, self.prefixes(load(path)).load(PROMPT).num_tokens)

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
                self.store = self.folder / name
                model, other, go = load(self.model_path()), PROMPT.flip(1), threading.Event()
                expected = self.stored(model)
                self.addCleanup(go.set)

                def later(*args: Any, go: threading.Event = go, **settings: Any) -> Any:
                    go.wait(60)
                    return identify_weights(*args, **settings)

                with (
                    mock.patch("vua.store.identified.identify_weights", later),
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
        from transformers import DynamicCache

        model, other, cache = load(self.model_path()), PROMPT.flip(1), DynamicCache()
        self.stored(model)
        with torch.no_grad():
            model(input_ids=other, past_key_values=cache)
        prefixes = self.prefixes(model)
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
        model = load(self.model_path())
        self.stored(model)
        go = threading.Event()

        def later(*args: Any, **settings: Any) -> Any:
            go.wait(60)
            return identify_weights(*args, **settings)

        with (
            mock.patch("vua.store.identified.identify_weights", later),
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
        model = load(self.model_path())
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
        from vua.transformers import identity_of, layout_of

        path = self.model_path("qwen3")
        model = load(path)
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
        self.assertEqual(
            {"layers": 2, "kv_heads": 2, "k_dim": 32, "v_dim": 32, "dtype": "F32"},
            {k: v for k, v in layout_of(model).describe().items() if k != "chunk_tokens"},
        )

    @pytest.mark.thorough
    def test_hub_snapshot(self) -> None:
        """A model named by its hub id is identified by its files in the hub's cache."""
        code = """
import sys
from transformers import AutoModelForCausalLM
from vua.transformers import identity_of
one, other = (identity_of(AutoModelForCausalLM.from_pretrained(name)) for name in sys.argv[1:])
print(one.namespace == other.namespace, one.name)
"""
        path, revision = self.model_path(), "0" * 40
        repo = self.folder / "hub" / "models--some--model"
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text(revision, encoding="utf-8")
        (repo / "snapshots").mkdir()
        (repo / "snapshots" / revision).symlink_to(path)
        env = {"HF_HUB_CACHE": str(repo.parent), "HF_HUB_OFFLINE": "1"}
        ran = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, "some/model", str(path)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )

        self.assertEqual("True some/model", ran.stdout.strip())

    def test_short_inputs(self) -> None:
        """At least one token is left to compute; parts of chunks are not stored."""
        from transformers import DynamicCache

        model = load(self.model_path())
        prefixes = self.prefixes(model)
        cache = DynamicCache()
        self.assertEqual(0, prefixes.save(PROMPT, cache))
        model(PROMPT[:, :40], past_key_values=cache)

        self.assertEqual(0, prefixes.save(PROMPT[0, :15], cache))
        self.assertEqual(2, prefixes.save(PROMPT[0].tolist(), cache))
        self.assertEqual(0, prefixes.save(PROMPT, cache))
        for length, expected in ((0, 0), (1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (40, 32)):
            self.assertEqual(expected, prefixes.load(PROMPT[:, :length]).num_tokens)

    @pytest.mark.thorough
    def test_sliding_windows(self) -> None:
        """A cache that dropped tokens is refused; one that fits the window, or fills it, is not."""
        from transformers import DynamicCache

        model = load(self.model_path("mistral"))
        prefixes = self.prefixes(model)
        trimmed = DynamicCache(config=model.config)
        out = generate(model, PROMPT, trimmed)
        with self.assertRaisesRegex(InputError, r"holds tokens 128 to 160 alone.*DynamicCache\(\)"):
            prefixes.save(out, trimmed)
        short = DynamicCache(config=model.config)
        model(PROMPT[:, :35], past_key_values=short)
        self.assertEqual(2, prefixes.save(PROMPT, short))
        self.assertEqual(out.tolist(), self.stored_again(prefixes, model).tolist())
        small = prefixes.load(PROMPT, DynamicCache(config=model.config))

        self.assertEqual((144, WINDOW - 1), (small.num_tokens, small.cache.layers[0].keys.shape[2]))
        self.assertEqual(out.tolist(), generate(model, PROMPT, small.cache).tolist())

    def stored_again(self, prefixes: Any, model: Any) -> torch.Tensor:
        """What follows a loaded prefix, after saving the cache that was loaded and extended."""
        found = prefixes.load(PROMPT)
        out = generate(model, PROMPT, found.cache)
        self.assertEqual(chunks(out) - 2, prefixes.save(out, found.cache))
        return out

    def mixed(self) -> Any:
        """A model with a layer that attends to everything between two with a window."""
        from transformers import Gemma3ForCausalLM, Gemma3TextConfig

        path = Path(self.models.name, "mixed")
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
        return load(path)

    def files(self, group: str) -> int:
        """How many files of a group of layers are stored."""
        return sum(path.name.startswith(group) for path in self.store.rglob("*.safetensors"))

    @pytest.mark.thorough
    def test_groups(self) -> None:
        """Layers with a window are a group of their own, of which a load reads what it needs."""
        from transformers import DynamicCache

        model = self.mixed()
        out = self.stored(model)
        self.assertEqual((10, 10), (self.files("w40.l0-2"), self.files("l0-1")))
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
        found = self.prefixes(model).load(PROMPT)
        longer = torch.cat([PROMPT[:, :144], PROMPT[:, :60]], dim=1)
        out = generate(model, longer, found.cache)
        expected = generate(model, longer, DynamicCache())
        self.store = self.folder / "elsewhere"  # where nothing of it is stored
        prefixes = self.prefixes(model)
        prefixes.save(out, found.cache)
        self.assertEqual((0, 13), (prefixes.load(longer[:, :100]).num_tokens, self.files("l0-1")))
        again = prefixes.load(longer)
        self.assertEqual(192, again.num_tokens)
        self.assertEqual(expected.tolist(), out.tolist())
        self.assertEqual(expected.tolist(), generate(model, longer, again.cache).tolist())

    @pytest.mark.thorough
    def test_default_cache(self) -> None:
        """The cache that `generate` makes keeps the last window alone: it is refused."""
        from transformers import DynamicCache

        model = self.mixed()
        trimmed = DynamicCache(config=model.config)
        out = generate(model, PROMPT, trimmed)
        with self.assertRaisesRegex(InputError, "layer 0 holds tokens 128 to 160 alone"):
            self.prefixes(model).save(out, trimmed)
        self.assertEqual(1, self.files(""))  # the probe
        self.stored(model)
        small = self.prefixes(model).load(PROMPT, DynamicCache(config=model.config))
        self.assertEqual((144, WINDOW - 1), (small.num_tokens, small.cache.layers[0].keys.shape[2]))
        self.assertEqual(out.tolist(), generate(model, PROMPT, small.cache).tolist())

    @pytest.mark.thorough
    def test_where_prompts_part(self) -> None:
        """What is noted is what is stored of each row, also where it is not loaded."""
        model = load(self.model_path())
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

    @pytest.mark.thorough
    def test_slower_than_computing(self) -> None:
        """Where loads take longer than prefills do, prompts are computed; both are measured."""
        from vua.transformers.layers import StoredLayers

        model, now_s, pause_s, read = load(self.model_path()), [0.0], [0.0], StoredLayers.read
        self.stored(model)

        def slowly(*args: Any) -> Any:
            now_s[0] += pause_s[0]
            return read(*args)

        self.enterContext(mock.patch.object(StoredLayers, "read", slowly))
        self.enterContext(mock.patch("vua.transformers.cache.clock", side_effect=lambda: now_s[0]))
        for policy, expected in (("faster", 0), ("always", 144), (2.0, 0)):
            with self.subTest(policy=policy):
                prefixes = self.prefixes(model, load_policy=policy)
                pause_s[0] = 10.0
                for _ in range(3):
                    prefix = prefixes.load(PROMPT)
                    self.assertEqual(144, prefix.num_tokens)
                    other = torch.randint(4, 512, (1, 150))
                    empty = prefixes.load(other)
                    model.generate(other, past_key_values=empty.cache, max_new_tokens=1)
                    now_s[0] += 1.0
                    prefixes.save(other, empty.cache)
                batch = torch.cat([PROMPT, PROMPT])
                with self.assertLogs("vua.transformers", "DEBUG") as logs:
                    self.assertEqual(expected, prefixes.load(PROMPT).num_tokens)
                    self.assertEqual(expected, prefixes.load(batch).num_tokens)
                told = [line for line in logs.output if line.startswith("INFO")]
                self.assertEqual(int(not expected), len(told))
                self.assertRegex("".join(told), "144 stored .* computed|^$")

                pause_s[0] = 0.01
                for _ in range(8):  # a pause, then parts of prompts are tried, then all is loaded
                    now_s[0] += 100.0
                    prefix = prefixes.load(PROMPT)
                self.assertEqual(144, prefix.num_tokens)
                self.assertEqual(prefixes.load(PROMPT).num_tokens, 144)

    @pytest.mark.thorough
    def test_what_was_loaded_is_not_looked_at(self) -> None:
        """A save begins where a load ended; a hole is found by the next load, and filled."""
        from vua.store.writer import EntryWriter
        from vua.transformers.cache import State

        model = load(self.model_path())
        out = self.stored(model)
        prefixes = self.prefixes(model)
        prefix = prefixes.load(PROMPT)
        with (
            mock.patch.object(State, "change") as checked,
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
        from vua.transformers import reuse_prefixes

        model = self.mixed()
        mask = torch.ones((2, 150), dtype=torch.long)
        mask[1, :23] = 0
        ids = torch.cat([PROMPT, PROMPT.flip(1)])
        batch = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 9, "do_sample": False}
        expected = model.generate(**batch)
        with reuse_prefixes(
            model, self.store, chunk_tokens=CHUNK, load_policy="always"
        ) as prefixes:
            prefixes.ready()
            for _ in range(2):
                self.assertEqual(expected.tolist(), model.generate(**batch).tolist())
            self.assertEqual(135, prefixes.load(ids, attention_mask=mask).num_tokens)

    def kinds(self) -> dict[str, Any]:
        """Random models of kinds that only computing tells apart; each named by its own files."""
        import transformers

        one = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4}
        gemma = {**one, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 8}
        gemma |= {"intermediate_size": 64, "sliding_window": 8, "vocab_size_per_layer_input": 64}
        gemma |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
        gemma["hidden_size_per_layer_input"] = 8
        made = {}
        for name, kind, settings in (
            ("one head", "Falcon", {**one, "num_hidden_layers": 2, "multi_query": True}),
            ("shared", "Gemma4", {**gemma, "num_kv_shared_layers": 2, "global_head_dim": 8}),
            ("two sizes", "Gemma4", {**gemma, "num_kv_shared_layers": 0, "global_head_dim": 16}),
        ):
            made_by = getattr(transformers, f"{kind}ForCausalLM", None)
            if made_by is None:  # an older transformers
                continue
            config = getattr(transformers, kind + ("Config" if kind == "Falcon" else "TextConfig"))
            path = self.folder / name
            made_by(config(**settings)).save_pretrained(path)
            made[name] = made_by.from_pretrained(path)
        return made

    def test_kinds(self) -> None:
        """What a model computes counts, not what its config lets expect; refused before any use."""
        from transformers import DynamicCache

        kinds = self.kinds()
        ids = torch.arange(5, 55)[None]
        cache = DynamicCache()
        with torch.no_grad():
            kinds["one head"](ids, past_key_values=cache)
        prefixes = self.prefixes(kinds.pop("one head"))
        self.assertEqual(3, prefixes.save(ids, cache))
        self.assertEqual((48, 1), (prefixes.load(ids).num_tokens, prefixes.layout.kv_heads))
        if "shared" not in kinds:
            return
        expected, model = generate(kinds["shared"], ids, DynamicCache()), kinds["shared"]
        prefixes = self.prefixes(model)
        for loaded in (0, 48):  # two layers of four keep K and V, of which the others attend to
            found = prefixes.load(ids)
            self.assertEqual(loaded, found.num_tokens)
            self.assertEqual(expected.tolist(), generate(model, ids, found.cache).tolist())
            prefixes.save(ids, found.cache)
        self.store = self.folder / "kv of two sizes"
        with self.assertRaisesRegex(ConfigError, "different shapes"):
            self.prefixes(kinds["two sizes"])
        self.assertFalse(self.store.exists())

    def test_refused_caches(self) -> None:
        """What cannot be stored whole is refused, and the message says why."""
        from transformers import DynamicCache, StaticCache

        model = load(self.model_path())
        prefixes = self.prefixes(model)
        other = load(self.model_path("llama", layers=3))
        cache, deep, batch = DynamicCache(), DynamicCache(), DynamicCache()
        model(PROMPT, past_key_values=cache)
        other(PROMPT, past_key_values=deep)
        model(PROMPT.repeat(2, 1), past_key_values=batch)
        half = DynamicCache()
        for number, layer in enumerate(cache.layers):
            half.update(layer.keys.half(), layer.values.half(), number)
        static = StaticCache(config=model.config, max_cache_len=200)
        refused = {
            "3 layers; the model has 2": lambda: prefixes.save(PROMPT, deep),
            r"\(2, 2, 150, 32\).*expected": lambda: prefixes.save(PROMPT, batch),
            "F16.*expected": lambda: prefixes.save(PROMPT, half),
            "StaticCache cannot be stored": lambda: prefixes.save(PROMPT, static),
            r"\(1, 2, 150, 32\).*expected": lambda: prefixes.save(PROMPT.repeat(2, 1), cache),
            "expected an empty DynamicCache": lambda: prefixes.load(PROMPT, cache),
        }
        for message, attempt in refused.items():
            with self.subTest(message), self.assertRaisesRegex(InputError, message):
                attempt()
        self.assertEqual(1, self.files(""))  # the probe

    def test_refused_models(self) -> None:
        """A model whose caches cannot be identified or shared is refused, with the remedy."""
        import transformers

        never_loaded = transformers.AutoModelForCausalLM.from_config
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        longrope = {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 16,
            "long_factor": [2.0] * 16,
            "original_max_position_embeddings": 64,
        }
        refused = {
            "without K and V per token": never_loaded(transformers.MambaConfig(**sizes)),
            "prompt's length": load(
                edit_config(make_model(self.folder / "l"), rope_parameters=longrope)
            ),
        }
        for message, model in refused.items():
            with self.subTest(message), self.assertRaisesRegex(ConfigError, message):
                self.prefixes(model)
        with self.assertRaisesRegex(ConfigError, "^load_policy must be"):
            self.prefixes(load(self.model_path()), load_policy="soon")

    def test_damage(self) -> None:
        """A damaged chunk shortens the prefix, and the same tokens follow."""
        model = load(self.model_path())
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


if __name__ == "__main__":
    unittest.main()
