"""System calls that move all the bytes, or say why not: `vua.io.posix`, `vua.io.memory`."""

from __future__ import annotations

import errno
import os
import unittest
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise, product
from pathlib import Path
from unittest import mock

import torch

from helpers import DirectoryTest, descriptors
from vua.io import posix
from vua.io.memory import IOV_MAX, BufferPool, allocate, move_all


class TestMoveAll(DirectoryTest):
    """Reading and writing many pieces of memory at once."""

    def open(self) -> int:
        """A descriptor that is closed after the test."""
        fd = os.open(self.root / "file", os.O_RDWR | os.O_CREAT)
        self.addCleanup(os.close, fd)
        return fd

    def test_any_number_of_pieces(self) -> None:
        """All bytes are moved, empty pieces too, by calls that move less than is asked for."""
        for count, most in product((0, 1, IOV_MAX, IOV_MAX + 1, 5000), (1, 1234, 1 << 20)):
            if most == 1 and count > 1:
                continue  # takes long
            fd, data = self.open(), os.urandom(sum(n % 7 for n in range(count)))
            os.ftruncate(fd, 0)
            target = bytearray(len(data))
            edges = [0, *accumulate(n % 7 for n in range(count))]

            def some(call: Callable, fd: int, views: list, at: int, *, most: int = most) -> int:
                self.assertLessEqual(len(views), IOV_MAX)
                few, left = [], most
                for view in views:
                    few.append(view[:left])
                    left -= len(few[-1])
                return call(fd, few, at)

            for call, memory in ((os.pwritev, data), (os.preadv, target)):
                views = [memoryview(memory)[a:b] for a, b in pairwise(edges)]
                moved = move_all(partial(some, call), fd, views, 5)
                self.assertEqual(len(data), moved)
            self.assertEqual(data, bytes(target))

    def test_end_of_file(self) -> None:
        """A read that reaches the end says how much there was."""
        fd, data = self.open(), os.urandom(1000)
        os.pwrite(fd, data, 0)
        for offset in (0, 1, 999, 1000, 5000):
            pieces = [bytearray(7) for _ in range(400)]
            got = move_all(os.preadv, fd, [*map(memoryview, pieces)], offset)

            self.assertEqual(max(0, 1000 - offset), got)
            self.assertEqual(data[offset:].ljust(2800, b"\0"), b"".join(pieces))


class TestAllocate(DirectoryTest):
    """Room on the disk before the bytes."""

    def test_allocate(self) -> None:
        """Room is found where the file system can do that; elsewhere nothing happens."""
        with (self.root / "file").open("w+b") as stream:
            allocate(stream.fileno(), 1 << 20)
            status = os.fstat(stream.fileno())
            self.assertIn(status.st_size, (0, 1 << 20))
            if posix.is_ext4(stream.fileno()):
                self.assertEqual(1 << 20, status.st_size)
                self.assertGreaterEqual(512 * status.st_blocks, 1 << 20)
        inside, outside = os.pipe()
        allocate(outside, 100)
        self.assertFalse(posix.is_ext4(outside))
        os.close(inside)
        os.close(outside)


