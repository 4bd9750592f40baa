"""What makes two caches the same: identities, config digests and weights fingerprints."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import util
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from vua.errors import ConfigError
from vua.identity import Identity, config_digest, weights_fingerprint

PAGE = 4096
TEXT = st.text(st.characters() | st.sampled_from(["\0", "\n", ":", "1"]), max_size=6)
IDENTITIES = st.builds(
    Identity,
    model=TEXT,
    weights=TEXT,
    adapter=TEXT,
    kv_dtype=TEXT,
    kv_scales=TEXT,
    rope=st.sampled_from(["", "neox", "interleaved"]),
    epoch=TEXT,
    chunk_tokens=st.integers(1, 65536),
)
CONFIG: dict[str, object] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
OPENED: list[str] = []


def note_opened(event: str, args: tuple[object, ...]) -> None:
    """Remember what this process opens; an audit hook stays for good, so it is one for all."""
    if event == "open" and isinstance(args[0], str | os.PathLike):
        OPENED.append(os.fspath(args[0]))


sys.addaudithook(note_opened)


def in_other_process(code: str, *args: str, **env: str) -> str:
    """Return what `code` prints in a fresh interpreter."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *args],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if ran.returncode:
        raise AssertionError(ran.stderr)
    return ran.stdout


class TestIdentity(unittest.TestCase):
    @given(IDENTITIES, IDENTITIES)
    def test_distinct_fields_never_share_an_encoding(self, one: Identity, other: Identity) -> None:
        """Two identities have the same encoding exactly when all their fields are equal."""
        same_fields = dataclasses.astuple(one) == dataclasses.astuple(other)

        self.assertEqual(same_fields, one.encode() == other.encode())

    @given(TEXT, TEXT, TEXT)
    def test_text_does_not_flow_between_fields(self, one: str, two: str, three: str) -> None:
        """Moving text from the end of one field to the start of the next gives another encoding."""
        split = Identity(model=one, weights=two + three)
        moved = Identity(model=one + two, weights=three)

        self.assertEqual(two == "", split.encode() == moved.encode())

    def test_every_field_but_the_name_counts(self) -> None:
        """Each field changes the namespace, save the name that only humans read."""
        base = Identity(model="m")
        values: dict[str, object] = {"rope": "neox", "chunk_tokens": 65}
        changed = {
            field.name
            for field in dataclasses.fields(Identity)
            if dataclasses.replace(base, **{field.name: values.get(field.name, "x")}).namespace
            != base.namespace
        }

        expected = {field.name for field in dataclasses.fields(Identity)} - {"name"}
        self.assertEqual(expected, changed)

    def test_namespace_is_frozen(self) -> None:
        """A directory that an earlier release wrote is still found."""
        identity = Identity(
            model="m", weights="w", adapter="a", kv_dtype="bfloat16", kv_scales="s", rope="neox"
        )

        expected = "23c53f54cab65acdce35cf8a10d98914fce92f2b1d92ca13972a99fdfa210b11"
        self.assertEqual(expected, identity.namespace)

    def test_namespace_is_the_same_in_every_process(self) -> None:
        """Neither the process nor PYTHONHASHSEED changes a namespace or a config digest."""
        code = (
            "import json, sys; from vua.identity import *\n"
            "print(Identity(model='m', weights='\\u00e4').namespace)\n"
            "print(config_digest(json.loads(sys.argv[1])))"
        )
        here = f"{Identity(model='m', weights='ä').namespace}\n{config_digest(CONFIG)}\n"
        for seed in ("1", "2"):
            with self.subTest(seed=seed):
                there = in_other_process(code, json.dumps(CONFIG), PYTHONHASHSEED=seed)

                self.assertEqual(here, there)

    @given(IDENTITIES, TEXT)
    def test_a_description_gives_the_identity_back(self, identity: Identity, name: str) -> None:
        """What describe() says survives JSON and gives an equal identity."""
        identity = dataclasses.replace(identity, name=name)
        read = Identity.from_description(json.loads(json.dumps(identity.describe())))

        self.assertEqual(identity, read)

    def test_a_description_is_read_strictly(self) -> None:
        """An unknown, missing or forged key of a description is refused with a word that helps."""
        described = Identity(model="m").describe()
        without = {key: value for key, value in described.items() if key != "epoch"}
        for bad, word in (
            ({**described, "kv_dtpye": ""}, "'kv_dtype'"),
            (without, "epoch"),
            ({**described, "model": "other"}, "namespace"),
            ({**described, "version": "vua.identity.v2"}, "version"),
            ({**described, "chunk_tokens": "64"}, "chunk_tokens"),
        ):
            with self.subTest(word), self.assertRaisesRegex(ConfigError, word):
                Identity.from_description(bad)

    def test_unusable_values_are_refused(self) -> None:
        """A value of the wrong type or out of range never becomes a namespace."""
        bad: tuple[Mapping[str, object], ...] = (
            {"chunk_tokens": 0},
            {"chunk_tokens": 65537},
            {"chunk_tokens": True},
            {"chunk_tokens": 64.0},
            {"rope": "halves"},
            {"epoch": 1},
            {"weights": None},
        )
        for values in bad:
            with self.subTest(values), self.assertRaises(ConfigError):
                Identity(model="m", **values)  # type: ignore[arg-type]


