"""Mirrors `vua.capacity.upkeep`: what was counted last, and what is told of it."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from unittest import mock

import pytest
import torch

from buckets import memory_url
from commands import run, run_json
from helpers import DirectoryTest, caches_of
from replay import Cache
from vua.capacity import evictor, spaces, usage
from vua.capacity.evictor import Evictor
from vua.capacity.upkeep import read_census
from vua.core import VUA, VUAConfig
from vua.storage.bucket import Bucket

CHUNKS = 1000


class CensusTest(DirectoryTest):
    """A namespace that counts as large."""

    def setUp(self) -> None:
        super().setUp()
        cache = Cache(self.root)
        for first in range(0, 20 * CHUNKS, 400):
            cache.request(range(first, first + 20))
        cache.store.close()
        self.space = self.root / cache.store.namespace
        self.nbytes = sum(path.stat().st_size for path in self.files())
        self.file = self.root / ".upkeep" / "census"
        self.enterContext(mock.patch.object(spaces, "_LARGE", CHUNKS // 2))

    def told(self, *words: str) -> dict[str, dict[str, object]]:
        """The row of each command."""
        once = ["--once", "--interval", "0.01"]
        return {
            name: run_json(name, self.root, *(once if name == "top" else words))[1]["namespaces"][0]
            for name in ("ls", "du", "top")
        }

    def lose(self, share: float, spared: tuple[str, ...] = ()) -> None:
        """Delete chunks outside of some parts, which no command notices."""
        paths = sorted(path.parent for path in self.files() if path.parts[-3] not in spared)
        for path in random.Random(1).sample(paths, round(CHUNKS * share)):
            shutil.rmtree(path)

    def estimated(self) -> None:
        """What commands tell is an estimate, and has no date."""
        for name, row in self.told().items():
            left = len(self.files())
            self.assertEqual((False, None), (row["exact"], row["counted_s"]), name)
            self.assertLess(abs(row["chunks"] - left), left / 50, name)
        self.assertIn(f"{self.space.name[:12]} estimated; --exact", run("ls", self.root)[1])

    def test_written_by_gc(self) -> None:
        """A pass writes it; commands tell it with its date, and with --exact count."""
        self.estimated()
        self.assertEqual(0, run("gc", self.root, "--quick")[0])
        self.assertFalse(self.file.exists())
        before_s = time.time()
        self.assertEqual(0, run("gc", self.root, "--min-free", "0")[0])
        exact = self.told("--exact")
        self.assertEqual({True}, {exact[name]["exact"] for name in ("ls", "du")})
        self.lose(0.1, spared=("00", "80"))
        for name, row in self.told().items():
            with self.subTest(name):
                self.assertEqual((CHUNKS, False), (row["chunks"], row["exact"]))
                self.assertLess(abs(row["nbytes"] / self.nbytes - 1), 0.02)
                self.assertTrue(before_s <= row["counted_s"] <= time.time())
        times = ("oldest_ns", "newest_ns")
        self.assertEqual(
            [exact["du"][one] for one in times], [self.told()["du"][one] for one in times]
        )
        for words in (["ls"], ["du"], ["top", "--once", "--interval", "0.01"]):
            self.assertRegex(run(words[0], self.root, *words[1:])[1], r"as counted \d{4}-\d\d-\d\d")
        self.assertEqual(CHUNKS * 9 // 10, self.told("--exact")["ls"]["chunks"])

    def test_written_by_a_sweep(self) -> None:
        """So does a search for victims in all chunks, which looks at each anyway."""
        found = Evictor(self.root)
        found.shares = True
        with mock.patch.object(evictor, "SHARED", 2 * CHUNKS):
            found.search(time.time_ns())
        self.assertEqual({}, read_census(self.root))
        with mock.patch.object(evictor, "SHARED", CHUNKS // 2):  # a sweep estimates its chunks
            found.search(time.time_ns())
        (counted,) = read_census(self.root).values()
        times_ns = sorted(path.parent.stat().st_mtime_ns for path in self.files())
        self.assertEqual((CHUNKS, times_ns[0], times_ns[-1]), (counted.chunks, *counted[3:]))
        self.assertEqual(0o600, self.file.stat().st_mode & 0o777)

    def test_unusable(self) -> None:
        """One that is too old, damaged, of another kind or absent tells nothing."""
        run("gc", self.root, "--min-free", "0")
        whole = json.loads(self.file.read_text())
        name, row = self.space.name, whole["namespaces"][self.space.name]
        for content in (
            b"", b"{", b"[]", b"null", b"\xff" * 99, b"[" * 10**5, self.file.read_bytes()[:-3],
            *(json.dumps(whole | more).encode() for more in (
                {"format": "vua.census.v2"}, {"at_s": None}, {"at_s": "x"}, {"namespaces": []},
                {"namespaces": {name: row[:3]}}, {"namespaces": {name: [-1, *row[1:]]}},
                {"namespaces": {name: [None, *row[1:]]}}, {"namespaces": {"0" * 64: row}},
                {"namespaces": {name: [CHUNKS * 2, *row[1:]]}},
            )),
        ):  # fmt: skip
            with self.subTest(content[:60]):
                self.file.write_bytes(content)
                self.estimated()
        self.file.unlink()
        os.mkfifo(self.file)
        self.estimated()
        self.file.unlink()
        self.file.write_text(json.dumps(whole))
        self.lose(0.4)
        self.estimated()

    def test_small(self) -> None:
        """A namespace that is counted at once is."""
        run("gc", self.root, "--min-free", "0")
        self.lose(0.9)
        self.assertEqual({(100, True, None)}, {
            (row["chunks"], row["exact"], row["counted_s"]) for row in self.told().values()
        })  # fmt: skip

    def test_nothing_goes_for_it(self) -> None:
        """An engine starts from it, but where it says that something must go."""
        run("gc", self.root, "--min-free", "0")
        said = json.loads(self.file.read_text())
        files = len(self.files())
        for nbytes, reads in ((self.nbytes // 2, 1), (100 * self.nbytes, 2)):
            said["namespaces"][self.space.name][:2] = 1 << 17, nbytes
            self.file.write_text(json.dumps(said))
            config = VUAConfig(split_factor=4, max_bytes=2 * self.nbytes, min_free_bytes=0)
            with (
                self.subTest(nbytes),
                mock.patch.object(usage, "measure", wraps=usage.measure) as measure,
                VUA(config, self.root) as vua,
            ):
                kv = caches_of(layers=1, heads=1, tokens=4, dim=8)
                vua.put(torch.arange(4) + 10 * reads, kv)
            files += 1
            self.assertEqual(files, len(self.files()))
            self.assertEqual(reads > 1, measure.called)
        self.assertEqual(0, run("gc", self.root, "--max-bytes", str(2 * self.nbytes))[0])
        self.assertEqual(files, len(self.files()))

    def test_traffic(self) -> None:
        """What is used, new and gone between two looks at a sample is scaled up."""
        folders = sorted(path.parent for path in self.files())

        def traffic(_: float) -> None:
            for at, path in enumerate(folders):
                if at % 10 == 0:
                    shutil.rmtree(path)
                elif at % 2:
                    os.utime(path)

        with mock.patch("time.sleep", side_effect=traffic):
            report = run_json("top", self.root, "--once")[1]
        (row,) = report["namespaces"]
        used, gone, new = (
            row[f"{one}_per_s"] * report["seconds"] for one in ("used", "gone", "new")
        )
        self.assertLess(abs(gone - 100), 90)
        self.assertLess(abs(used - 500), 200)
        self.assertEqual(0, new)


class BucketTest(DirectoryTest):
    """A bucket is listed."""

    def test_exact(self) -> None:
        """Whatever lies there: commands count, and no pass writes one."""
        pytest.importorskip("obstore")
        url = memory_url()
        with VUA(VUAConfig(split_factor=4), url) as vua:
            vua.put(torch.arange(8), caches_of(layers=1, heads=1, tokens=8, dim=8))
        self.assertEqual(0, run("gc", url)[0])
        self.assertFalse([one for one in Bucket.at(url).walk() if ".upkeep" in one.key])
        Bucket.at(url).put(".upkeep/census", b"{")
        with mock.patch.object(spaces, "_LARGE", 0):
            for words in (["ls", url], ["du", url], ["top", url, "--once", "--interval", "0.01"]):
                (row,) = run_json(*words)[1]["namespaces"]
                self.assertEqual((2, True, None), (row["chunks"], row["exact"], row["counted_s"]))