class TestOpen(DirectoryTest):
    """Opening below a directory, through no link."""

    def setUp(self) -> None:
        """Make a file in a directory in a directory, and links of all kinds."""
        super().setUp()
        self.below = self.root / "a" / "b"
        self.below.mkdir(parents=True)
        (self.below / "file").write_text("text")
        (self.below / "link").symlink_to("file")
        (self.root / "outside").symlink_to("/")
        (self.root / "linked").symlink_to("a")
        os.mkfifo(self.below / "fifo")
        self.fd = os.open(self.root, os.O_RDONLY)
        self.addCleanup(os.close, self.fd)

    def both(self) -> list[Callable[[str], int | None]]:
        """The two ways to open: by openat2, and step by step."""

        def stepwise(path: str) -> int:
            with mock.patch.object(posix, "_HAS_OPENAT2", new=False):
                return posix.open_beneath(self.fd, path)

        return [
            lambda path: posix.open_beneath(self.fd, path),
            stepwise,
            lambda path: posix.open_cached(self.fd, path),
        ]

    def test_paths(self) -> None:
        """A file below is opened, and a FIFO without waiting; no link is followed at any step.

        The status is that of `fstat`, with statx and without.
        """
        absent, refused = (errno.ENOENT,), (errno.ELOOP, errno.ENOTDIR, errno.EXDEV, errno.ENOENT)
        before = descriptors(self.root)
        for (number, opened), (path, codes) in product(
            enumerate(self.both()),
            (
                *(("a/b/file", ()), ("a/b/fifo", ())),
                *((path, absent) for path in ("nothing", "a/nothing/file", "x/y/z")),
                *(
                    (path, refused)
                    for path in ("a/b/link", "linked/b/file", "outside/etc/hostname")
                ),
                ("a/b/file/x", refused),
            ),
        ):
            with self.subTest(path, number=number):
                try:
                    fd = opened(path)
                except OSError as problem:
                    self.assertIn(problem.errno, codes)
                    continue
                if fd is None:  # ask the other way
                    continue
                self.assertEqual((), codes)
                self.assertFalse(os.get_inheritable(fd))
                expected, found = os.fstat(fd), posix.status_cached(fd)
                inode = (expected.st_dev, expected.st_ino)
                owner = (expected.st_uid, expected.st_nlink)
                self.assertEqual((expected.st_mode, expected.st_size, inode, *owner), found)
                with mock.patch.dict(posix.calls, clear=True):
                    self.assertEqual(found, posix.status_cached(fd))
                posix.close_cached(fd)
        with self.assertRaises(OSError):
            posix.open_beneath(self.fd, "../x")
        self.assertEqual(before, descriptors(self.root))

    def test_kernel_without_openat2(self) -> None:
        """A kernel, or a sandbox, that refuses openat2 is noticed."""
        self.assertIsInstance(posix.has_openat2(), bool)
        with mock.patch.dict(posix.calls, clear=True):
            self.assertFalse(posix.has_openat2())

        def refuse(*_: object) -> int:
            posix.ctypes.set_errno(errno.EPERM)
            return -1

        root = Path("/")  # which it opens
        before = descriptors(root).count("/")
        with mock.patch.dict(posix.calls, openat2=refuse):
            self.assertFalse(posix.has_openat2())
        self.assertEqual(before, descriptors(root).count("/"))
        for code in (errno.ENOSYS, errno.EINVAL, errno.EAGAIN):

            def answer(*_: object, code: int = code) -> int:
                posix.ctypes.set_errno(code)
                return -1

            with mock.patch.dict(posix.calls, openat2_cached=answer):
                self.assertIsNone(posix.open_cached(self.fd, "a/b/file"))


MIB = 1 << 20


class TestBufferPool(unittest.TestCase):
    """What is lent, and when it comes back."""

    def test_held(self) -> None:
        """Whatever is made of a tensor keeps its memory from being lent."""
        for name, make in {
            "view": lambda t: t[100:200],
            "dtype": lambda t: t.view(torch.bfloat16).view(2, -1)[1],
            "array": lambda t: t.numpy()[5:],
            "storage": lambda t: t.untyped_storage(),
            "split": lambda t: list(t.split(MIB)[1:]),
            "alias": lambda t: t.detach(),
            "memoryview": lambda t: memoryview(t.numpy())[7:],
        }.items():
            with self.subTest(name):
                pool = BufferPool(64 * MIB)
                tensor = torch.from_numpy(pool.take(2 * MIB))
                place = tensor.data_ptr()
                kept = make(tensor)
                del tensor
                self.assertNotEqual(place, pool.take(2 * MIB).ctypes.data)
                del kept
                self.assertEqual(place, pool.take(2 * MIB).ctypes.data)  # the one used last

    def test_bound(self) -> None:
        """No more is kept than was said, the newest first; with 0, nothing."""
        pool = BufferPool(10 * MIB)
        lent = [pool.take(4 * MIB) for _ in range(4)]
        newest = lent[-1].ctypes.data
        while lent:
            del lent[0]
        self.assertEqual(8 * MIB, pool.idle_nbytes)
        self.assertEqual(newest, pool.take(4 * MIB).ctypes.data)
        pool.take(11 * MIB)
        self.assertEqual(8 * MIB, pool.idle_nbytes)
        nothing = BufferPool(0)
        nothing.take(4 * MIB)
        self.assertEqual(0, nothing.idle_nbytes)
