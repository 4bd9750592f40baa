"""Mirrors `vua.storage.local`: it follows its path, and which reads go past the page cache."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from helpers import (
    DirectoryTest,
    Memory,
    caches_of,
    has_native,
    keys_of,
    kv_bits,
    model_arrays,
    remove_tree,
    save_chunk,
)
from places import why_no_mounts
from speed import cool, direct_works, is_cold
from vua.core import VUA, VUAConfig
from vua.errors import StorageError, VUAError
from vua.format.identity import Identity
from vua.format.layout import KVLayout
from vua.storage.local import LOOK_S, LocalStorage
from vua.storage.mark import MARK
from vua.store.namespace import Namespace

TOKENS = torch.arange(64)
CACHE = caches_of(layers=1, heads=2, tokens=64, dim=64)
CONFIG = VUAConfig(split_factor=16)
CHUNK_NBYTES = 20 << 10
"""A chunk's file takes less."""


def of(first: int) -> torch.Tensor:
    return torch.arange(64) + 1000 * first


class FollowedTest(DirectoryTest):
    """A cache at ``kv`` in a directory, and a clock that it asks."""

    def setUp(self) -> None:
        super().setUp()
        self.now_s = time.monotonic()
        self.path = self.root / "kv"

    def open(self, path: str | os.PathLike[str] = "", **settings: object) -> VUA:
        vua = VUA(VUAConfig(split_factor=16, **settings), path or self.path)
        self.addCleanup(vua.close)
        return vua

    def writer(self, **settings: object) -> VUA:
        vua = self.open(**settings)
        self.assertEqual(4, vua.put(TOKENS, CACHE))
        self.now_s = time.monotonic()  # where its own clock is
        self.storage_of(vua).clock = lambda: self.now_s
        return vua

    def storage_of(self, vua: VUA) -> LocalStorage:
        namespace = vua.namespace()
        assert namespace is not None
        assert isinstance(namespace.storage, LocalStorage)
        return namespace.storage

    def later(self) -> None:
        self.now_s += LOOK_S

    def space(self) -> Path:
        (found,) = (one for one in self.path.iterdir() if len(one.name) == 64)
        return found

    def moved(self) -> None:
        """Move it away, and make an empty one."""
        self.path.rename(self.root / "old")
        self.path.mkdir(mode=0o700)

    def deleted(self) -> None:
        remove_tree(self.path)

    def emptied(self) -> None:
        for one in self.path.iterdir():
            shutil.rmtree(one) if one.is_dir() else one.unlink()

    def without_namespace(self) -> None:
        remove_tree(self.space())

    def without_chunks(self) -> None:
        for one in self.space().iterdir():
            if one.is_dir():
                shutil.rmtree(one)

    def removed_by_vua(self) -> None:
        command = [sys.executable, "-m", "vua", "rm", str(self.path), "--all", "--yes"]
        subprocess.run(command, check=True, capture_output=True)

    def ways(self) -> dict[str, Callable[[], None]]:
        return {
            "moved": self.moved,
            "deleted": self.deleted,
            "emptied": self.emptied,
            "without its namespace": self.without_namespace,
            "without chunks": self.without_chunks,
            "vua rm --all": self.removed_by_vua,
        }

    @pytest.mark.thorough
    def test_again(self) -> None:
        """Who only looks finds what another stores afterwards; who stores does so where it leads.

        Both at their next look.
        """
        for what, change in self.ways().items():
            for stores in (False, True):
                with self.subTest(what, stores=stores):
                    held = self.writer()
                    self.assertEqual(4, len(list(self.storage_of(held).list())))
                    change()
                    self.later()
                    if stores:
                        self.assertEqual([0], held.lookup(TOKENS))
                    with contextlib.closing(held if stores else self.open()) as writer:
                        self.assertEqual(4, writer.put(TOKENS, CACHE))
                        self.later()
                        self.assertEqual([64], held.lookup(TOKENS))
                        self.assertEqual(kv_bits(CACHE), kv_bits(held.get_closest(TOKENS).data))
                    with self.open() as other:
                        self.assertEqual(64, other.get_closest(TOKENS).num_tokens)
                    self.assertTrue((self.path / MARK).exists())
                    remove_tree(self.path)
                    shutil.rmtree(self.root / "old", ignore_errors=True)

    def test_one_line(self) -> None:
        """Each change is told once, with what was found and what happens."""
        writer = self.writer()
        self.moved()
        with self.assertLogs("vua", logging.WARNING) as logs:
            for _ in range(3):
                self.later()
                writer.lookup(TOKENS)
            writer.put(TOKENS, CACHE)
        self.assertEqual(1, len(logs.output), logs.output)
        self.assertIn("No such file or directory", logs.output[0])
        self.assertIn("the next chunk that is stored makes it anew", logs.output[0])

    def test_one_that_may_not_be_written(self) -> None:
        """Of a copy that lost what proves it, one line is logged; it is read, and not written."""
        vua = self.writer()
        copy = self.root / "copy"
        shutil.copytree(self.path, copy)
        (copy / "vua.json").unlink()
        (copy / self.space().name / "namespace.json").write_bytes(b"")
        self.path.rename(self.root / "old")
        copy.rename(self.path)
        with self.assertLogs("vua.storage.local", "INFO") as logs:
            for first in range(100, 400, 100):
                self.later()
                self.assertEqual(64, vua.get_closest(TOKENS).num_tokens)
                with self.assertRaisesRegex(VUAError, "not a cache directory"):
                    vua.put(TOKENS + first, CACHE)
        self.assertEqual(1, len(logs.output), logs.output)

    def test_asked_once_a_second(self) -> None:
        """Between two looks nobody asks the file system, however often something is read."""
        writer = self.writer()
        writer.lookup(TOKENS)
        self.moved()
        self.assertEqual([64], writer.lookup(TOKENS), "it was asked before its time")
        self.later()
        self.assertEqual([0], writer.lookup(TOKENS))

    def test_nothing_is_written_where_no_path_leads(self) -> None:
        """While the path names nothing that can be made, a put fails; then it goes on."""
        self.path = self.root / "disk" / "kv"
        self.path.parent.mkdir()
        writer = self.writer()
        disk = self.path.parent
        disk.rename(self.root / "away")
        self.later()
        hidden = sum(1 for _ in (self.root / "away").rglob("*"))
        with self.assertRaises(StorageError):
            writer.put(of(1), CACHE)
        self.assertEqual(0, writer.get_closest(TOKENS).num_tokens)
        self.assertFalse(disk.exists(), "a missing mount point was made")
        self.assertEqual(hidden, sum(1 for _ in (self.root / "away").rglob("*")))

        (self.root / "away").rename(disk)
        self.later()
        self.assertEqual(64, writer.get_closest(TOKENS).num_tokens)
        self.assertEqual(4, writer.put(of(1), CACHE))

    def test_limit_is_measured_where_writes_go(self) -> None:
        """What is moved away gets nothing more, and the limit holds for what is there instead."""
        most = 12 * CHUNK_NBYTES
        writer = self.writer(max_bytes=most, min_free_bytes=0)
        self.moved()
        before = self.size(self.root / "old")
        self.later()
        for prompt in range(1, 12):
            writer.put(of(prompt), CACHE)
        self.assertEqual(before, self.size(self.root / "old"))
        self.assertLessEqual(self.size(self.path), 1.1 * most)
        self.assertEqual(64, writer.get_closest(of(11)).num_tokens)

    @staticmethod
    def size(path: Path) -> int:
        return sum(one.stat().st_size for one in path.rglob("*.safetensors"))

    def test_other_layout(self) -> None:
        """What is of another form by then is not touched: it is a miss, and a put says so."""
        writer = self.writer()
        self.deleted()
        with self.open() as other:
            other.put(TOKENS, caches_of(layers=2, heads=1, tokens=64, dim=8))
        before = sorted(self.path.rglob("*.safetensors"))
        self.later()
        self.assertEqual(0, writer.get_closest(TOKENS).num_tokens)
        with self.assertRaisesRegex(StorageError, "does not fit"):
            writer.put(TOKENS, CACHE)
        self.assertEqual(before, sorted(self.path.rglob("*.safetensors")))

    def test_chdir(self) -> None:
        """A relative path means what it meant when it was given."""
        before = Path.cwd()
        self.addCleanup(os.chdir, before)
        elsewhere = self.root / "elsewhere"
        elsewhere.mkdir()
        os.chdir(self.root)
        with self.open("kv") as first:
            first.put(TOKENS, CACHE)
        for opened in (lambda: self.open("kv"), lambda: self.open(Path("kv"))):
            os.chdir(self.root)
            vua = opened()
            os.chdir(elsewhere)
            self.assertEqual(64, vua.get_closest(TOKENS).num_tokens)
            vua.put(of(1), CACHE)
        os.chdir(self.root)
        bounded = self.open("bounded", max_bytes=6 * CHUNK_NBYTES, min_free_bytes=0)
        bounded.put(TOKENS, CACHE)
        os.chdir(elsewhere)
        for prompt in range(1, 6):
            bounded.put(of(prompt), CACHE)
        self.assertEqual(64, bounded.get_closest(of(5)).num_tokens)
        self.assertEqual([], list(elsewhere.iterdir()))

    def test_closed(self) -> None:
        """What is closed follows nothing: its descriptor may be another file's by now."""
        self.path.mkdir(mode=0o700)
        storage = LocalStorage(self.path, renew=lambda: None, clock=lambda: self.now_s)
        storage.close()
        with tempfile.TemporaryFile() as other:
            held = os.fstat(other.fileno()).st_ino
            self.moved()
            self.later()
            self.assertTrue(storage.gone)
            self.assertEqual(held, os.fstat(other.fileno()).st_ino)

    def test_may_not_look(self) -> None:
        """What cannot be told is left as it is: an open directory goes on being read."""
        storage = self.storage_of(self.writer())
        with mock.patch.object(os, "stat", side_effect=PermissionError(errno.EACCES, "no")):
            self.assertTrue(storage.follow(doubt=True))
        self.assertEqual(4, len(list(storage.list())))


