"""Mirrors `vua.storage.object` in a bucket: nothing of others is changed, no key ends a command."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch

import foreign
from buckets import memory_url, moto, seaweedfs, speaking_to
from commands import run, run_json
from helpers import DirectoryTest, caches_of
from vua.core import VUA, VUAConfig
from vua.storage.bucket import Bucket
from vua.storage.names import kind_at

pytest.importorskip("obstore")

CONFIG = VUAConfig(split_factor=4, model="tiny")
TOKENS = torch.arange(12)
KV = caches_of(layers=1, heads=1, tokens=12, dim=8)
APART = ("only hex names", "a database")
COMMANDS = (
    ("ls",),
    ("du",),
    ("verify", "--repair"),
    ("ttl", "1s"),
    ("gc", "--ttl", "0.001s", "--yes"),
    ("gc", "--max-bytes", "0", "--yes"),
    ("pin", foreign.HEX64),
    ("rm", foreign.HEX64, "--yes"),
    ("doctor",),
    ("rm", "--all", "--pinned", "--yes"),
)


def objects(kind: str, root: Path) -> dict[str, bytes]:
    """Return such a directory's files as a tool copies them into a bucket."""
    foreign.make(kind, root)
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def put(url: str) -> None:
    with VUA(CONFIG, url) as vua:
        vua.put(TOKENS, KV)


class ForeignTest(DirectoryTest):
    """What others have put into a bucket, beside a cache and in it."""

    def place(self) -> str:
        return memory_url()

    def both(self) -> tuple[dict[str, bytes], dict[str, bytes]]:
        """Objects of every kind; those whose keys are folders of others apart."""
        found: tuple[dict[str, bytes], dict[str, bytes]] = {}, {}
        for kind in foreign.NAMES:
            found[kind in APART].update(objects(kind, self.root / kind))
        return found

    def check(self, url: str, keys: dict[str, bytes]) -> None:
        """No command changes what lies there by these keys."""
        bucket = Bucket.at(url)
        for key, data in keys.items():
            bucket.put(key, data)
        before = {one.key: one for one in bucket.walk() if one.key in keys}
        self.assertEqual(set(keys), set(before))
        later = mock.patch("time.time", return_value=time.time() + 1e6)
        for words in COMMANDS:
            with later:
                run(words[0], url, *words[1:])
            after = {one.key: one for one in bucket.walk() if one.key in keys}
            self.assertEqual(before, after, words)

    def test_alone(self) -> None:
        """In a place that is no cache of VUA; an engine refuses it."""
        for keys in self.both():
            url = self.place()
            self.check(url, keys)
            self.assertEqual(set(), {one.key for one in Bucket.at(url).walk()} - set(keys))

    def test_in_a_cache(self) -> None:
        """Beside namespaces, in a namespace and in a chunk's folder; what is of VUA goes."""
        for keys in self.both():
            keys.pop("vua.json", None)
            keys.pop("bounds.json", None)
            url = self.place()
            put(url)
            entries = [one.key for one in Bucket.at(url).walk() if kind_at(one.key[65:]) == "entry"]
            space, chunk = entries[0][:64], entries[0].rpartition("/")[0]
            everywhere = dict(keys)
            everywhere |= {f"{space}/{key}": data for key, data in keys.items()}
            everywhere |= {
                f"{chunk}/{key}": data
                for key, data in keys.items()
                if kind_at(f"{chunk}/{key}"[65:]) in ("stray", "temporary")
            }
            self.check(url, everywhere)
            left = {one.key for one in Bucket.at(url).walk()} - set(everywhere)
            ours = {"vua.json", "bounds.json", f"{space}/namespace.json"}
            self.assertEqual(set(), left - ours)

    def test_names_are_counted(self) -> None:
        """`ls`, `du`, `gc` and `rm` say how many there are, `verify` which."""
        url = self.place()
        put(url)
        bucket = Bucket.at(url)
        space = next(one.key[:64] for one in bucket.walk() if one.key[64:65] == "/")
        for key in ("photos/a.jpg", f"{space}/notes.txt", f"{'a' * 64}/b.jpg"):
            bucket.put(key, b"precious")
        for words in (["du"], ["gc", "--max-bytes", "1G"], ["rm", "--all", "--dry-run"]):
            code, report = run_json(words[0], url, *words[1:])
            self.assertEqual((0, 3), (code, report["strays"]), words)
            self.assertIn("not of VUA, and kept", run(words[0], url, *words[1:])[1])
        code, report = run_json("verify", url)
        self.assertEqual((0, ["photos"]), (code, report["stray"]))
        self.assertEqual(0, run("rm", url, space, "--yes")[0])
        names = [f"{space}/namespace.json", f"{space}/notes.txt"]
        self.assertEqual(names, sorted(one.key for one in bucket.walk(space)))

    def test_a_lifecycle_rule(self) -> None:
        """One that would cover an object of others is not printed, and why."""
        for where in ("{}", "{space}/{}"):
            url = self.place()
            put(url)
            bucket = Bucket.at(url)
            space = next(one.key[:64] for one in bucket.walk() if one.key[64:65] == "/")
            self.assertEqual(1, len(run_json("doctor", url)[1]["lifecycle"]["Rules"]))
            bucket.put(where.format("photos/a.jpg", space=space), b"precious")
            report = run_json("doctor", url)[1]
            self.assertIsNone(report["lifecycle"])
            self.assertEqual("lifecycle", report["findings"][-1]["name"])


