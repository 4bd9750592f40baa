"""Mirrors `vua.cli.explain`: why a prompt hits or misses."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from commands import put_prompt, run, run_json
from helpers import DirectoryTest, Memory, flip, keys_of, model_arrays, save_chunk
from vua.catalog.prefix import expect, order_documents
from vua.connector.load_policy import Savings
from vua.core import VUA, VUAConfig
from vua.format.identity import Identity, config_digest, named_by
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout, Shard
from vua.security.keyring import write_key
from vua.security.settings import Security
from vua.store.namespace import Namespace
from vua.weights import weights_fingerprint

TOKENS = list(range(500, 514))  # three chunks of 4, and two more
CONFIG = {"model_type": "llama", "hidden_size": 8, "torch_dtype": "bfloat16", "use_cache": True}


class ExplainTest(DirectoryTest):
    """A directory, and files of tokens beside it."""

    def setUp(self) -> None:
        super().setUp()
        self.cache = self.root / "cache"
        self.cache.mkdir()

    def put(self, tokens: list[int], **settings: Any) -> None:
        """Store the cache of whole chunks of 4 tokens."""
        put_prompt(self.cache, tokens, layers=2, heads=2, **{"model": "llama", **settings})

    def tokens(self, tokens: list[int] | str) -> Path:
        path = self.root / "tokens"
        path.write_text(tokens if isinstance(tokens, str) else json.dumps(tokens))
        return path

    def ask(self, tokens: list[int] | str, *arguments: str | Path) -> tuple[int, list[Any]]:
        """Explain token ids; return exit code and the reports of namespaces."""
        path = self.tokens(tokens)
        code, report = run_json("explain", self.cache, "--tokens", path, *arguments)
        return code, report["namespaces"]

    def chunk(self, index: int) -> Path:
        name = keys_of(TOKENS, 4)[index].name
        return next(path for path in self.files() if path.parent.name == name)


class TestRecent(ExplainTest):
    """Where prompts have parted from what is stored, as engines have noted it."""

    def note(self, name: str, prompts: int, wall: float) -> None:
        """An engine that has looked up prompts, of which one in five is stored whole."""
        engine = Savings(wall=lambda: wall)
        engine.keep_at(self.cache, "", Security())
        for number in range(prompts):
            engine.looked_up(name, 0 if number % 5 else 20, 20, 64)
        engine.close()

    def test_days(self) -> None:
        """Of each namespace that is there its days are told, the last one first."""
        self.put(TOKENS)
        self.put(TOKENS, model="qwen")
        llama, qwen = (
            Identity(model=model, chunk_tokens=4, name=model).namespace
            for model in ("llama", "qwen")
        )
        noon = 1_700_000_000.0
        for _ in range(2):
            self.note(llama, 10, noon)
        self.note(llama, 5, noon + 86_400)
        self.note(qwen, 40, noon)
        self.note("0" * 64, 40, noon)

        code, out, _ = run("explain", self.cache, "--recent", "--namespace", llama[:8])

        self.assertEqual(0, code)
        said = "16 of 20 prompts part within their first 64 tokens: a date, a name or a salt?"
        self.assertEqual(
            f"2023-11-15  namespace {llama[:12]}  llama\n"
            "too few prompts to tell why they part\n"
            "  within 64: 4, whole: 1\n"
            f"2023-11-14  namespace {llama[:12]}  llama\n"
            f"{said}\n"
            "  within 64: 16, whole: 4\n",
            out,
        )
        days = run_json("explain", self.cache, "--recent")[1]["days"]
        self.assertEqual({llama: 2, qwen: 1}, dict(Counter(day["namespace"] for day in days)))
        one = {"day": "2023-11-14", "parted": {"64": 16, "whole": 4}, "verdict": said}
        self.assertIn({"namespace": llama} | one, days)
        write_key(self.root / "key")
        asked = ("explain", self.cache, "--recent", "--key-file", self.root / "key")
        self.assertEqual([], run_json(*asked)[1]["days"], "these engines have no key")

    def test_nothing_noted(self) -> None:
        """A directory without notes says so."""
        self.put(TOKENS)
        said = "engines have noted no prompts in the last days; of buckets they note none\n"
        self.assertEqual((0, f"{self.cache}: {said}", ""), run("explain", self.cache, "--recent"))


class TestPrefix(ExplainTest):
    """How far a prompt is stored."""

    def test_hit(self) -> None:
        """A prompt of which all whole chunks are stored is a hit, in either form of file."""
        self.put(TOKENS)
        for tokens in (TOKENS, " ".join(map(str, TOKENS)) + "\n"):
            code, (one,) = self.ask(tokens)

            self.assertEqual((0, 3, 12), (code, one["usable_chunks"], one["usable_tokens"]))
            self.assertEqual({"16": 0, "128": 0}, one["loads"])
            self.assertRegex(
                one["verdict"], "^a hit: all 3 whole chunks, 12 of 14 tokens, of which"
            )
            self.assertEqual((3, 3), tuple(one["groups"][0][k] for k in ("galloping", "leading")))
            self.assertIsNone(one["groups"][0]["first_missing"])

    def test_diverges(self) -> None:
        """Where another prompt goes on otherwise, that is said; where none does, too."""
        self.put(TOKENS)
        other = [*TOKENS[:5], 1, 1, 1, 1, 1, 1, 1]
        code, (one,) = self.ask(other)
        gap = one["groups"][0]["first_missing"]

        self.assertEqual((0, 1, 1), (code, one["usable_chunks"], one["others"]["others"]))
        self.assertEqual((1, [4, 8], "absent"), (gap["chunk"], gap["tokens"], gap["state"]))
        self.assertEqual(keys_of(other, 4)[1].name, gap["prefix_hash"])
        self.assertIn("continues differently", one["verdict"])
        _, (one,) = self.ask([*TOKENS[:12], 1, 1, 1, 1])

        self.assertEqual((3, 0), (one["usable_chunks"], one["others"]["others"]))
        self.assertIn("no stored chunk continues", one["verdict"])
        _, (one,) = self.ask(other, "--quick")
        self.assertIsNone(one["others"])

    def test_nothing_in_common(self) -> None:
        """Another first chunk, no first chunk, and a prompt shorter than a chunk."""
        self.put(TOKENS)
        _, (one,) = self.ask([1] * 4)
        self.assertIn("1 other prompt stored here. None has a salt", one["verdict"])
        _, (one,) = self.ask([1] * 3)
        self.assertIn("3 tokens are less than one chunk of 4", one["verdict"])
        shutil.rmtree(self.cache)
        self.cache.mkdir()
        self.assertEqual((0, []), self.ask(TOKENS))

    def test_harmed(self) -> None:
        """A hole, and what a file's header or length shows: what lies behind is of no use."""

        def cut(path: Path) -> None:
            os.truncate(path, path.stat().st_size - 1)

        harms: tuple[tuple[Callable[[Path], object], int, str, str], ...] = (
            (lambda path: shutil.rmtree(path.parent), 0, "absent", "chunk 1 is absent, a hole"),
            (lambda path: flip(path, 300), 1, "damaged", "l0-2.h0-2: corrupt"),
            (lambda path: flip(path, 4090), 1, "damaged", "l0-2.h0-2: corrupt"),  # not read by hits
            (cut, 1, "damaged", "l0-2.h0-2: corrupt"),
            (lambda path: shutil.copy(self.chunk(0), path), 1, "damaged", "foreign"),
        )
        for harm, status, state, words in harms:
            with self.subTest(words):
                self.put(TOKENS)
                path = self.chunk(1)
                harm(path)
                self.tokens(TOKENS)
                before = self.snapshot()
                code, (one,) = self.ask(TOKENS)
                (group,) = one["groups"]
                gap = group["first_missing"]
                self.assertEqual((status, 1, state), (code, gap["chunk"], gap["state"]))
                self.assertEqual((1, [[0, 1], [2, 3]]), (group["leading"], group["runs"]))
                self.assertIn(words, "; ".join([one["verdict"], *gap["reasons"]]))
                self.assertEqual(before, self.snapshot())
                shutil.rmtree(path.parent, ignore_errors=True)

    def test_salt(self) -> None:
        """A salted prompt is found with its salt; without, that there are salted ones is said."""
        identity = Identity(model="llama", name="llama", chunk_tokens=4)
        layout = KVLayout(2, 2, 8, 8, "F32", 4)
        (store,) = Namespace.create(self.cache, identity, [layout]).stores
        self.addCleanup(store.close)
        keys = KeyChain(token_ids(TOKENS), 4, {0: [("salt", b"s")]})
        memory = Memory(layout, layout.full, 3).fill(model_arrays(layout, 3)).map()
        for place in range(3):
            save_chunk(store, keys[place], memory, place=place)
        self.assertEqual(3, self.ask(TOKENS, "--salt", "s")[1][0]["usable_chunks"])
        _, (one,) = self.ask(TOKENS)

        self.assertEqual((0, {"others": 1, "with_extras": 1}),
                         (one["usable_chunks"], one["others"]))  # fmt: skip
        digest = keys[0].parent.hex()[:12]
        self.assertEqual(({digest: 1}, [digest]), (one["salts"], one["same_tokens"]))
        self.assertIn(f"for another salt, adapter or image ({digest}): only that", one["verdict"])
        _, (one,) = self.ask([1] * 8)
        self.assertEqual(({digest: 1}, []), (one["salts"], one["same_tokens"]))
        self.assertIn(f"0 without a salt as this one, 1 with salt {digest}", one["verdict"])
        _, (one,) = self.ask([1] * 8, "--salt", "s")
        self.assertIn(f"1 with salt {digest} as this one: the first", one["verdict"])
        self.assertEqual([digest], self.ask(TOKENS, "--salt", "t")[1][0]["same_tokens"])

    def test_unsalted(self) -> None:
        """Where only the salt differs it is blamed; prompts of other salts are counted apart."""
        self.put(TOKENS)
        _, (one,) = self.ask(TOKENS, "--salt", "s")
        self.assertIn("stored without a salt: only that differs", one["verdict"])
        _, (one,) = self.ask([1] * 8, "--salt", "s")
        self.assertRegex(one["verdict"], "0 with salt [0-9a-f]{12} as this one, 1 without a salt")

    def test_several(self) -> None:
        """Of several namespaces none is called the engine's; the fields that differ have values."""
        self.put(TOKENS)
        self.put(TOKENS, epoch="2")
        code, out, _ = run("explain", self.cache, "--tokens", self.tokens(TOKENS))
        lines = out.splitlines()
        self.assertEqual(0, code)
        self.assertRegex(lines[0], "^verdict: depends on the engine.*--namespace")
        self.assertEqual(2, sum("a hit" in line for line in lines[1:4]))
        self.assertTrue(any("not the first: epoch" in line for line in lines[1:4]))

    def test_groups(self) -> None:
        """Windowed layers are reported by themselves, and need only their window."""
        full = KVLayout(2, 2, 8, 8, "F32", 4)
        window = KVLayout(3, 2, 8, 8, "F32", 4, "w6")
        stores = Namespace.create(
            self.cache, Identity(model="m", chunk_tokens=4), [full, window]
        ).stores
        self.addCleanup(stores[0].close)
        keys = keys_of(TOKENS, 4)
        for store, places in zip(stores, ((0, 1, 2), (0, 1)), strict=True):
            layout = store.layout
            memory = Memory(layout, layout.full, 3).fill(model_arrays(layout, 3)).map()
            for place in places:
                save_chunk(store, keys[place], memory, place=place)
        _, (one,) = self.ask(TOKENS)
        groups = {group["group"]: group for group in one["groups"]}

        self.assertEqual((3, 2), (groups[""]["leading"], groups["w6"]["leading"]))
        self.assertEqual(2, one["usable_chunks"])
        self.assertIn("no later window", one["verdict"])
        # Behind chunk 1 the last 5 of 8 tokens count, behind chunk 2 those of 12: chunk 0 for one.
        for path in self.files("w6.*"):
            if path.parent.name == keys[0].name:
                path.unlink()
        self.assertEqual(0, self.ask(TOKENS)[1][0]["usable_chunks"])

    def test_shards(self) -> None:
        """Files that do not cover the model are named, and are not enough."""
        layout = KVLayout(2, 2, 8, 8, "F32", 4)
        (store,) = Namespace.create(
            self.cache, Identity(model="m", chunk_tokens=4), [layout]
        ).stores
        self.addCleanup(store.close)
        halves = [Shard(0, 2, head, head + 1) for head in (0, 1)]
        for half in halves:
            memory = Memory(layout, half, 1).fill(
                [np.ascontiguousarray(array[:, half.head_start : half.head_stop])
                 for array in model_arrays(layout, 1)]).map()  # fmt: skip
            save_chunk(store, keys_of(TOKENS, 4)[0], memory, shard=half)
        self.assertEqual(1, self.ask(TOKENS)[1][0]["usable_chunks"])
        self.chunk(0).unlink()
        code, (one,) = self.ask(TOKENS)
        gap = one["groups"][0]["first_missing"]

        self.assertEqual((0, "partial", ["l0-2.h1-2"]), (code, gap["state"], gap["shards"]))


