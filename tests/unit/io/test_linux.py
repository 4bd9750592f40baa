"""System calls that move all the bytes, or say why not: `vua.io.posix`, `vectors`, `machine`."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np

from helpers import DirectoryTest, descriptors
from vua.io import posix, vectors
from vua.io.posix import cached_pages
from vua.io.vectors import IOV_MAX, Iovecs


def iovecs_of(buffer: np.ndarray, lengths: list[int], gap: int = 0) -> Iovecs:
    """Iovecs of these lengths in a buffer of bytes, one after the other with gaps."""
    address, rows = buffer.ctypes.data, []
    for length in lengths:
        rows.append((address, length))
        address += length + gap
    return np.array(rows, dtype=np.uint64).reshape(-1, 2)


def noise(nbytes: int) -> np.ndarray:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes).astype(np.uint8)


def as_portable(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test with the system's calls, and once more without."""

    def both(self: unittest.TestCase) -> None:
        for calls in (dict(vectors.calls), {}):
            with self.subTest(calls=len(calls)), mock.patch.dict(vectors.calls, calls, clear=True):
                test(self)

    both.__doc__ = test.__doc__
    return both


class TestTransfer(DirectoryTest):
    """Reading and writing many pieces of memory at once."""

    def open(self, name: str = "file", flags: int = os.O_RDWR | os.O_CREAT) -> int:
        """A descriptor that is closed after the test."""
        fd = os.open(self.root / name, flags)
        self.addCleanup(os.close, fd)
        return fd

    @as_portable
    def test_more_pieces_than_one_call_takes(self) -> None:
        """Any number of pieces is moved, empty ones too, and what lies between is left alone."""
        for count in (0, 1, 2, IOV_MAX - 1, IOV_MAX, IOV_MAX + 1, 5000):
            lengths = [n % 7 for n in range(count)]
            source = noise(sum(lengths) + 3 * count + 1)
            pieces = iovecs_of(source, lengths, gap=3)
            kept = pieces.copy()
            fd = self.open()
            os.ftruncate(fd, 0)

            self.assertEqual(sum(lengths), vectors.pwritev_all(fd, pieces, 5))
            target = np.full(len(source), 0xA5, dtype=np.uint8)
            there = iovecs_of(target, lengths, gap=3)
            self.assertEqual(sum(lengths), vectors.preadv_all(fd, there, 5))
            expected, at = np.full(len(source), 0xA5, dtype=np.uint8), 0
            for length in lengths:
                expected[at : at + length] = source[at : at + length]
                at += length + 3
            np.testing.assert_array_equal(expected, target)
            np.testing.assert_array_equal(kept, pieces)

    @as_portable
    def test_end_of_file(self) -> None:
        """A read that reaches the end says how much there was."""
        fd, source = self.open(), noise(1000)
        os.pwrite(fd, source.tobytes(), 0)
        for offset in (0, 1, 999, 1000, 5000):
            target = np.zeros(3000, dtype=np.uint8)
            got = vectors.preadv_all(fd, iovecs_of(target, [7] * 400), offset)

            self.assertEqual(max(0, 1000 - offset), got)
            np.testing.assert_array_equal(source[offset:], target[:got])
            self.assertFalse(target[got:].any())

    @as_portable
    def test_short_reads(self) -> None:
        """A pipe gives what it has; the rest is asked for, piece by piece."""
        ends = os.pipe()
        source, target = noise(50_000), np.zeros(50_000, dtype=np.uint8)
        lengths = [1, 4999] * 10

        def trickle() -> None:
            for at in range(0, 50_000, 3333):
                os.write(ends[1], source[at : at + 3333].tobytes())
                time.sleep(0.001)  # so that reads are often shorter than what is asked for
            os.close(ends[1])

        def read(call: str, fd: int, batch: Iovecs, offset: int) -> int:
            views = [vectors.memory_at(int(a), int(n)) for a, n in batch if n]
            return os.readv(fd, views)

        thread = threading.Thread(target=trickle)
        thread.start()
        with mock.patch.object(vectors, "vector_call", new=read):  # a pipe knows no offsets
            got = vectors.preadv_all(ends[0], iovecs_of(target, lengths), 0)
        thread.join()
        os.close(ends[0])

        self.assertEqual(50_000, got)
        np.testing.assert_array_equal(source, target)

    @as_portable
    def test_short_writes(self) -> None:
        """A write that stops at a limit goes on, and raises where it cannot."""
        source, written = noise(9000), bytearray()

        def write(call: str, fd: int, batch: Iovecs, offset: int) -> int:
            self.assertEqual(len(written), offset)
            data = b"".join(bytes(vectors.memory_at(int(a), int(n))) for a, n in batch)
            written.extend(data[:1234])
            return min(1234, len(data))

        with mock.patch.object(vectors, "vector_call", new=write):
            self.assertEqual(9000, vectors.pwritev_all(3, iovecs_of(source, [1, 999] * 9), 0))
        self.assertEqual(source.tobytes(), bytes(written))
        with mock.patch.object(vectors, "vector_call", return_value=0):
            with self.assertRaises(OSError) as caught:
                vectors.pwritev_all(3, iovecs_of(source, [9]), 0)
            self.assertEqual(errno.EIO, caught.exception.errno)

    @as_portable
    def test_errors(self) -> None:
        """An error of the system is raised with its errno."""
        buffer = noise(8)
        fd = self.open("other", os.O_RDONLY | os.O_CREAT)
        with self.assertRaises(OSError) as caught:
            vectors.pwritev_all(fd, iovecs_of(buffer, [8]), 0)
        self.assertEqual(errno.EBADF, caught.exception.errno)
        directory = os.open(self.root, os.O_RDONLY)
        self.addCleanup(os.close, directory)
        with self.assertRaises(IsADirectoryError):
            vectors.preadv_all(directory, iovecs_of(buffer, [8]), 0)

    def test_cached_read(self) -> None:
        """A read of what is in the page cache is complete, one of what is not says so."""
        fd, source = self.open(), noise(100_000)
        os.pwrite(fd, source.tobytes(), 0)
        os.fsync(fd)
        target = np.zeros(100_000, dtype=np.uint8)
        pieces = iovecs_of(target, [50_000, 50_000])
        warm = vectors.preadv_cached(fd, pieces.ctypes.data, 2, 0)
        if warm == -1:
            self.skipTest("this system cannot read without blocking")
        self.assertEqual(100_000, warm)
        np.testing.assert_array_equal(source, target)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self.assertIn(
            vectors.preadv_cached(fd, pieces.ctypes.data, 2, 0),
            (-1, *range(0, 100_001, 4096), warm),
        )
        self.assertEqual(100_000, vectors.preadv_all(fd, pieces, 0))

    def test_cached_pages(self) -> None:
        """What was written is in the page cache, page by page; the system may not tell."""
        fd = self.open()
        found = [cached_pages(fd)]
        os.write(fd, bytes(3 * posix.PAGE - 1))
        found.append(cached_pages(fd))
        with mock.patch("vua.io.posix.LINUX64", new=False):
            self.assertIsNone(cached_pages(fd))
        if found[0] is None:
            self.skipTest("before Linux 6.5")
        self.assertEqual([0, 3], found)


