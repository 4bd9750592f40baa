from __future__ import annotations

import logging
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch

import foreign
from buckets import memory_url, moto, seaweedfs, speaking_to
from commands import put_prompt, run, run_json
from helpers import DirectoryTest, caches_of, keys_of, namespace_of
from vua.core import VUA, VUAConfig
from vua.storage.bucket import Bucket
from vua.storage.names import kind_at

pytest.importorskip("obstore")

TOKENS = torch.arange(500, 512)
KEYS = [key.name for key in keys_of(TOKENS.tolist(), 4)]


class BucketCliTest(DirectoryTest):
    """A bucket with two namespaces."""

    def setUp(self) -> None:
        """Store three chunks of one model and one of another."""
        super().setUp()
        self.url = self.place()
        self.bucket = Bucket.at(self.url)
        self.put("llama", 3)
        self.put("qwen", 1)

    def place(self) -> str:
        return memory_url()

    def put(self, model: str, chunks: int, first: int = 0) -> None:
        """Store chunks of a model's cache, of a prompt that begins with token ``first``."""
        ids = first + TOKENS[: 4 * chunks]
        self.assertEqual(chunks, put_prompt(self.url, ids, layers=3, heads=2, model=model))

    def stored(self, model: str) -> int:
        with VUA(VUAConfig(split_factor=4, model=model), self.url) as vua:
            return vua.get_closest(TOKENS).num_tokens

    def entries(self) -> list[str]:
        return sorted(one.key for one in self.bucket.walk() if one.key.endswith(".safetensors"))

    def test_doctor(self) -> None:
        """It tries a server out, and leaves nothing behind."""
        before = [one.key for one in self.bucket.walk()]
        code, report = run_json("doctor", self.url)
        self.assertEqual(0, code, report)
        levels = {one["name"]: one["level"] for one in report["findings"]}
        self.assertEqual({"ok"}, set(levels.values()), report)
        self.assertEqual(before, [one.key for one in self.bucket.walk()])

    def test_gc(self) -> None:
        """What was not used for longest goes, the ends of prompts before their beginnings."""
        total = run_json("du", self.url)[1]["nbytes"]
        code, report = run_json("gc", self.url, "--max-bytes", f"{total}B", "--dry-run")
        self.assertEqual((0, 0), (code, report["deleted"]["chunks"]))
        wanted = self.entries()
        code, report = run_json("gc", self.url, "--max-bytes", f"{total - 1}B", "--dry-run")
        self.assertEqual((0, 1), (code, report["deleted"]["chunks"]))
        self.assertEqual(wanted, self.entries())
        for left in (8, 4, 0):  # of the older prompt
            total = run_json("du", self.url)[1]["nbytes"]
            self.assertEqual(0, run("gc", self.url, "--max-bytes", f"{total - 1}B")[0])
            self.assertEqual((left, 4), (self.stored("llama"), self.stored("qwen")))
        self.assertEqual(0, run("gc", self.url, "--ttl", "1e9s")[0])
        self.assertEqual(4, self.stored("qwen"))

    def test_not_marked(self) -> None:
        """Without the mark nothing is deleted; what to write is said."""
        self.bucket.delete(["vua.json"])
        for words in (["gc", self.url, "--ttl", "0.001s"], ["rm", self.url, "--all"]):
            code, _, err = run(*words)
            self.assertEqual(2, code)
            self.assertIn('write {"format": "vua.root.v1"} to ' + self.url, err)
        self.assertEqual(4, len(self.entries()))
        self.bucket.put("vua.json", b'{"format": "vua.root.v1"}')
        self.assertEqual(0, run("rm", self.url, "--all")[0])

    def test_pin(self) -> None:
        """A pin holds a chunk and its prefix against `gc` and `rm`, until it is lifted."""
        first, second, _ = KEYS
        code, report = run_json("pin", self.url, second)
        self.assertEqual((0, 2), (code, report["pinned"][0]["chunks"]))
        marks = [one.key for one in self.bucket.walk() if "/pin-" in one.key]
        self.assertEqual({first, second}, {key.split("/")[2] for key in marks})
        self.assertEqual(2, run_json("pin", self.url)[1]["pinned"][0]["chunks"])
        self.assertEqual(2, sum(one["pinned"] for one in run_json("du", self.url)[1]["namespaces"]))
        self.assertEqual(1, run("gc", self.url, "--max-bytes", "0")[0])
        self.assertEqual((8, 0), (self.stored("llama"), self.stored("qwen")))
        code, report = run_json("rm", self.url, "--all")
        self.assertEqual((1, 2, 8), (code, report["kept"], self.stored("llama")))
        code, report = run_json("pin", self.url, second, "--remove")
        self.assertEqual((0, 2), (code, report["unpinned"][0]["chunks"]))
        self.assertEqual([], run_json("pin", self.url)[1]["pinned"])
        self.assertEqual(0, run("rm", self.url, "--all")[0])
        self.assertEqual(0, self.stored("llama"))

    def test_rm_as_in_a_directory(self) -> None:
        """A bucket and a directory delete the same chunks, and report them alike."""
        _, second, third = KEYS
        space = next(key.split("/")[0] for key in self.entries() if second in key)
        url, self.url = self.url, str(self.root / "cache")
        (self.root / "cache").mkdir(mode=0o700)
        self.put("llama", 3)
        self.put("qwen", 1)
        for place in (url, self.url):
            self.assertEqual(2, run_json("pin", place, second)[1]["pinned"][0]["chunks"])
        for words, found in (
            ([second, "--dry-run"], (1, 1, 1)),
            ([third, second, third, "--dry-run"], (1, 1, 1)),
            ([second, third, "--pinned", "--dry-run"], (0, 2, 0)),
            ([second, space, "--dry-run"], (1, 1, 2)),
            ([second, space, "--pinned", "--dry-run"], (0, 3, 0)),
            (["--all", "--dry-run"], (1, 2, 2)),
            ([third[:12]], (0, 1, 0)),
            (["--all"], (1, 1, 2)),
            ([second], (1, 0, 1)),
            ([space, "--pinned"], (0, 2, 0)),
            (["--all"], (0, 0, 0)),
        ):
            with self.subTest(words=words):
                some = [run_json("rm", place, *words) for place in (url, self.url)]
                reports = [(code, one["chunks"], one["kept"]) for code, one in some]
                self.assertEqual([found, found], reports)
                if "--dry-run" in words:
                    self.assertEqual(some[0][1]["nbytes"], some[1][1]["nbytes"])
        self.assertEqual(["vua.json"], [one.key for one in self.bucket.walk()])

    def test_pin_of_the_library(self) -> None:
        """`VUA.pin` writes the same marks, which `gc` keeps to; `VUA.unpin` lifts them."""
        tokens = torch.arange(64)
        config = VUAConfig(split_factor=16, model="pins")
        with VUA(config, self.url) as vua:
            vua.put(tokens, caches_of(layers=1, heads=1, tokens=64, dim=8))
            self.assertEqual([32, 48, 0], vua.pin([tokens[:40], tokens[:48], tokens + 500]))
            pinned = run_json("pin", self.url)[1]["pinned"]
            self.assertEqual([2, 3], sorted(one["chunks"] for one in pinned))
            self.assertEqual(1, run("gc", self.url, "--max-bytes", "0")[0])
        with VUA(config, self.url) as vua:
            self.assertEqual([48], vua.lookup(tokens))
            self.assertEqual([32], vua.unpin(tokens[:32]))
            self.assertEqual([48, 0], vua.unpin([tokens, tokens]))
        self.assertEqual([], run_json("pin", self.url)[1]["pinned"])
        with self.assertLogs("vua", logging.WARNING) as said, VUA(config, self.url) as vua:
            vua.lookup(tokens)
            (store,) = namespace_of(vua).stores
            self.assertFalse(store.capacity.pin("0" * 64))
        self.assertRegex(" ".join(said.output), "vua pin")

    def test_ttl(self) -> None:
        """It lies in `bounds.json`, and `gc` keeps to it; what is pinned is renewed instead."""
        self.assertIsNone(run_json("ttl", self.url)[1]["ttl_s"])
        self.assertEqual(0, run("ttl", self.url, "1d")[0])
        self.assertEqual(86400, run_json("ttl", self.url)[1]["ttl_s"])
        self.assertEqual(86400, run_json("du", self.url)[1]["bounds"]["ttl_s"])
        self.assertEqual(0, run_json("gc", self.url)[1]["deleted"]["chunks"])
        self.assertEqual(0, run("pin", self.url, KEYS[1])[0])
        later_s = time.time() + 2 * 86400
        before = {one.key: one.modified_s for one in self.bucket.walk()}
        with mock.patch("vua.catalog.collect.time.time", return_value=later_s):
            self.assertEqual(2, run_json("gc", self.url)[1]["deleted"]["chunks"])
        key = self.entries()[0]
        self.assertGreaterEqual(self.bucket.head(key).modified_s, before[key])
        self.assertGreater(self.bucket.counts["copy"], 0)
        self.assertEqual((8, 0), (self.stored("llama"), self.stored("qwen")))
        self.assertEqual(0, run("ttl", self.url, "--off")[0])
        self.assertIsNone(run_json("ttl", self.url)[1]["ttl_s"])

    def contents(self, bucket: Bucket) -> dict[str, bytes]:
        return {one.key: bytes(bucket.get(one.key)[1]) for one in bucket.walk()}

    def test_export_and_import(self) -> None:
        """A whole cache goes from bucket to bucket and to a directory, byte for byte."""
        file, there = self.root / "all.tar", self.root / "there"
        other = memory_url()
        code, report = run_json("export", self.url, str(file), "--all")
        self.assertEqual((0, 4), (code, report["chunks"]), report)
        code, report = run_json("import", other, str(file))
        self.assertEqual((0, 4, []), (code, report["written"], report["problems"]))
        wanted = self.contents(self.bucket)
        self.assertEqual(wanted, self.contents(Bucket.at(other)))
        self.assertEqual(0, run("import", str(there), str(file))[0])
        for key, data in wanted.items():
            self.assertEqual(data, (there / key).read_bytes(), key)
        again = self.root / "again.tar"
        self.assertEqual(0, run("export", str(there), str(again), "--all")[0])
        code, report = run_json("import", self.url, str(again))
        self.assertEqual((0, 0, 4), (code, report["written"], report["present"]))


