"""Mirrors `vua.format.identity`: what makes two caches the same."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import sys
import unittest
from collections.abc import Mapping
from importlib import import_module, util
from itertools import chain

import torch
from hypothesis import strategies as st

from properties import given
from vua.errors import ConfigError
from vua.format.identity import (
    INTERLEAVED,
    NEOX,
    NOT_COMPUTED,
    Identity,
    config_digest,
    counted_fields,
    rope_order,
    tables_of,
    varies_with_length,
)

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
PATHS = st.text("abc", min_size=1, max_size=2)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from([0.5, 1.0, "", "x"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(PATHS, inner, max_size=2),
    max_leaves=4,
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


class TestIdentity(unittest.TestCase):
    @given(IDENTITIES, IDENTITIES)
    def test_distinct_fields_never_share_an_encoding(self, one: Identity, other: Identity) -> None:
        """Two identities have the same encoding exactly when all their fields are equal."""
        same_fields = dataclasses.astuple(one) == dataclasses.astuple(other)

        self.assertEqual(same_fields, one.encode() == other.encode())

    def test_every_field_counts_but_those_for_people(self) -> None:
        """Each field changes the namespace, save those that only humans read."""
        base = Identity(model="m")
        values: dict[str, object] = {"rope": "neox", "chunk_tokens": 65, "counted": {"x": 1}}
        changed = {
            field.name
            for field in dataclasses.fields(Identity)
            if dataclasses.replace(base, **{field.name: values.get(field.name, "x")}).namespace
            != base.namespace
        }

        expected = {field.name for field in dataclasses.fields(Identity)} - {"name", "counted"}
        self.assertEqual(expected, changed)

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
            ({**described, "kv_dtpye": ""}, "besides, kv_dtpye"),
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
        """Keys of loaders, outputs, generation, dropouts and first weights; others count."""
        for key in (
            *("_name_or_path", "_attn_implementation", "transformers_version", "dtype"),
            *("torch_dtype", "use_cache", "output_attentions", "return_dict", "eos_token_id"),
            *("bos_token_id", "pad_token_id", "id2label", "label2id", "tie_word_embeddings"),
            *("attention_dropout", "hidden_dropout", "hidden_dropout_prob", "embd_pdrop"),
            *("attention_probs_dropout_prob", "resid_pdrop", "attn_pdrop", "layerdrop"),
            *("initializer_range", "initializer_factor", "output_router_logits"),
            *("router_aux_loss_coef", "tokenizer_class", "chunk_size_feed_forward"),
        ):
            with self.subTest(key):
                self.assertEqual(config_digest(CONFIG), config_digest({**CONFIG, key: object()}))
        for key in ("moe_token_dropout", "token_dropout", "router_jitter_noise"):  # these apply
            with self.subTest(key):
                self.assertNotEqual(config_digest(CONFIG), config_digest({**CONFIG, key: 0.1}))

    def test_longest_prompt(self) -> None:
        """It counts only where frequencies are, or may be, computed of it."""
        plain = {"rope_type": "default", "rope_theta": 10000.0}
        own = {"factor": 8.0, "original_max_position_embeddings": 8192}
        llama3 = {"rope_type": "llama3", **own, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        for rope, counts in (
            *((plain, False), ({**plain, "partial_rotary_factor": 0.5}, False)),
            *(({**plain, "rope_type": "linear", "factor": 4.0}, False), (llama3, False)),
            *(({**plain, "rope_type": "yarn", **own}, False), ({"a": plain, "b": llama3}, False)),
            ({**plain, "rope_type": "dynamic", "factor": 2.0}, True),
            ({**plain, "rope_type": "longrope", **own, "short_factor": [1.0]}, True),
            ({**plain, "rope_type": "yarn", "factor": 4.0}, True),
            ({**plain, "rope_type": "yarn", **own, "factor": None}, True),
            ({**llama3, "original_max_position_embeddings": None}, True),
            ({"a": plain, "b": {**plain, "rope_type": "dynamic", "factor": 2.0}}, True),
            ({**plain, "rope_type": "dynamic", "a": plain}, True),
            ({**plain, "use_fope": True}, True),
            ({**plain, "rope_type": "of next year"}, True),
            (None, True),
        ):
            with self.subTest(rope):
                self.assertEqual(counts, self.longest_counts({**CONFIG, "rope_parameters": rope}))
        for more in (
            {"model_type": "of its own"},
            {"model_type": "opt", "rope_parameters": None},
            {"vua.code": ["digest"]},
            {"vua.class": "plugin:Llama"},
        ):
            with self.subTest(more):
                self.assertTrue(self.longest_counts({**CONFIG, **more}))

    def longest_counts(self, config: Mapping[str, object]) -> bool:
        """Whether two values of `max_position_embeddings` give two digests."""
        return len({config_digest({**config, "max_position_embeddings": n}) for n in (64, 99)}) > 1

    @unittest.skipUnless(util.find_spec("transformers"), "transformers is not installed")
    def test_every_base_key_is_judged(self) -> None:
        """Of the keys that all of transformers' configs have none is unknown: a new one is seen."""
        from transformers import PreTrainedConfig

        counted = {"architectures", "is_encoder_decoder", "model_type"}
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


