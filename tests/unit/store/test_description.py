"""namespace.json: damage of it costs nothing, and what another version of VUA wrote stays."""

from __future__ import annotations

import json
import shutil
import unittest
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from commands import run, run_json
from helpers import DirectoryTest, caches_of, contents, kv_bits
from vua.core import VUA, VUAConfig
from vua.errors import LayoutError
from vua.format.identity import Identity
from vua.security.settings import Security
from vua.storage.description import (
    ABSENT,
    Description,
    FieldDifference,
    differences,
    nearest,
    read_description,
)

CONFIG = VUAConfig(split_factor=4, model="m")
TOKENS = torch.arange(8)
CACHE = caches_of(layers=2, heads=2, tokens=8, dim=16)


class DescriptionTest(DirectoryTest):
    """A cache of one prompt of two chunks."""

    def setUp(self) -> None:
        super().setUp()
        with VUA(CONFIG, self.root) as vua:
            self.assertEqual(2, vua.put(TOKENS, CACHE))
        (self.path,) = self.root.glob("*/namespace.json")
        self.sound = self.path.read_bytes()

    def found(self) -> int:
        """How many tokens a new reader finds; they are right."""
        with VUA(CONFIG, self.root) as vua:
            got = vua.get_closest(TOKENS)
        self.assertEqual(kv_bits(CACHE, got.num_tokens) if got else [], kv_bits(got.data))
        return got.num_tokens

    def stored(self) -> int:
        with VUA(CONFIG, self.root) as vua:
            return vua.put(TOKENS, CACHE)

    def kept(self) -> dict[str, bytes]:
        found = contents(self.root)
        return {name: data for name, data in found.items() if not name.startswith(".upkeep")}