@pytest.mark.thorough
class SeaweedFSForeignTest(ForeignTest):
    """The same on a real server."""

    def place(self) -> str:
        """Return the URL of an empty place in its bucket."""
        self.enterContext(speaking_to(seaweedfs().endpoint))
        return seaweedfs().place()


class OddKeysTest(DirectoryTest):
    """Keys that are no paths, of any tool."""

    SUFFIXES = ("/x", "../kv2/evil", "..", "./x", "a\x01b", "ab\nc", "%2F", "ä\u202e", " /x")

    def setUp(self) -> None:
        super().setUp()
        self.endpoint = moto()
        self.enterContext(speaking_to(self.endpoint))
        self.url = f"s3://vua/{self.root.name}"
        put(self.url)

    @pytest.mark.thorough
    def test_named(self) -> None:
        """Commands name the key, engines go on, and without it commands work."""
        boto3 = pytest.importorskip("boto3")
        s3 = boto3.session.Session().client("s3", endpoint_url=self.endpoint)
        key = next(one.key for one in Bucket.at(self.url).walk() if one.key.endswith("tensors"))
        others = list[str]()
        for folder in (f"{key[:64]}/", f"{key.rpartition('/')[0]}/"):
            for suffix in self.SUFFIXES:
                odd = f"{self.root.name}/{folder}{suffix}"
                with suppress(s3.exceptions.ClientError):  # no key here
                    s3.put_object(Bucket="vua", Key=odd, Body=b"1")
                    others.append(odd)
        for words in (["du"], ["verify"], ["gc", "--max-bytes", "1G"], ["rm", "--all", "--yes"]):
            code, _, err = run(words[0], self.url, *words[1:])
            self.assertEqual(2, code, words)
            self.assertIn("a key that is not a path", err)
            self.assertIn("delete it", err)
        for _ in range(5):  # and asks no less often
            with VUA(CONFIG, self.url) as vua:
                self.assertEqual(0, vua.put(TOKENS, KV))
                self.assertEqual(12, vua.get_closest(TOKENS).num_tokens)
        for odd in others:
            s3.delete_object(Bucket="vua", Key=odd)
        self.assertEqual(0, run("verify", self.url)[0])
        self.assertEqual(0, run("rm", self.url, "--all", "--yes")[0])
