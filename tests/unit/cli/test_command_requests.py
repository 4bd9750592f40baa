"""How many requests the commands send to a bucket, and which objects tell the order of chunks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from buckets import memory_url
from commands import run, run_json
from helpers import DirectoryTest, caches_of
from vua.core import VUA, VUAConfig
from vua.storage.bucket import Bucket

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