class TestDamage(DescriptionTest):
    """Nothing that it says counts against what entries' headers say."""

    def check(self, damaged: bytes, *, heals: bool = True) -> None:
        """Readers find everything, nothing is stored twice, and a writer mends it."""
        self.path.write_bytes(damaged)
        self.assertEqual(8, self.found())
        self.assertEqual(0, self.stored())
        if heals:
            self.assertEqual(json.loads(self.sound), json.loads(self.path.read_bytes()))
        self.assertEqual(8, self.found())

    def flips(self, step: int) -> None:
        for bit in range(0, 8 * len(self.sound), step):
            damaged = bytearray(self.sound)
            damaged[bit // 8] ^= 1 << bit % 8
            said = self.sound.index(b'"name": "') + 9 == bit // 8
            with self.subTest(bit=bit, text=bytes(damaged[max(0, bit // 8 - 12) :][:24])):
                self.check(bytes(damaged), heals=not said)
            self.path.write_bytes(self.sound)
            for log in self.root.glob(".upkeep/**/*.uses"):  # each process looks at all of them
                log.unlink()

    def test_flips(self) -> None:
        """A turned bit."""
        self.flips(211)

    def test_other_layout(self) -> None:
        """What entries say still refuses a model of another shape, whatever is described."""
        other = caches_of(layers=2, heads=2, tokens=8, dim=8)
        said = json.loads(self.sound)
        said["layout"] |= {"k_dim": 8, "v_dim": 8}
        for text in (self.sound, b"", b"{}"):
            self.path.write_bytes(text)
            with VUA(CONFIG, self.root) as vua, self.assertRaisesRegex(LayoutError, "stored: 16"):
                vua.put(TOKENS, other)

    def test_verify(self) -> None:
        """`verify --repair` moves no entry because of it; the next save mends it."""
        said = json.loads(self.sound)
        said["layout"]["k_dim"] = 17
        self.path.write_text(json.dumps(said))
        before = self.kept()
        code, out, _ = run("verify", self.root)
        self.assertEqual(1, code)
        self.assertIn("k_dim=17", out)
        self.assertEqual(before, self.kept())
        self.path.write_bytes(b"?")
        code, out, _ = run("verify", self.root, "--repair")
        self.assertEqual((1, 2), (code, len(list(self.root.glob("*/*/*/*.safetensors")))))
        self.assertEqual((8, 0), (self.found(), self.stored()))
        self.assertEqual(json.loads(self.sound), json.loads(self.path.read_bytes()))
        self.assertEqual(0, run("verify", self.root)[0])


COUNTED = {"rope": {"theta": 1e4}, "layers": [{"window": 8}], "note": "\u00e9"}


class TestCounted(DirectoryTest):
    """What the identity's digest counted, for people."""

    IDENTITY = Identity.of_config(COUNTED, chunk_tokens=4)
    FIELDS: ClassVar = {"layers[0].window": 8, "note": "\u00e9", "rope.theta": 10000}

    def vua(self, root: Any, **settings: Any) -> VUA:
        return VUA(VUAConfig(split_factor=4, **settings), root, identity=self.IDENTITY)

    def stored(self, root: Any, **settings: Any) -> Path:
        """A cache of one prompt of two chunks: its namespace.json."""
        with self.vua(root, **settings) as vua:
            self.assertEqual(2, vua.put(TOKENS, CACHE))
        (path,) = Path(root).glob("*/namespace.json")
        return path

    def test_damage(self) -> None:
        """Whatever is wrong with it, the rest is believed, and nothing is written or stored."""
        path = self.stored(self.root)
        sound = path.read_bytes()
        self.assertEqual(self.FIELDS, read_description(path.parent).counted)
        start = sound.index(b'"counted": ') + 11
        texts = [sound[:at] for at in range(start, len(sound), 7)]
        texts += [sound[:at] + bytes([sound[at] ^ 1 << at % 8]) + sound[at + 1 :]
                  for at in range(start, len(sound))]  # fmt: skip
        others = ("null", "7", "[]", '{"a": {"b": [{}]}, "": 1}', "NaN", "[" * 10**5)
        texts += [sound[:start] + said.encode() + b"}" for said in others]
        for number, text in enumerate(texts):
            path.write_bytes(text)
            found = read_description(path.parent)
            with self.subTest(text[start - 20 :][:60]):
                self.assertEqual(self.IDENTITY, found.identity)
                self.assertEqual(1, len(found.layouts))
                json.dumps(found.counted, allow_nan=False)
                if number % 49 == 0:
                    with self.vua(self.root) as vua:
                        self.assertEqual(8, vua.get_closest(TOKENS).num_tokens)
                        self.assertEqual(0, vua.put(TOKENS, CACHE))
                    self.assertEqual(0, run("verify", self.root)[0])
                    self.assertEqual(text, path.read_bytes())
        path.unlink()
        self.assertEqual({}, read_description(path.parent).counted)

    def test_encrypted(self) -> None:
        """A cache that is encrypted does not tell what its model is; one that is signed does."""
        keys = self.root / "keys"
        for name in ("key", "tenants"):
            self.assertEqual(0, run("key", keys.with_name(name), *self.salted(name))[0])
        key, tenants = (str(keys.with_name(name)) for name in ("key", "tenants"))
        for name, settings, told in (
            ("signed", {"key_file": key}, True),
            ("encrypted", {"key_file": key, "encrypt": True}, False),
            ("tenants", {"tenant_keys": tenants}, False),
        ):
            with self.subTest(name):
                path = self.stored(self.root / f"cache of {name}", security=Security(**settings))
                self.assertEqual(told, b"theta" in path.read_bytes())
                self.assertEqual(self.FIELDS if told else {}, read_description(path.parent).counted)

    @staticmethod
    def salted(name: str) -> list[str]:
        return ["--salt", "s"] if name == "tenants" else []


class TestOtherVersion(DescriptionTest):
    """What another version of VUA has described is missed and left as it is."""

    def descriptions(self) -> Iterator[tuple[str, Any]]:
        """What another version may write: its identities have other names and another form."""
        for number in (2, 9, 10, 1234):
            identity = {"version": f"vua.identity.v{number}", "everything": "else"}
            yield f"identity {number}", {"format": "vua.namespace.v1", "identity": identity}
        yield "format", {"format": "vua.namespace.v2", "everything": "else"}
        yield "all but a version", json.loads(self.sound) | {"format": "vua.namespace.v2"}

    def moved(self, described: Any) -> Path:
        """The namespace under another name, with this description."""
        other = self.path.parent.with_name("0" * 64)
        self.path.parent.rename(other)
        (other / "namespace.json").write_text(json.dumps(described))
        return other

    def test_left(self) -> None:
        """Neither a tool, want of room, nor a time to live changes it; who asks deletes it."""
        cache = contents(self.path.parent)
        for name, described in self.descriptions():
            with self.subTest(name):
                other = self.moved(described)
                (other / "ab").mkdir(exist_ok=True)
                entry = next(other.glob("*/*/*.safetensors"))
                entry.write_bytes(b"of another form")
                before = contents(other)
                (state,) = run_json("ls", self.root)[1]["namespaces"]
                self.assertEqual("unknown", state["description"])
                for words in (
                    ["verify", "--repair"],
                    ["gc"],
                    ["gc", "--max-bytes", "0"],
                    ["gc", "--ttl", "1s"],
                ):
                    code, out, err = run(words[0], self.root, *words[1:])
                    self.assertEqual(words[0] == "gc" and "0" in words, bool(code), out + err)
                self.assertIn("of another version of VUA", run("verify", self.root)[1])
                self.assertEqual((0, 2, 8), (self.found(), self.stored(), self.found()))
                shutil.rmtree(self.path.parent)
                self.assertEqual(before, contents(other))
                self.assertEqual(0, run("rm", self.root, "0" * 12, "--yes")[0])
                self.assertFalse(other.exists())
                for path, data in cache.items():
                    (self.path.parent / path).parent.mkdir(parents=True, exist_ok=True)
                    (self.path.parent / path).write_bytes(data)

    @pytest.mark.thorough
    def test_eviction(self) -> None:
        """An engine that needs room evicts its own chunks alone."""
        for name, described in self.descriptions():
            with self.subTest(name):
                other = self.moved(described)
                before = contents(other)
                settings = VUAConfig(split_factor=4, model="x", max_bytes=1 << 20, min_free_bytes=0)
                big = caches_of(layers=2, heads=2, tokens=8, dim=1024)
                with VUA(settings, self.root) as vua:
                    for first in range(100, 200, 10):
                        vua.put(TOKENS + first, big)
                    self.assertEqual(8, vua.get_closest(TOKENS + 190).num_tokens)
                    self.assertLess(vua.get_closest(TOKENS + 100).num_tokens, 8)
                self.assertEqual(before, contents(other))
                other.rename(self.path.parent)

    def test_number(self) -> None:
        """A damaged number of this version's own is damage, and heals."""
        for name in ("namespace", "identity"):
            for number in ("0", "3", "01", "5", "9", "22"):
                with self.subTest(name, number=number):
                    text = self.sound.decode().replace(f"vua.{name}.v1", f"vua.{name}.v{number}")
                    self.path.write_text(text)
                    self.assertEqual((8, 0, 8), (self.found(), self.stored(), self.found()))
                    self.assertEqual(json.loads(self.sound), json.loads(self.path.read_bytes()))

    def test_group(self) -> None:
        """Files of a group that is not known stay, also where their chunk is evicted."""
        for path in list(self.root.glob("*/*/*/*.safetensors")):
            shutil.copy(path, path.with_name(f"x9.{path.name}"))
        self.assertEqual(8, self.found())
        for words in (["verify", "--repair"], ["gc"]):
            self.assertEqual(0, run(words[0], self.root, *words[1:])[0])
        run("gc", self.root, "--max-bytes", "0")
        left = sorted(path.name[:3] for path in self.root.glob("*/*/*/*.safetensors"))
        self.assertEqual(["x9.", "x9."], left)


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MODEL_CONFIG: Mapping[str, object] = {
    "model_type": "llama",
    "hidden_size": 64,
    "rope_parameters": ROPE,
}


def like(edits: Mapping[str, object] | None = None, **others: Any) -> Identity:
    """The identity of an engine with an edited config."""
    fields: dict[str, Any] = {"weights": "w", "kv_dtype": "BF16", "name": "m"}
    return Identity.of_config({**MODEL_CONFIG, **(edits or {})}, **(fields | others))


def described(identity: Identity | None) -> Description:
    name = identity.namespace if identity else "0" * 64
    return Description(Path("/kv") / name, identity)


class NearestTest(unittest.TestCase):
    def test_fields_and_values(self) -> None:
        """Fields of the config by path with both values; the weights first."""
        for theirs, expected in (
            (like(), []),
            (like(name="another name"), []),
            (like({"hidden_size": 128}), [("hidden_size", 64, 128)]),
            (like({"vua.vllm": {"a": 1}}), [("vua.vllm.a", ABSENT, 1)]),
            (
                like({"rope_parameters": {**ROPE, "rope_theta": 5e5}}),
                [("rope_parameters.rope_theta", 10000, 500000)],
            ),
            (
                like(kv_dtype="F16", weights="v"),
                [("weights", "w", "v"), ("kv_dtype", "BF16", "F16")],
            ),
        ):
            with self.subTest(expected):
                found = differences(like(), theirs)
                self.assertEqual([FieldDifference(*one) for one in expected], found)
        (one,) = differences(like(), like({"attention_bias": True}))
        self.assertEqual("attention_bias is absent here and true there", str(one))

    def test_without_what_was_counted(self) -> None:
        """Another digest is all that is known of a namespace that does not list its fields."""
        theirs = replace(like({"hidden_size": 128}), counted={})
        self.assertEqual(["model"], [one.field for one in differences(like(), theirs)])

    def test_order(self) -> None:
        """Of the same weights first, then by the number of fields."""
        tuned, far = like(weights="tuned"), like({"a": 1, "b": 2, "c": 3})
        near, unknown = like({"a": 1}, epoch="2"), None
        found = nearest(like(), [described(one) for one in (tuned, unknown, far, like(), near)])

        self.assertEqual([like(), near, far, tuned], [one.found.identity for one in found])
        self.assertEqual(["epoch", "a"], [one.field for one in found[1].differences])