class TestConfigDigest(unittest.TestCase):
    def test_what_changes_kv_changes_the_digest(self) -> None:
        """RoPE, window, heads, architecture and any unknown key give each another digest."""
        scaled = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0}
        variants = [
            CONFIG,
            {**CONFIG, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
            {**CONFIG, "rope_parameters": scaled},
            {**CONFIG, "rope_parameters": {**scaled, "factor": 4.0}},
            {**CONFIG, "sliding_window": 64},
            {**CONFIG, "num_attention_heads": 8},
            {**CONFIG, "num_key_value_heads": 4},
            {**CONFIG, "architectures": ["LlamaBidirectionalModel"]},
            {**CONFIG, "a_key_of_next_year": 1},
            {**CONFIG, "nested": {"_load_in_4bit": True}},
            {**CONFIG, "nested": {"_load_in_4bit": False}},
        ]

        self.assertEqual(len(variants), len({config_digest(config) for config in variants}))

    def test_what_cannot_change_kv_does_not_count(self) -> None:
        """Keys of loaders, outputs and generation leave the digest alone."""
        for key in (
            *("_name_or_path", "_attn_implementation", "transformers_version", "dtype"),
            *("torch_dtype", "use_cache", "output_attentions", "return_dict", "eos_token_id"),
            *("bos_token_id", "pad_token_id", "id2label", "label2id", "tie_word_embeddings"),
        ):
            with self.subTest(key):
                self.assertEqual(config_digest(CONFIG), config_digest({**CONFIG, key: object()}))

    @unittest.skipUnless(util.find_spec("transformers"), "transformers is not installed")
    def test_every_base_key_is_judged(self) -> None:
        """Of the keys that all of transformers' configs have none is unknown: a new one is seen."""
        from transformers import PreTrainedConfig

        counted = {"architectures", "chunk_size_feed_forward", "is_encoder_decoder", "model_type"}
        base = PreTrainedConfig()
        keys = {*base.to_dict(), *vars(base)}
        self.assertLess({"dtype", "architectures"}, keys)
        for key in keys:
            with self.subTest(key):
                one, other = ({**CONFIG, key: value} for value in ("one", "other"))
                counts = config_digest(one) != config_digest(other)
                self.assertEqual(key in counted, counts)

    def test_no_window(self) -> None:
        """A window of 0 tokens is how some say that there is none."""
        none, zero = (config_digest({**CONFIG, "sliding_window": each}) for each in (None, 0))
        self.assertEqual(none, zero)
        self.assertNotEqual(none, config_digest({**CONFIG, "sliding_window": 1}))

    def test_order_and_spelling_do_not_count(self) -> None:
        """The same values in another order, as tuple or as a whole float have the same digest."""
        shuffled = dict(reversed(CONFIG.items()))
        shuffled |= {"num_hidden_layers": 2.0, "architectures": ("LlamaForCausalLM",)}

        self.assertEqual(config_digest(CONFIG), config_digest(shuffled))

    def test_values_without_a_lasting_digest_are_refused(self) -> None:
        """An object, a set or an ambiguous key raises and names its place, nan has its digest."""
        for value, place in (
            (object(), "config.x"),
            ({"a", "b"}, "config.x"),
            ([{"y": b""}], r"config.x\[0\].y"),
            ({1: 0, "1": 1}, "config.x"),
            ({None: 0}, "config.x"),
        ):
            with self.subTest(value), self.assertRaisesRegex(ConfigError, place):
                config_digest({"x": value})
        odd = [config_digest({"x": value}) for value in (math.nan, math.inf, "NaN", None, True, 1)]
        self.assertEqual(len(odd), len(set(odd)))

    @pytest.mark.vllm
    @unittest.skipUnless(util.find_spec("vllm"), "vLLM is not installed")
    @pytest.mark.thorough
    def test_vllm_and_transformers_agree(self) -> None:
        """The same checkpoint has the same digest in vLLM and transformers; overrides differ."""
        code = """
import contextlib, json, sys
from pathlib import Path
with contextlib.redirect_stdout(sys.stderr):
    from transformers import AutoModelForCausalLM
    from vllm.engine.arg_utils import EngineArgs
    from vua.identity import config_digest
    from vua.testing.models import make_model
    def of_vllm(path, dtype, **overrides):
        args = EngineArgs(model=str(path), dtype=dtype, hf_overrides=overrides)
        return config_digest(args.create_model_config().hf_text_config.to_dict())
    digests = {}
    for family in ("llama", "qwen2", "qwen3", "mistral"):
        path = make_model(Path(sys.argv[1], family), family=family)
        loaded = AutoModelForCausalLM.from_pretrained(path)
        digests[family] = [
            config_digest(loaded.config.to_dict()),
            of_vllm(path, "bfloat16"),
        ]
    rope = {"rope_type": "default", "rope_theta": 5e5}
    overridden = of_vllm(path, "float32", rope_parameters=rope)
print(json.dumps([digests, overridden]))
"""
        with tempfile.TemporaryDirectory() as folder:
            printed = in_other_process(code, folder, HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
        digests, overridden = json.loads(printed)

        each = {family: len(set(found)) for family, found in digests.items()}
        self.assertEqual({"llama": 1, "qwen2": 1, "qwen3": 1, "mistral": 1}, each)
        distinct = {overridden, *(found[0] for found in digests.values())}
        self.assertEqual(5, len(distinct))


class TestWeightsFingerprint(unittest.TestCase):
    def setUp(self) -> None:
        """A model of 24 tensors and a cache directory of its own."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.model = self.folder / "model"
        self.cache = self.folder / "cache"
        previous = os.environ.get("XDG_CACHE_HOME")
        os.environ["XDG_CACHE_HOME"] = str(self.cache)
        self.addCleanup(
            lambda: (
                os.environ.pop("XDG_CACHE_HOME")
                if previous is None
                else os.environ.__setitem__("XDG_CACHE_HOME", previous)
            )
        )
        self.tensors = {
            f"layer.{n}": np.random.default_rng(n).standard_normal((64, 64 + n), np.float32)
            for n in range(24)
        }
        self.write(self.tensors)

    def write(self, tensors: Mapping[str, np.ndarray], name: str = "model.safetensors") -> Path:
        """Write tensors long ago, so that the fingerprint may be remembered at once."""
        self.model.mkdir(exist_ok=True)
        save_file(dict(tensors), self.model / name)
        return self.age(self.model / name)

    def age(self, file: Path, seconds: float = 3600.0) -> Path:
        """Let a file look as if it had been written some time ago."""
        then = time.time() - seconds
        os.utime(file, (then, then))
        return file

    def opened(self, path: Path) -> list[str]:
        """Return the names of the weight files that a fingerprint opens."""
        OPENED.clear()
        weights_fingerprint(path)
        seen = {Path(name).name for name in OPENED}
        return sorted(name for name in seen if name.endswith((".safetensors", ".bin", ".gguf")))

    def test_each_single_tensor_counts(self) -> None:
        """Changing any one tensor gives another fingerprint at the same size and time."""
        file = self.model / "model.safetensors"
        before = weights_fingerprint(self.model)
        size, then = file.stat().st_size, file.stat().st_mtime
        for name in self.tensors:
            with self.subTest(name):
                self.write({**self.tensors, name: self.tensors[name] + np.float32(1)})
                os.utime(file, (then, then))

                self.assertEqual(size, file.stat().st_size)
                self.assertNotEqual(before, weights_fingerprint(self.model))

    def test_place_and_time_do_not_count(self) -> None:
        """The same weights elsewhere, also as a link or with other small files, are the same."""
        before = weights_fingerprint(self.model)
        blob = self.folder / "0123abcd"
        (self.model / "model.safetensors").rename(blob)
        (self.model / "model.safetensors").symlink_to(blob)
        (self.model / "config.json").write_text("{}")
        (self.model / "._model.safetensors").write_text("a resource fork")

        self.assertEqual(before, weights_fingerprint(self.model))
        self.assertEqual(before, weights_fingerprint(self.model / "model.safetensors"))

    def test_names_and_files_count(self) -> None:
        """Renaming, adding or cutting a weight file gives another fingerprint."""
        found = [weights_fingerprint(self.model)]
        (self.model / "model.safetensors").rename(self.model / "renamed.safetensors")
        found.append(weights_fingerprint(self.model))
        (self.model / "adapter_config.json").write_text('{"r": 8}')
        found.append(weights_fingerprint(self.model))
        (self.model / "adapter_config.json").write_text('{"r": 9}')
        found.append(weights_fingerprint(self.model))
        (self.model / "more.bin").write_bytes(b"")
        found.append(weights_fingerprint(self.model))
        os.truncate(self.model / "renamed.safetensors", PAGE)
        found.append(weights_fingerprint(self.model))

        self.assertEqual(len(found), len(set(found)))

    def test_other_formats_are_sampled_throughout(self) -> None:
        """Small GGUF and pickle files count in full, large ones at both ends and in between."""
        for suffix, nbytes in ((".gguf", 100_001), (".bin", 64 << 20)):
            file = self.model / f"x{suffix}"
            content = bytearray(nbytes)
            file.write_bytes(content)
            before = weights_fingerprint(file)
            for at in (0, 50_000, nbytes // 2 - nbytes // 2 % (4 * PAGE), nbytes - 1):
                with self.subTest(suffix=suffix, at=at):
                    changed = content.copy()
                    changed[at : at + 5 * PAGE] = b"x" * len(changed[at : at + 5 * PAGE])
                    file.write_bytes(changed)

                    self.assertNotEqual(before, weights_fingerprint(file))

    def test_broken_safetensors_still_have_a_fingerprint(self) -> None:
        """A header that lies about its length, tensors or types is sampled as plain bytes."""
        header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,%s]}}'
        for content in (
            b"",
            b"\xff" * 8,
            struct.pack("<Q", 1 << 40) + b"{}",
            struct.pack("<Q", 2) + b"[]",
            struct.pack("<Q", 2) + b"{]",
            struct.pack("<Q", len(header)) + header.replace(b"%s", b" 9"),
            struct.pack("<Q", len(header)) + header.replace(b"%s", b'""'),
            struct.pack("<Q", 100_000) + b"[" * 100_000,
        ):
            with self.subTest(content[:40]):
                (self.model / "model.safetensors").write_bytes(content)

                self.assertRegex(weights_fingerprint(self.model), "^[0-9a-f]{64}$")

    def test_no_weights_are_an_error(self) -> None:
        """A directory without weights, another file or a hub name is refused."""
        (self.model / "model.safetensors").rename(self.model / "notes.txt")
        for path in (self.model, self.model / "notes.txt", Path("someone/some-model")):
            with self.subTest(path), self.assertRaisesRegex(ConfigError, "no weights"):
                weights_fingerprint(path)

    def test_a_remembered_fingerprint_opens_no_weights(self) -> None:
        """The second fingerprint of unchanged weights comes from a private memo beside them."""
        self.assertEqual(["model.safetensors"], self.opened(self.model))
        self.assertEqual([], self.opened(self.model))
        memo = self.model / ".vua-weights.json"
        self.assertEqual(0o600, memo.stat().st_mode & 0o777)
        self.assertEqual(
            weights_fingerprint(self.model, cache=False), weights_fingerprint(self.model)
        )

    def test_a_change_of_stamps_reads_again(self) -> None:
        """Another mtime, size or inode of a file makes the memo worthless."""
        self.opened(self.model)
        file = self.model / "model.safetensors"
        copy = self.folder / "copy"
        self.age(file, 7200.0)
        self.assertEqual(["model.safetensors"], self.opened(self.model))
        copy.write_bytes(file.read_bytes())
        os.utime(copy, (file.stat().st_mtime, file.stat().st_mtime))
        copy.rename(file)
        self.assertEqual(["model.safetensors"], self.opened(self.model))
        self.age(self.write({**self.tensors, "more": np.zeros(1, np.float32)}))
        self.assertEqual(["model.safetensors"], self.opened(self.model))
        self.assertEqual([], self.opened(self.model))

    def test_weights_just_written_are_not_remembered(self) -> None:
        """The fingerprint of a file just written could hide the next write, so it is not kept."""
        os.utime(self.model / "model.safetensors")
        weights_fingerprint(self.model)

        self.assertFalse((self.model / ".vua-weights.json").exists())

    def test_a_damaged_memo_is_ignored(self) -> None:
        """Whatever a memo holds, the fingerprint is right and the memo is made anew."""
        expected = weights_fingerprint(self.model)
        memo = self.model / ".vua-weights.json"
        sound = memo.read_bytes()
        state = next(iter(json.loads(sound)["vua.weights.v1"]))
        for content in (
            b"",
            b"\xff\0",
            b"[]",
            b"{}",
            b'{"vua.weights.v1": 7}',
            b"[" * 100_000,
            json.dumps({"vua.weights.v1": {state: "../../etc"}}).encode(),
            json.dumps({"vua.weights.v1": {state: None}}).encode(),
        ):
            with self.subTest(content[:30]):
                memo.write_bytes(content)

                self.assertEqual(expected, weights_fingerprint(self.model))
                self.assertEqual(sound, memo.read_bytes())

    def test_a_directory_that_refuses_has_its_memo_elsewhere(self) -> None:
        """Where the memo cannot lie beside the weights it lies in the user's cache directory."""
        (self.model / ".vua-weights.json").mkdir()
        self.assertEqual(["model.safetensors"], self.opened(self.model))
        self.assertEqual([], self.opened(self.model))
        memos = list((self.cache / "vua").iterdir())
        self.assertEqual(1, len(memos))
        self.assertEqual(0o600, memos[0].stat().st_mode & 0o777)
        self.assertEqual(
            {".vua-weights.json", "model.safetensors"},
            {file.name for file in self.model.iterdir()},
        )

    def test_without_any_place_there_is_no_memo(self) -> None:
        """A fingerprint needs no memo: where every place refuses, it is computed each time."""
        (self.model / ".vua-weights.json").mkdir()
        self.cache.write_text("not a directory")

        self.assertEqual(
            weights_fingerprint(self.model, cache=False), weights_fingerprint(self.model)
        )

    def test_processes_at_once_agree(self) -> None:
        """Processes that fingerprint at once agree and leave one sound memo and no litter."""
        code = "import sys; from vua.identity import *; print(weights_fingerprint(sys.argv[1]))"
        with ThreadPoolExecutor(4) as pool:
            found = set(pool.map(lambda _: in_other_process(code, str(self.model)), range(4)))

        self.assertEqual({weights_fingerprint(self.model, cache=False) + "\n"}, found)
        self.assertEqual([], self.opened(self.model))
        self.assertEqual(
            {".vua-weights.json", "model.safetensors"},
            {file.name for file in self.model.iterdir()},
        )


if __name__ == "__main__":
    unittest.main()