@pytest.mark.thorough
class SeaweedFSCliTest(BucketCliTest):
    """The same on a real server."""

    def place(self) -> str:
        """Return the URL of an empty place of its bucket."""
        self.enterContext(speaking_to(seaweedfs().endpoint))
        return seaweedfs().place()

    def test_gc(self) -> None:
        """Its times are whole seconds: only that it stays within the limit."""
        total = run_json("du", self.url)[1]["nbytes"]
        self.assertEqual(0, run("gc", self.url, "--max-bytes", f"{total // 2}B")[0])
        self.assertLessEqual(run_json("du", self.url)[1]["nbytes"], total // 2)


obstore = pytest.importorskip("obstore")

CHUNKS = 40


class RequestsTest(DirectoryTest):
    """A bucket with two prompts of 40 chunks, stored by one process."""

    def setUp(self) -> None:
        super().setUp()
        self.url = memory_url()
        self.bucket = Bucket.at(self.url)
        self.put(0)

    def put(self, first: int, chunks: int = CHUNKS) -> None:
        """Store two prompts of 2 tokens a chunk by a process of its own."""
        with VUA(VUAConfig(split_factor=2, model="tiny"), self.url) as vua:
            for start in (first, first + 10_000):
                cache = caches_of(layers=1, heads=1, tokens=2 * chunks, dim=8)
                vua.put(torch.arange(start, start + 2 * chunks), cache)

    def notes(self) -> list[str]:
        """The keys of the objects that tell the order."""
        return sorted(one.key for one in self.bucket.walk() if "/parents/" in one.key)

    def sent(self, *words: str) -> Counter[str]:
        """Run a command; return the requests that it sends."""
        before = self.bucket.counts.copy()
        code, _, err = run(*words)
        self.assertEqual(0, code, err)
        return self.bucket.counts - before

    def shrink(self, chunks: int) -> Counter[str]:
        """Let `gc` delete so many chunks; return the requests."""
        use = run_json("du", self.url)[1]
        each = use["nbytes"] // use["chunks"]
        sent = self.sent("gc", self.url, "--max-bytes", f"{use['nbytes'] - chunks * each}B")
        self.assertEqual(use["chunks"] - chunks, run_json("du", self.url)[1]["chunks"])
        return sent

    def leading(self, first: int) -> int:
        """How many tokens of a prompt are found."""
        with VUA(VUAConfig(split_factor=2, model="tiny"), self.url) as vua:
            return vua.get_closest(torch.arange(first, first + 2 * CHUNKS)).num_tokens

    def test_headers_are_read_once(self) -> None:
        """Where nothing tells the order, `gc` reads headers, and writes down what they say."""
        self.bucket.delete(self.notes())
        self.assertGreaterEqual(self.shrink(3)["get"], 2 * CHUNKS)
        self.assertEqual(1, len(self.notes()))
        self.assertLessEqual(self.shrink(3)["get"], 5)
        self.assertEqual(2 * (2 * CHUNKS) - 12, self.leading(0) + self.leading(10_000))

    def test_what_is_new_is_read(self) -> None:
        """Chunks that no object tells of are asked for alone; few of them are not written down."""
        self.put(20_000, chunks=2)
        self.assertEqual(1, len(self.notes()))
        self.assertLessEqual(self.shrink(1)["get"], 4 + 5)
        self.assertEqual(1, len(self.notes()))

    def test_damaged(self) -> None:
        """Damaged objects tell nothing: headers do."""
        (key,) = self.notes()
        whole = bytes(self.bucket.get(key)[1])
        for damage in (b"", whole[:-64], whole[:100] + b"\0" + whole[101:], whole + bytes(64)):
            self.bucket.put(key, damage)
            sent = self.sent("gc", self.url, "--max-bytes", "1B", "--dry-run")
            self.assertGreaterEqual(sent["get"], 2 * CHUNKS)
        self.bucket.put(key, whole)
        self.assertLessEqual(self.sent("gc", self.url, "--max-bytes", "1B", "--dry-run")["get"], 5)

    def test_put_together(self) -> None:
        """Many small objects become one, which tells what is left."""
        (key,) = self.notes()
        data, folder = bytes(self.bucket.get(key)[1]), key.rpartition("/")[0]
        for number in range(80):
            self.bucket.put(f"{folder}/{number:016x}", data)
        self.shrink(3)
        (left,) = self.notes()
        self.assertEqual(16 + 64 * (2 * CHUNKS - 3) + 8, self.bucket.head(left).nbytes)
        self.assertLessEqual(self.shrink(3)["get"], 5)

    def test_they_are_ours(self) -> None:
        """They are no strays, and go with their namespace, also in a directory."""
        for command in ("ls", "du", "verify"):
            report = run_json(command, self.url)[1]
            self.assertIn(report.get("strays", 0) or report.get("stray", 0), (0, []), command)
        there = self.root / "copy"
        for one in self.bucket.walk():
            path = there / one.key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.bucket.get(one.key)[1])
        self.assertEqual(0, run_json("ls", str(there))[1]["strays"])
        for place in (self.url, str(there)):
            self.assertEqual(0, run("rm", place, "--all", "--yes")[0])
        self.assertEqual(["vua.json"], [one.key for one in self.bucket.walk()])
        self.assertEqual(["vua.json"], sorted(path.name for path in there.iterdir())[-1:])
        self.assertFalse([path for path in there.rglob("*") if "parents" in path.parts])


pytest.importorskip("obstore")

CONFIG = VUAConfig(split_factor=4, model="tiny")
IDS = torch.arange(12)
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
        vua.put(IDS, KV)


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
                self.assertEqual(0, vua.put(IDS, KV))
                self.assertEqual(12, vua.get_closest(IDS).num_tokens)
        for odd in others:
            s3.delete_object(Bucket="vua", Key=odd)
        self.assertEqual(0, run("verify", self.url)[0])
        self.assertEqual(0, run("rm", self.url, "--all", "--yes")[0])