class TestModel(ExplainTest):
    """Which namespace a model leads to."""

    def setUp(self) -> None:
        """Make a model of which the weights are noise."""
        super().setUp()
        self.model = self.root / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(CONFIG))
        (self.model / "model.safetensors").write_bytes(bytes(range(200)))
        self.identity = Identity(
            model=config_digest(named_by("vllm", CONFIG)),
            weights=weights_fingerprint(self.model), rope="neox",
            kv_dtype="BF16", chunk_tokens=4, name="model",
        )  # fmt: skip

    def store(self, **fields: Any) -> str:
        """Describe a namespace that differs from the model's in some fields; return its name."""
        identity = Identity(**{**{n: v for n, v in self.identity.describe().items()
                                  if n not in ("version", "namespace")}, **fields})  # fmt: skip
        layout = KVLayout(2, 2, 8, 8, "BF16", identity.chunk_tokens)
        Namespace.create(self.cache, identity, [layout]).stores[0].close()
        return identity.namespace

    def test_expected(self) -> None:
        """The files give the identity that adapters give, but for what engines add to configs."""
        expected = expect(str(self.model))

        self.assertEqual(self.identity, replace(expected, chunk_tokens=4))

    def test_nearest(self) -> None:
        """Fields that differ are named, but for what the files do not tell."""
        for fields, words in (
            ({"epoch": "2", "chunk_tokens": 8}, "(there): no difference"),
            ({"kv_dtype": "F32"}, '(there): kv_dtype is "BF16" here and "F32" there'),
            ({"rope": ""}, '(there): rope is "neox" here and "" there'),
            ({"model": "x"}, ' here and "x" there'),
            ({"weights": "w"}, ' here and "w" there'),
        ):
            with self.subTest(fields):
                self.store(**fields)
                tokens = self.tokens(TOKENS)
                asked = ("explain", self.cache, "--tokens", tokens, "--model", self.model)
                code, out, err = run(*asked)
                self.assertEqual((0, ""), (code, err))
                self.assertIn(words, out)
                shutil.rmtree(self.cache)
                self.cache.mkdir()

    def test_field_of_config(self) -> None:
        """Of a config the field that differs is named, with both values, and not the digests."""
        theirs = Identity.of_config({**CONFIG, "hidden_size": 16, "rms_norm_eps": 1e-6},
                                    weights=self.identity.weights, rope="neox", kv_dtype="BF16",
                                    chunk_tokens=4)  # fmt: skip
        layout = KVLayout(2, 2, 8, 8, "BF16", 4)
        Namespace.create(self.cache, theirs, [layout]).stores[0].close()
        _, (one,) = self.ask(TOKENS, "--model", self.model)
        self.assertEqual([{"field": "hidden_size", "ours": 8, "theirs": 16}], one["differences"])

    def test_weights_missing(self) -> None:
        """Without weights beside the config, these are not compared."""
        self.store(weights="w")
        (self.model / "model.safetensors").unlink()
        _, (one,) = self.ask(TOKENS, "--model", self.model)

        self.assertEqual([], one["differences"])


