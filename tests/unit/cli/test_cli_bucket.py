from __future__ import annotations

import logging
import time
from unittest import mock

import pytest
import torch

from buckets import memory_url, seaweedfs, speaking_to
from commands import run, run_json
from helpers import DirectoryTest, caches_of, namespace_of
from vua.core import VUA, VUAConfig
from vua.storage.bucket import Bucket

pytest.importorskip("obstore")

TOKENS = torch.arange(500, 512)


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
        with VUA(VUAConfig(split_factor=4, model=model), self.url) as vua:
            cache = caches_of(layers=3, heads=2, tokens=4 * chunks, dim=8)
            self.assertEqual(chunks, vua.put(first + TOKENS[: 4 * chunks], cache))

    def stored(self, model: str) -> int:
        with VUA(VUAConfig(split_factor=4, model=model), self.url) as vua:
            return vua.get_closest(TOKENS).num_tokens

    def entries(self) -> list[str]:
        return sorted(one.key for one in self.bucket.walk() if one.key.endswith(".safetensors"))

    def test_doctor(self) -> None:
        """It tries a server out, leaves nothing behind, and shows a rule."""
        before = [one.key for one in self.bucket.walk()]
        code, report = run_json("doctor", self.url)
        self.assertEqual(0, code, report)
        levels = {one["name"]: one["level"] for one in report["findings"]}
        self.assertEqual({"ok"}, set(levels.values()), report)
        self.assertEqual(30, report["lifecycle"]["Rules"][0]["Expiration"]["Days"])
        self.assertEqual(before, [one.key for one in self.bucket.walk()])
        self.assertEqual(0, run("ttl", self.url, "36h")[0])
        rule = run_json("doctor", self.url)[1]["lifecycle"]["Rules"][0]
        self.assertEqual(2, rule["Expiration"]["Days"])

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

    def chunks(self, model: str) -> list[str]:
        """The names of a model's chunks, front to back."""
        with VUA(VUAConfig(split_factor=4, model=model), self.url) as vua:
            found = vua.get_closest(TOKENS).num_tokens
        _, report = run_json("ls", self.url, "--long")
        every = [one for each in report["namespaces"] for one in each["entries"]
                 if each["identity"]["model"] == model]  # fmt: skip
        space = next(one["namespace"] for one in report["namespaces"]
                     if one["identity"]["model"] == model)  # fmt: skip
        order = {}
        for one in every:
            said = run_json("inspect", f"{self.url}/{space}/{one['path']}")[1][0]
            order[said["tokens"][0]] = one["path"].split("/")[1]
        self.assertEqual(found, 4 * len(order))
        return [order[start] for start in sorted(order)]

    def test_pin(self) -> None:
        """A pin holds a chunk and its prefix against `gc` and `rm`, until it is lifted."""
        first, second, _ = self.chunks("llama")
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
        _, second, third = self.chunks("llama")
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
            store.capacity.raise_ttls("0" * 64, 60)
            self.assertFalse(store.capacity.pin("0" * 64))
        self.assertRegex(" ".join(said.output), "(?s)vua ttl.*vua pin")

    def test_ttl(self) -> None:
        """It lies in `bounds.json`, and `gc` keeps to it; what is pinned is renewed instead."""
        self.assertIsNone(run_json("ttl", self.url)[1]["ttl_s"])
        self.assertEqual(0, run("ttl", self.url, "1d")[0])
        self.assertEqual(86400, run_json("ttl", self.url)[1]["ttl_s"])
        self.assertEqual(86400, run_json("du", self.url)[1]["bounds"]["ttl_s"])
        self.assertEqual(0, run_json("gc", self.url)[1]["deleted"]["chunks"])
        self.assertEqual(0, run("pin", self.url, self.chunks("llama")[1])[0])
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