PAGE = 4096


class TestDirectReads(DirectoryTest):
    def test_first_and_second_read(self) -> None:
        """Cold chunks are read past the page cache once; the second time they come into it.

        Sizes that are no multiple of a page, several files a unit, memory of blocks. Control:
        files read before come into the page cache by their next load, and files that others are
        said to read, too, by their first.
        """
        if not has_native():
            self.skipTest("native code is not built: python3 dev.py build")
        if (why_not := direct_works(self.root)) is not None:
            self.skipTest(why_not)
        layout = KVLayout(layers=7, kv_heads=3, k_dim=40, v_dim=24, dtype="BF16", chunk_tokens=48)
        keys, arrays = keys_of(range(5 * 48), 48), model_arrays(layout, 5)
        wanted = Memory(layout, layout.full, 5, block_tokens=16).fill(arrays)
        for before, shared, colds in (
            (False, False, (5, 0, 0)),
            (True, False, (0, 0, 0)),
            (False, True, (0, 0, 0)),
        ):
            root = self.root / f"{before} {shared}"
            namespace = Namespace.create(root, Identity(model="m", chunk_tokens=48), [layout])
            [store] = namespace.stores
            if shared:
                namespace.share_reads()
            for place, key in enumerate(keys):
                save_chunk(store, key, wanted.map(), place=place)
            paths = list(root.rglob("*.safetensors"))
            cool(paths, sync=True)
            if not all(map(is_cold, paths)):
                self.skipTest("the page cache keeps files of this file system")
            if before:
                store.load(keys, Memory(layout, layout.full, 5, block_tokens=16).map())
                cool(paths, sync=False)
            for turn, expected in enumerate(colds):
                with self.subTest(read_before=before, shared=shared, turn=turn):
                    memory = Memory(layout, layout.full, 5, block_tokens=16)
                    self.assertEqual(5, store.load(keys, memory.map()).chunks)
                    for want, got in zip(wanted.buffers, memory.buffers, strict=True):
                        np.testing.assert_array_equal(want, got)
                    self.assertEqual(expected, sum(map(is_cold, paths)))
            store.close()


ALL_TESTS = Path(__file__).resolve().parents[2]


class SituationsTest(DirectoryTest):
    @unittest.skipIf(why_no_mounts("ext4"), "mounts cannot be made here")
    @pytest.mark.thorough
    def test_short(self) -> None:
        """Nothing wrong, no request fails, and what is new is stored and found again soon."""
        few = "fill ext4,another in its place,read-only,lower layer"
        more = "fill a tmpfs,removed,each file,each other,a file in its place,no descriptor,4 KiB"
        for face, chosen, many in (("library", f"{few},{more}", 20), ("CLI", few, 5)):
            report = self.root / f"{face}.json"
            words = ["--faces", face, "--only", chosen, "--json", str(report)]
            done = subprocess.run(
                [sys.executable, str(ALL_TESTS / "situations.py"), *words],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            self.assertEqual(0, done.returncode, done.stdout + done.stderr)
            cells = json.loads(report.read_text())
            self.assertEqual(many, len(cells))
            for name, cell in cells.items():
                with self.subTest(name, face=face):
                    self.assertGreater(cell[face]["right"], 0)