class TestLoads(ExplainTest):
    """What of a hit vLLM loads: whole blocks of its own, and never a prompt's last token."""

    def loads(self, tokens: list[int], *arguments: str) -> dict[str, int]:
        """By tokens per block, what is loaded of a prompt."""
        (one,) = self.ask(tokens, *arguments)[1]
        return dict(one["loads"])

    def test_whole_blocks(self) -> None:
        """A hit ends with a block, before the last token; the verdict says where."""
        tokens = list(range(1, 1473))
        self.put(tokens, split_factor=64)  # 23 chunks
        self.assertEqual({"16": 1472, "128": 1408}, self.loads([*tokens, 7, 8]))
        self.assertEqual({"16": 1456, "128": 1408}, self.loads(tokens))
        self.assertEqual({"16": 1264, "128": 1152}, self.loads(tokens[:1280]))
        self.assertEqual({"64": 1472}, self.loads([*tokens, 7], "--block-tokens", "64"))
        (one,) = self.ask([*tokens, 7])[1]
        self.assertIn("loads 1472 with blocks of 16 or 1408 with blocks of 128", one["verdict"])


class TestQuestion(ExplainTest):
    """What can be asked."""

    def test_unusable(self) -> None:
        """Unusable questions exit with 2 and say why."""
        self.put(TOKENS)
        ids = self.tokens(TOKENS)
        for arguments, words in (
            ((), "give one of"),
            (("--tokens", self.tokens("1 x").rename(self.root / "x")), "invalid literal"),
            (("--tokens", self.tokens("[1, 2.5]").rename(self.root / "y")), "item 1 is 2.5"),
            (("--tokens", self.tokens("[-1]").rename(self.root / "z")), "0..2**32-1"),
            (("--tokens", self.root / "none"), "No such file"),
            (("--prompt", self.root / "x"), "needs its tokenizer"),
            (("--prompt", self.root / "x", "--model", self.root), "tokenizer.json: no such file"),
            (("--tokens", "IDS", "--recent"), "give one of --tokens --prompt --order --recent"),
            (("--tokens", "IDS", "--model", self.root), "config.json: no such file"),
            (("--tokens", "IDS", "--namespace", "zz"), "no namespace begins"),
        ):
            ids = self.tokens(TOKENS)
            with self.subTest(arguments):
                given = [ids if one == "IDS" else one for one in arguments]
                code, out, err = run("explain", self.cache, *given)
                self.assertEqual((2, ""), (code, out))
                self.assertIn(words, err)

    def test_namespace(self) -> None:
        """One namespace can be picked; without a description headers say what it holds."""
        self.put(TOKENS)
        self.put(TOKENS, model="qwen")
        self.assertEqual(2, len(self.ask(TOKENS)[1]))
        name = next(self.cache.glob("*/namespace.json")).parent.name
        _, (one,) = self.ask(TOKENS, "--namespace", name[:6])
        self.assertEqual((name, 3), (one["namespace"], one["usable_chunks"]))
        (self.cache / name / "namespace.json").unlink()
        code, (one,) = self.ask(TOKENS, "--namespace", name)
        self.assertEqual((0, 3, "missing"), (code, one["usable_chunks"], one["description"]))


