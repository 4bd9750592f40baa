"""Mirrors `unreadable`: what was sealed with a key that is gone goes, and nothing else does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from buckets import memory_url
from commands import collect, run, run_json
from helpers import flip
from seals import ALICE, BOB, CHUNKS, KeysTest
from vua.capacity.limits import Limits, ResolvedLimits
from vua.capacity.marks import pin, unpin
from vua.capacity.spaces import spaces
from vua.format.parse import parse_entry
from vua.security.keyring import KnownKeys, write_key
from vua.security.settings import Security
from vua.storage.bucket import Bucket


class TestLost(KeysTest):
    """`vua gc --lost-keys`."""

    def setUp(self) -> None:
        """Store a prompt in clear, with the own key and for two tenants, one of which leaves."""
        super().setUp()
        self.one = self.store()
        self.save(self.store(security=Security()))
        self.save(self.one)
        self.save(self.one, BOB)
        self.kept = self.entries()
        self.lost, _ = self.save(self.one, ALICE)
        self.all = self.entries()
        self.key_of(ALICE).unlink()

    def gc(self, *arguments: str | Path) -> tuple[int, dict[str, Any]]:
        code, report = run_json("gc", self.cache, "--min-free", "0", *arguments)
        return code, report

    def deleted(self) -> int:
        """How many chunks go with the keys that are left."""
        code, report = self.gc("--lost-keys", *self.given)
        self.assertEqual(0, code)
        return int(report["deleted"]["lost_keys"]["chunks"])

    def test_gone(self) -> None:
        """What the lost key sealed goes, and nothing else does; a second time nothing."""
        nbytes = sum(map(len, self.all.values())) - sum(map(len, self.kept.values()))
        code, report = self.gc("--lost-keys", *self.given)

        self.assertEqual((0, []), (code, report["problems"]))
        self.assertEqual({"chunks": CHUNKS, "nbytes": nbytes}, report["deleted"]["lost_keys"])
        self.assertEqual(self.kept, self.entries())
        self.assertEqual(0, self.deleted())

    def test_in_a_bucket(self) -> None:
        """A cache that was copied there loses the same chunks, and keeps the rest."""
        pytest.importorskip("obstore")
        url = memory_url()
        bucket = Bucket.at(url)
        for path in filter(Path.is_file, self.cache.rglob("*")):
            bucket.put(str(path.relative_to(self.cache)), path.read_bytes())
        self.assertEqual(0, run_json("gc", url)[1]["deleted"]["chunks"])
        self.assertEqual(2, run("gc", url, "--lost-keys")[0])
        code, report = run_json("gc", url, "--lost-keys", *self.given)
        self.assertEqual((0, CHUNKS), (code, report["deleted"]["chunks"]))
        left = {one.key for one in bucket.walk() if one.key.endswith(".safetensors")}
        self.assertEqual({str(path.relative_to(self.cache)) for path in self.kept}, left)
        self.assertEqual(0, run_json("gc", url, "--lost-keys", *self.given)[1]["deleted"]["chunks"])

    def test_only_when_asked(self) -> None:
        """Without --lost-keys they stay; `--quick` leaves it out of nothing; people see a line."""
        self.assertEqual(0, self.gc()[1]["deleted"]["lost_keys"]["chunks"])
        self.assertEqual(self.all, self.entries())
        _, out, _ = run("gc", self.cache, "--quick", "--lost-keys", *self.given)
        self.assertRegex(out, r"lost keys +3 +\S+ KiB")
        self.assertEqual(self.kept, self.entries())

    def test_refused(self) -> None:
        """A path that is wrong, or a key that cannot be used, deletes nothing."""
        empty, garbage, open_ = (self.root / name for name in ("empty", "garbage", "open"))
        for directory in (empty, garbage, open_):
            directory.mkdir()
        (garbage / "some.key").write_text("z" * 64)
        (garbage / "some.key").chmod(0o600)
        write_key(open_ / "some.key")
        (open_ / "some.key").chmod(0o644)
        before = self.entries()
        for arguments, words in (
            (("--lost-keys",), "needs the keys that are not lost"),
            (("--lost-keys", "--key-file", self.root / "own.kye"), "No such file"),
            (
                ("--lost-keys", *self.given[:2], "--tenant-keys", self.root / "kyes"),
                "not a directory",
            ),
            (("--lost-keys", *self.given[:2], "--tenant-keys", empty), "holds no key"),
            (("--lost-keys", *self.given[:2], "--tenant-keys", garbage), "64 hex digits"),
            (("--lost-keys", *self.given[:2], "--tenant-keys", open_), "chmod it to 600"),
            (("--lost-keys", "--key-file", self.keys), "Is a directory"),
            (self.given, "did you mean --lost-keys"),
        ):
            with self.subTest(words):
                code, out, err = run("gc", self.cache, "--max-bytes", "0", "--set", *arguments)
                self.assertEqual((2, ""), (code, out))
                self.assertIn(words, err)
        self.assertEqual(before, self.entries())
        self.assertFalse((self.cache / "bounds.json").exists())

    def test_pinned(self) -> None:
        """Pins hold: what is pinned stays with its prefix, is told, and goes when unpinned."""
        with spaces(self.cache) as (space,):
            pin(space, self.lost[1].name)
            code, report = self.gc("--lost-keys", *self.given)

            self.assertEqual((1, 1), (code, report["deleted"]["lost_keys"]["chunks"]))
            self.assertIn("2 chunks are pinned and kept, with a lost key", report["problems"][0])
            self.assertEqual(len(self.kept) + 2, len(self.entries()))
            unpin(space, self.lost[1].name)
        self.assertEqual(0, self.gc("--lost-keys", *self.given)[0])
        self.assertEqual(self.kept, self.entries())

    def test_order(self) -> None:
        """Children go before their parents, so that no moment leaves a hole."""
        names = [self.lost[place].name for place in range(CHUNKS)]
        with mock.patch("os.rename", wraps=os.rename) as rename:
            self.gc("--lost-keys", *self.given)
        gone = [Path(call.args[0]).name for call in rename.call_args_list]
        self.assertEqual(names[::-1], [name for name in gone if name in names])

    def test_not_proved(self) -> None:
        """Chunks with a damaged header and with a plain file stay; an empty one goes."""
        damaged, mixed, bare = (self.chunk(self.lost, place) for place in range(CHUNKS))
        (path,) = damaged.iterdir()
        at = path.read_bytes().index(b'"key":"') + 7
        flip(path, at)
        plain = next(path for path in self.kept if not parse_entry(path.read_bytes()).kind)
        shutil.copy(plain, mixed / "l0-1.h0-1.safetensors")
        next(bare.iterdir()).unlink()
        before = self.entries()

        self.assertEqual(0, self.deleted())
        self.assertEqual(before, self.entries())
        self.assertFalse(bare.exists())
        (mixed / "l0-1.h0-1.safetensors").unlink()
        flip(path, at)
        self.assertEqual(2, self.deleted())
        self.assertEqual(self.kept, self.entries())

    def test_looked_at_again(self) -> None:
        """Keys and files that came while headers were read are respected."""
        ids = KnownKeys(self.security()).ids
        write_key(self.root / "new.key")
        new = Security(key_file=str(self.root / "new.key"))
        fresh, _ = self.save(self.store(security=new))
        there = self.chunk(self.lost, CHUNKS - 1)
        plain = next(path for path in self.kept if not parse_entry(path.read_bytes()).kind)
        asked: list[int] = []

        def known() -> frozenset[str]:
            asked.append(1)
            if len(asked) == 1:
                return ids
            shutil.copy(plain, there / "l0-1.h0-1.safetensors")
            return ids | KnownKeys(new).ids

        freed = self.collect(known)
        left = {path.parent.name for path in self.entries()}
        self.assertEqual((2, 2), (freed, len(asked)))
        self.assertIn(there.name, left)
        self.assertLessEqual({fresh[place].name for place in range(CHUNKS)}, left)
        self.assertEqual(CHUNKS, self.collect(lambda: ids))

    def collect(self, lost: Callable[[], frozenset[str]], **more: Any) -> int:
        limits = ResolvedLimits.of(self.cache, Limits(min_free_bytes=0))
        return collect(self.cache, limits, quick=True, lost=lost, **more).lost_keys.chunks

    def test_while_in_use(self) -> None:
        """A reader and a writer with other keys notice nothing."""
        keys, model = self.save(self.one, BOB)
        self.file(keys).unlink()

        def meanwhile(*_: object, **__: object) -> None:
            self.save(self.one, BOB)
            self.assertEqual(CHUNKS, self.load(self.one, keys, model).chunks)

        def known() -> frozenset[str]:
            return KnownKeys(self.security()).ids

        self.assertEqual(CHUNKS, self.collect(known, show=meanwhile))
        self.assertEqual(CHUNKS, self.load(self.one, keys, model).chunks)
