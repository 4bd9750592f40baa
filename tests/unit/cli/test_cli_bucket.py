from __future__ import annotations

import json
import unittest

import pytest
import torch

from buckets import memory_url, seaweedfs, speaking_to
from commands import run, run_json
from helpers import DirectoryTest, caches_of
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
        """Return the URL of an empty bucket."""
        return memory_url()

    def put(self, model: str, chunks: int, first: int = 0) -> None:
        """Store chunks of a model's cache, of a prompt that begins with token ``first``."""
        with VUA(VUAConfig(split_factor=4, model=model), self.url) as vua:
            cache = caches_of(layers=3, heads=2, tokens=4 * chunks, dim=8)
            self.assertEqual(chunks, vua.put(first + TOKENS[: 4 * chunks], cache))

    def stored(self, model: str) -> int:
        """How many tokens are found."""
        with VUA(VUAConfig(split_factor=4, model=model), self.url) as vua:
            return vua.get_closest(TOKENS).num_tokens

    def entries(self) -> list[str]:
        """The keys of all entries."""
        return sorted(one.key for one in self.bucket.walk() if one.key.endswith(".safetensors"))

    def damage(self) -> str:
        """Flip a bit of one entry; return its key."""
        key = self.entries()[0]
        data = bytearray(self.bucket.get(key)[1])
        data[-1] ^= 1
        self.bucket.put(key, bytes(data))
        return key

    def test_ls_and_du(self) -> None:
        """They list namespaces, chunks and bytes, and say what that cost."""
        code, report = run_json("ls", self.url, "--long")
        chunks = sorted(one["chunks"] for one in report["namespaces"])
        self.assertEqual((0, [1, 3]), (code, chunks))
        nbytes = sum(one.nbytes for one in self.bucket.walk() if one.key in self.entries())
        self.assertEqual(nbytes, sum(one["nbytes"] for one in report["namespaces"]))
        code, report = run_json("du", self.url)
        self.assertEqual((0, 4, nbytes), (code, report["chunks"], report["nbytes"]))
        self.assertGreater(report["requests"]["list"], 0)
        code, out, _ = run("ls", self.url, "--long")
        self.assertIn(self.url, out)

    def test_verify(self) -> None:
        """What is damaged is found, and with --repair taken out of sight."""
        self.assertEqual(0, run("verify", self.url)[0])
        key = self.damage()
        code, report = run_json("verify", self.url)
        problems = [one["path"] for each in report["namespaces"] for one in each["problems"]]
        self.assertEqual((1, 1), (code, len(problems)))
        self.assertTrue(key.endswith(problems[0]))
        self.assertEqual(0, run("verify", self.url, "--repair")[0])
        self.assertNotIn(key, self.entries())

    def test_inspect(self) -> None:
        """An object says what it is."""
        key = self.damage()
        self.assertEqual(1, run("inspect", f"{self.url}/{key}")[0])
        code, report = run_json("inspect", f"{self.url}/{self.entries()[1]}")
        self.assertEqual((0, "sound"), (code, report[0]["outcome"]))

    def test_explain(self) -> None:
        """It tells how far a prompt is stored."""
        tokens = self.root / "tokens"
        tokens.write_text(json.dumps(TOKENS.tolist()))
        code, report = run_json("explain", self.url, "--tokens", str(tokens))
        self.assertEqual((0, [12, 4]), (code, [a["usable_tokens"] for a in report["namespaces"]]))

    def test_doctor(self) -> None:
        """It tries a server out, leaves nothing behind, and shows a rule."""
        before = [one.key for one in self.bucket.walk()]
        code, report = run_json("doctor", self.url)
        self.assertEqual(0, code, report)
        self.assertEqual({"ok"}, {one["level"] for one in report["findings"]}, report)
        self.assertEqual(30, report["lifecycle"]["Rules"][0]["Expiration"]["Days"])
        self.assertEqual(before, [one.key for one in self.bucket.walk()])

    def test_gc(self) -> None:
        """What was not used for longest goes, the ends of prompts before their beginnings."""
        total = run_json("du", self.url)[1]["nbytes"]
        code, report = run_json("gc", self.url, "--max-bytes", str(total), "--dry-run")
        self.assertEqual((0, 0), (code, report["deleted"]["chunks"]))
        wanted = self.entries()
        code, report = run_json("gc", self.url, "--max-bytes", str(total - 1), "--dry-run")
        self.assertEqual((0, 1), (code, report["deleted"]["chunks"]))
        self.assertEqual(wanted, self.entries())
        for left in (8, 4, 0):  # of the older prompt
            total = run_json("du", self.url)[1]["nbytes"]
            self.assertEqual(0, run("gc", self.url, "--max-bytes", str(total - 1))[0])
            self.assertEqual((left, 4), (self.stored("llama"), self.stored("qwen")))
        self.assertEqual(0, run("gc", self.url, "--ttl", "1e9")[0])
        self.assertEqual(4, self.stored("qwen"))

    def test_rm(self) -> None:
        """A chunk goes with all that follows it, a namespace as a whole."""
        _, report = run_json("ls", self.url, "--long")
        name = {each["chunks"]: each["namespace"] for each in report["namespaces"]}
        chunks = {}
        for key in self.entries():
            if key.startswith(name[3]):
                chunk = key.split("/")[-2]
                said = run_json("inspect", f"{self.url}/{key}")[1][0]
                chunks[said["tokens"][0]] = chunk
        self.assertEqual(0, run("rm", self.url, chunks[4])[0])
        self.assertEqual((4, 4), (self.stored("llama"), self.stored("qwen")))
        self.assertEqual(0, run("rm", self.url, name[3][:10])[0])
        self.assertEqual((0, 4), (self.stored("llama"), self.stored("qwen")))
        self.assertEqual(0, run("rm", self.url, "--all")[0])
        self.assertEqual(["vua.json"], [one.key for one in self.bucket.walk()])

    def test_not_marked(self) -> None:
        """Without the mark nothing is deleted; `vua adopt` makes one."""
        self.bucket.delete(["vua.json"])
        for words in (["gc", self.url, "--ttl", "0.001"], ["rm", self.url, "--all"]):
            code, _, err = run(*words)
            self.assertEqual(2, code)
            self.assertIn("vua adopt", err)
        self.assertEqual(4, len(self.entries()))
        self.assertEqual(0, run("adopt", self.url)[0])
        self.assertEqual(0, run("rm", self.url, "--all")[0])

    def test_what_needs_a_directory(self) -> None:
        """Other commands say that."""
        code, _, err = run("pin", self.url)
        self.assertEqual(2, code)
        self.assertIn("needs a directory", err)


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
        self.assertEqual(0, run("gc", self.url, "--max-bytes", str(total // 2))[0])
        self.assertLessEqual(run_json("du", self.url)[1]["nbytes"], total // 2)


if __name__ == "__main__":
    unittest.main()