PREFIX = [*range(10)]
SIZE = 4


class OrderTest(DirectoryTest):
    """Documents of other lengths than chunks."""

    documents: Sequence[list[int]] = [[*range(100 * n, 100 * n + 5 + n)] for n in range(1, 5)]

    def prompt(self, places: Sequence[int]) -> list[int]:
        return [*PREFIX, *itertools.chain(*(self.documents[one] for one in places))]

    def put(self, *places: int, model: str = "m") -> None:
        """Store a prompt of these documents in this order, with a question at its end."""
        ids = [*self.prompt(places), 7, 8, 9]
        put_prompt(self.root, ids, split_factor=SIZE, model=model)

    def order(self, **more: str) -> tuple[list[int], int, str]:
        return order_documents(str(self.root), len(self.documents), self.prompt, **more)

    def stored(self, places: Sequence[int]) -> int:
        with VUA(VUAConfig(split_factor=SIZE, model="m"), self.root) as vua:
            (tokens,) = vua.lookup(self.prompt(places))
        return tokens

    def test_not_the_longest_first(self) -> None:
        """A long document first hits more at once, and less in all."""
        self.documents = [[*range(100, 140)], [*range(200, 212)], [*range(300, 360)]]
        self.put(0)
        self.put(1, 2)
        self.assertEqual([1, 2, 0], self.order()[0])

    def test_all_orders(self) -> None:
        """Nothing is stored further than what it finds, by trying each order."""
        chance = random.Random(5)
        for _ in range(4):
            self.put(*chance.sample(range(4), k=chance.randrange(1, 5)))
            best = max(map(self.stored, itertools.permutations(range(4))))
            places, tokens, _ = self.order()
            self.assertEqual((best, best), (tokens, self.stored(places)))

    def test_namespace(self) -> None:
        """The best of all namespaces, or a named one."""
        self.put(3, 2, 1, model="other")
        self.put(1)
        places, _, name = self.order()
        self.assertEqual([3, 2, 1, 0], places)
        (mine,) = (one.name for one in self.root.iterdir() if len(one.name) == 64
                   and one.name != name)  # fmt: skip
        self.assertEqual([1, 0, 2, 3], self.order(namespace=mine[:12])[0])
        self.assertEqual(([0, 1, 2, 3], 0, ""), self.order(salt="tenant"))

    def test_command(self) -> None:
        """`vua explain --order` reads token ids, and prints places."""
        self.put(2, 0)
        file = self.root / "documents.json"
        file.write_text(json.dumps({"prefix": PREFIX, "documents": self.documents}))
        places, tokens, name = self.order()
        asked = ("explain", self.root, "--order", file)
        code, out, err = run(*asked)
        self.assertEqual((0, ""), (code, err))
        self.assertEqual(f"2 0 1 3: {tokens} tokens stored in namespace {name[:12]}\n", out)
        told = {"directory": str(self.root), "order": places, "tokens": tokens, "namespace": name}
        self.assertEqual((0, told), run_json(*asked))

    def test_unusable(self) -> None:
        """What is no prefix with documents, and what needs a tokenizer, is said in one line."""
        file = self.root / "documents.json"
        for given, expected in (
            ({"prefix": "a", "documents": "bc"}, "all texts, or all token ids"),
            ({"prefix": [1], "documents": ["a"]}, "all texts, or all token ids"),
            ({"prefix": [1], "documents": []}, "all texts, or all token ids"),
            ({"documents": [[1]]}, "all texts, or all token ids"),
            ([1], "all texts, or all token ids"),
            ({"prefix": "a", "documents": ["b"]}, "give --model MODELDIR"),
        ):
            file.write_text(json.dumps(given))
            with self.subTest(given):
                code, out, err = run("explain", self.root, "--order", file)
                self.assertEqual((2, "", 1), (code, out, len(err.splitlines())), err)
                self.assertIn(expected, err)
