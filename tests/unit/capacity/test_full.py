"""A file system in which nothing can be made, chunks that cannot go, few inodes, odd modes."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

from commands import run
from helpers import DirectoryTest, caches_of, without_native_deletion
from vua.core import VUA, VUAConfig

CACHE = caches_of(layers=1, heads=2, tokens=64, dim=64)
NBYTES = 20 << 10
"""A chunk's file takes less."""


def of(prompt: int) -> torch.Tensor:
    return torch.arange(64) + 1000 * prompt


@contextlib.contextmanager
def nothing_can_be_made() -> Iterator[None]:
    """Refuse new names and moved ones with ENOSPC, as a file system without inodes does."""
    real_open, full = os.open, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def opened(path, flags, mode=0o777, *, dir_fd=None):  # noqa: ANN001, ANN202
        if flags & os.O_CREAT:
            raise full
        return real_open(path, flags, mode, dir_fd=dir_fd)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(os, "open", opened))
        for name in ("mkdir", "rename", "replace", "link"):
            stack.enter_context(mock.patch.object(os, name, side_effect=full))
        yield


class FullTest(DirectoryTest):
    """A cache in a directory."""

    def open(self, **settings: object) -> VUA:
        vua = VUA(VUAConfig(split_factor=16, **settings), self.root)
        self.addCleanup(vua.close)
        return vua

    def filled(self, prompts: int = 4) -> None:
        with self.open() as vua:
            for prompt in range(prompts):
                self.assertEqual(4, vua.put(of(prompt), CACHE))

    def test_gc(self) -> None:
        """`vua gc` empties a directory in which nothing can be made, also without `.upkeep`."""
        self.filled()
        for without in (False, True):
            if without:
                shutil.rmtree(self.root / ".upkeep", ignore_errors=True)
            most = 8 - 4 * without
            with self.subTest(without), nothing_can_be_made():
                code = run("gc", self.root, "--max-bytes", f"{most * NBYTES >> 10}K", "--yes")[0]
            self.assertEqual(0, code)
            self.assertLessEqual(len(self.files()), most + 1)

    def test_rm(self) -> None:
        """`vua rm --all` does, too."""
        self.filled()
        with nothing_can_be_made():
            self.assertEqual(0, run("rm", self.root, "--all", "--yes")[0])
        self.assertEqual([], self.files())

    def test_eviction(self) -> None:
        """A writer evicts where nothing can be renamed and no lease can be made."""
        vua = self.open(max_bytes=9 * NBYTES, min_free_bytes=0)
        for prompt in range(2):
            vua.put(of(prompt), CACHE)
        namespace = vua.namespace()
        assert namespace is not None
        reclaim = namespace.capacity
        with nothing_can_be_made():
            self.assertTrue(reclaim.make_space(4 * NBYTES, full=True))
        self.assertGreaterEqual(namespace.capacity.counts["chunks_evicted"], 4)

    def test_immovable(self) -> None:
        """What can be neither moved nor deleted is named; the rest goes, and puts go on."""
        self.filled()
        stays = self.files()[0]
        real_rename, real_unlink = os.rename, os.unlink

        def renamed(path, *args, **named):  # noqa: ANN001, ANN002, ANN003, ANN202
            if stays.parent.name in str(path):
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            return real_rename(path, *args, **named)

        def unlinked(path, *args, dir_fd=None):  # noqa: ANN001, ANN002, ANN202
            above = str(Path(f"/proc/self/fd/{dir_fd}").readlink()) if dir_fd is not None else ""
            if stays.parent.name in f"{above}/{path}":
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            return real_unlink(path, *args, dir_fd=dir_fd)

        with (
            mock.patch.object(os, "rename", renamed),
            mock.patch.object(os, "unlink", unlinked),
            without_native_deletion(),
        ):
            code, said = run("gc", self.root, "--max-bytes", "0K", "--yes")[:2]
            self.assertEqual(1, code, "it is beyond its bounds by that chunk")
            self.assertIn("1 chunk can be neither moved nor deleted", said)
            self.assertIn(stays.parent.name, said)
            self.assertIn(stays, self.files())
            self.assertEqual([stays], self.files())
            vua = self.open(max_bytes=9 * NBYTES, min_free_bytes=0)
            for prompt in range(10, 14):
                vua.put(of(prompt), CACHE)
            self.assertEqual(64, vua.get_closest(of(13)).num_tokens)
            self.assertEqual(1, run("rm", self.root, "--all", "--yes")[0])
        self.assertEqual([stays.name], [one.name for one in self.files()])

    def test_inodes(self) -> None:
        """Chunks go for new ones where the file system has few inodes left, none beyond that."""
        real = os.statvfs(self.root)
        most = 700

        def statvfs(path):  # noqa: ANN001, ANN202
            used = sum(2 for _ in self.files())
            fields = list(os.statvfs_result(real))
            fields[5], fields[6], fields[7] = most, most - used, most - 660 - used
            return os.statvfs_result(fields)

        with mock.patch.object(os, "statvfs", statvfs):  # 14 are to stay: there is room for 13
            vua = self.open(min_free_bytes=0)
            for prompt in range(8):
                vua.put(of(prompt), CACHE)
                self.assertLessEqual(len(self.files()), 13)
            self.assertEqual(64, vua.get_closest(of(7)).num_tokens)

    def test_few_inodes(self) -> None:
        """A file system with 200 inodes holds what it can, however many were stored."""
        mount = ["mount", "-t", "tmpfs", "-o", "nr_inodes=200,size=64m", "tmpfs", str(self.root)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            self.skipTest("this user may not mount a tmpfs")
        self.addCleanup(subprocess.run, ["umount", "-l", str(self.root)], check=True)
        vua = self.open()
        self.assertEqual([4] * 40, [vua.put(of(prompt), CACHE) for prompt in range(40)])
        self.assertGreater(len(self.files()), 32)
        self.assertEqual(64, vua.get_closest(of(39)).num_tokens)

    def test_hard_links(self) -> None:
        """A snapshot by hard links (`cp -al`) is read, and so is what it was made of."""
        self.filled(1)
        snapshot = self.root.with_name(f"{self.root.name}-snapshot")
        self.addCleanup(shutil.rmtree, snapshot)
        subprocess.run(["cp", "-al", self.root, snapshot], check=True)
        for path in (self.root, snapshot):
            with VUA(VUAConfig(split_factor=16), path) as vua:
                self.assertEqual(64, vua.get_closest(of(0)).num_tokens)