class TestAllocate(DirectoryTest):
    """Room on the disk before the bytes."""

    def test_allocate(self) -> None:
        """Room is found where the file system can do that; elsewhere nothing happens."""
        with (self.root / "file").open("w+b") as stream:
            vectors.allocate(stream.fileno(), 1 << 20)
            status = os.fstat(stream.fileno())
            self.assertIn(status.st_size, (0, 1 << 20))
            if posix.is_ext4(stream.fileno()):
                self.assertEqual(1 << 20, status.st_size)
                self.assertGreaterEqual(512 * status.st_blocks, 1 << 20)
        inside, outside = os.pipe()
        vectors.allocate(outside, 100)
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

    def test_files(self) -> None:
        """A file below is opened for reading, and nothing else of the process changes."""
        before = descriptors(self.root)
        for opened in self.both():
            fd = opened("a/b/file")
            if fd is not None:
                self.assertEqual(b"text", os.read(fd, 9))
                self.assertFalse(os.get_inheritable(fd))
                expected, found = os.fstat(fd), posix.status_cached(fd)
                inode = (expected.st_dev, expected.st_ino)
                owner = (expected.st_uid, expected.st_nlink)
                self.assertEqual((expected.st_mode, 4, inode, *owner), found)
                posix.close_cached(fd)
        self.assertEqual(before, descriptors(self.root))

    def test_status_without_statx(self) -> None:
        """Without statx the answer is the same."""
        fd = posix.open_beneath(self.fd, "a/b/file")
        self.addCleanup(os.close, fd)
        with mock.patch.dict(posix.calls, clear=True):
            portable = posix.status_cached(fd)
        self.assertEqual(portable, posix.status_cached(fd))

    def test_absent(self) -> None:
        """What is not there is FileNotFoundError."""
        for opened in self.both():
            for path in ("nothing", "a/nothing", "a/nothing/file", "x/y/z"):
                try:
                    self.assertIsNone(opened(path))
                except FileNotFoundError:
                    continue

    def test_refused(self) -> None:
        """Links at any step, and whatever lies outside, are not opened."""
        before = descriptors(self.root)
        for number, opened in enumerate(self.both()):
            for path in ("a/b/link", "linked/b/file", "outside/etc/hostname", "a/b/file/x"):
                with self.subTest(path, number=number):
                    try:
                        self.assertIsNone(opened(path))
                    except OSError as problem:
                        known = (errno.ELOOP, errno.ENOTDIR, errno.EXDEV, errno.ENOENT)
                        self.assertIn(problem.errno, known)
        with self.assertRaises(OSError):
            posix.open_beneath(self.fd, "../x")
        self.assertEqual(before, descriptors(self.root))

    def test_fifo(self) -> None:
        """A FIFO is opened without waiting for a writer."""
        for opened in self.both():
            fd = opened("a/b/fifo")  # else it hangs here
            if fd is not None:
                self.assertTrue(stat.S_ISFIFO(posix.status_cached(fd).mode))
                os.close(fd)

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