class TestCounted(unittest.TestCase):
    """What a config's digest counts, listed for people."""

    def test_listed(self) -> None:
        """Every field that counts is there by its path, and none that does not."""
        config = {**CONFIG, "use_cache": True, "sliding_window": 0, "nothing": {}, "pair": [1, 2.0]}
        config["layers"] = [{"window": 8}, None]
        counted = Identity.of_config(config).counted
        self.assertEqual(
            {
                "architectures": ["LlamaForCausalLM"],
                "layers[0].window": 8,
                "layers[1]": None,
                "model_type": "llama",
                "nothing": {},
                "num_attention_heads": 4,
                "num_hidden_layers": 2,
                "num_key_value_heads": 2,
                "pair": [1, 2],
                "rope_parameters.rope_theta": 10000,
                "rope_parameters.rope_type": "default",
                "sliding_window": None,
            },
            counted,
        )
        self.assertEqual(list(counted), sorted(counted))

    @given(st.dictionaries(PATHS, VALUES, max_size=4), st.dictionaries(PATHS, VALUES, max_size=4))
    def test_differs_where_the_digest_does(
        self, one: dict[str, object], other: dict[str, object]
    ) -> None:
        """Two configs have the same list exactly where they have the same digest."""
        same = config_digest(one) == config_digest(other)
        self.assertEqual(same, counted_fields(one) == counted_fields(other))

    def test_bounded(self) -> None:
        """Long values are cut and stay different; what does not fit is counted."""
        for sizes in ((1, 1 << 20), (5000, 100), (30, 400), (20, 4000), (20_000, 1)):
            config = {f"{n:x}.{'p' * 9}": '"' * sizes[1] + "x" for n in range(sizes[0])}
            counted = counted_fields(config)
            with self.subTest(sizes):
                self.assertLess(len(json.dumps(counted, indent=1)), 15 << 10)
                self.assertEqual(counted, counted_fields(counted))
                beyond = str(counted.get("...", "0 more"))
                self.assertEqual(sizes[0], len(counted) - ("..." in counted) + int(beyond[:-5]))
        numbers = counted_fields({f"{n}": [*range(200)] for n in range(99)})
        self.assertLess(len(json.dumps({"counted": numbers}, indent=1)), 13 << 10)
        one, other = ({"text": "a" * 1100 + end} for end in "bc")
        self.assertNotEqual(counted_fields(one), counted_fields(other))
        self.assertRegex(str(counted_fields(one)["text"]), r"^\"a+\.\.\. \(1103 characters, ")

    @unittest.skipIf(sys.version_info < (3, 11), "dataclasses of Python 3.10 pickle all fields")
    def test_pickled(self) -> None:
        """An engine's step carries the identity, and not what is for people."""
        identity = Identity.of_config(CONFIG, weights="w")
        sent = pickle.loads(pickle.dumps(identity))
        self.assertEqual((identity, identity.namespace, {}), (sent, sent.namespace, sent.counted))

    def test_secrets(self) -> None:
        """A field with the name of a secret counts, and its value is not told."""
        for name in ("api_key", "HF_TOKEN", "some.Password", "CLIENT_SECRET", "credentials"):
            counted = counted_fields({"vua.environment": {name: "hunter2"}})
            self.assertEqual({f"vua.environment.{name}": "(not shown)"}, counted)
        self.assertEqual({"num_draft_tokens": 3}, counted_fields({"num_draft_tokens": 3}))

    def test_json(self) -> None:
        """It is JSON for every reader, without NaN and Infinity."""
        config = {"a": math.inf, "b": [math.nan, 1], "c": "NaN", "d": "\ud800"}
        text = json.dumps(counted_fields(config), allow_nan=False)
        found = {"a": "Infinity", "b": "[NaN, 1]", "c": "NaN", "d": "\ud800"}
        self.assertEqual(found, json.loads(text))
        for bad in ({"a": object()}, {1: 2, "1": 2}, [1], "x"):
            with self.subTest(bad), self.assertRaises(ConfigError):
                Identity(model="m", counted=bad)  # type: ignore[arg-type]


class TestRope(unittest.TestCase):
    @unittest.skipUnless(util.find_spec("transformers"), "transformers is not installed")
    def test_orders_in_transformers(self) -> None:
        """The rotation in transformers pairs elements of K as listed, for each listed type."""
        quarter_turn = {  # of 0 .. 7, each pair (a, b) becomes (-b, a)
            "neox": [-4, -5, -6, -7, 0, 1, 2, 3],
            "interleaved": [-1, 0, -3, 2, -5, 4, -7, 6],
        }
        others = {"gptj", "opt"}  # its function is another one; it has learned positions
        for model_type in sorted((NEOX | INTERLEAVED) - others):
            with self.subTest(model_type):
                name = model_type.removesuffix("_text")
                module = import_module(f"transformers.models.{name}.modeling_{name}")
                k = torch.arange(8.0).reshape(1, 1, 1, 8)
                sin = torch.ones(1, 1, 4 if model_type == "gpt_oss" else 8)
                _, turned = module.apply_rotary_pos_emb(k, k, 0 * sin, sin)

                self.assertEqual(quarter_turn[rope_order(model_type)], turned.flatten().tolist())

    def test_varies_with_length(self) -> None:
        """Frequencies that depend on the prompt's length are told, also per layer type."""
        fixed = {"rope_type": "llama3", "factor": 8.0}
        varying = {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": fixed}

        self.assertTrue(varies_with_length({"rope_parameters": varying}))
        for config in ({"rope_parameters": fixed}, {"rope_parameters": None}, {}):
            self.assertFalse(varies_with_length(config))


class ExcludedTest(unittest.TestCase):
    def test_every_name_has_a_reason(self) -> None:
        """Each word in an engine's tables is explained, and each explanation is used."""
        for package in ("vua.vllm", "vua.sglang"):
            with self.subTest(package):
                tables = tables_of(package)
                of_fields = tables["fields"].values() if "fields" in tables else ()
                used = {*tables["variables"], *tables.get("arguments", ()), *chain(*of_fields)}
                self.assertEqual(tables["reasons"].keys(), used)
                self.assertLessEqual({*NOT_COMPUTED}, used)
