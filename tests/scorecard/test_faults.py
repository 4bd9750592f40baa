"""What the fault campaigns have found, and that they find what they are for."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from unittest import mock

import pytest

from helpers import DirectoryTest
from scorecard.faults import syscalls
from scorecard.faults.world import World, layout_of
from scorecard.runner import Plan, run_test
from scorecard.subject import Key, NotApplicableError, Subject
from scorecard.trial import TESTS
from vua.capacity.lru import mtime_ns_of
from vua.io import posix, vectors
from vua.storage.base import entry_name
from vua.storage.local import LocalStorage
from vua.storage.names import TEMPORARY

NBYTES = 16 << 10


class WorldTest(DirectoryTest):
    """The directory of which every right byte is known."""

    def setUp(self) -> None:
        """Store three prompts of three chunks; two of them share the first."""
        super().setUp()
        self.world = World(self.root, layout_of(NBYTES))
        self.world.heal()

    def test_tidying_is_no_use(self) -> None:
        """A collection that sweeps a temporary file leaves the chunk as old as it was."""
        chunk = self.files()[0].parent
        (chunk / f"{TEMPORARY}x-01234567-1-2").touch()
        self.world.age()
        space = os.open(chunk.parents[1], os.O_RDONLY)
        self.addCleanup(os.close, space)
        before = mtime_ns_of(space, chunk.name)
        self.world.collect()

        self.assertFalse((chunk / f"{TEMPORARY}x-01234567-1-2").exists())
        self.assertEqual(before, mtime_ns_of(space, chunk.name))

    def test_stale_while_asking(self) -> None:
        """A file whose size cannot be asked for any more is absent; no descriptor is left open."""
        reason = syscalls.why_not()
        if reason:
            self.skipTest(reason)
        name = entry_name(self.world.keys[0][0].name, self.world.layout.full)
        store = self.world.writer()
        storage = store.storage
        self.addCleanup(store.close)

        def ask() -> None:
            gc.disable()  # it would close what earlier tests left open
            free = os.dup(0)
            os.close(free)
            found = [storage.exists([name], 1)[0] for _ in range(5)]
            for _ in range(5):
                with self.assertRaises(OSError):
                    storage.open_file(name)
            self.assertEqual([False] * 5, found)
            self.assertEqual(free, os.dup(0))

        self.assertTrue(storage.exists([name])[0])
        self.assertEqual(
            "done",
            syscalls.run_tampered(ask, "statx,newfstatat,fstat:error=ESTALE").text,
        )


class TestWhoHoldsTheInterpreter(DirectoryTest):
    """The GIL is kept only where no server can make the kernel wait."""

    def test_local(self) -> None:
        """A tmpfs is local; what is no disk at all, or no file, is not taken for it."""
        for path, expected in (("/dev/shm", True), ("/proc", False), ("/sys", False)):
            if Path(path).is_dir():
                fd = os.open(path, os.O_RDONLY)
                self.addCleanup(os.close, fd)
                self.assertEqual(expected, posix.is_local(fd), path)
        self.assertFalse(posix.is_local(-1))

    def test_elsewhere(self) -> None:
        """Where it is not local everything works as well, without any call that keeps the GIL."""
        world = World(self.root, layout_of(NBYTES))
        world.heal()
        for calls in (posix.calls, vectors.calls):
            kept = {name: calls.pop(name) for name in list(calls) if name.endswith("_cached")}
            self.addCleanup(calls.update, kept)
        with mock.patch.object(posix, "is_local", return_value=False):
            store = world.writer()
        self.addCleanup(store.close)
        self.assertIsInstance(store.storage, LocalStorage)

        self.assertEqual([3, 3, 3], [world.get(number, store) for number in world.prompts])
        self.assertFalse(store.shards("0" * 64))
        self.assertTrue(store.shards(world.keys[0][0].name))


class InPlace(Subject):
    """A store that writes under the final name, slowly, and checks nothing."""

    name = "in place"

    def __init__(self, root: Path, nbytes: int) -> None:
        self.root, self.nbytes = root, nbytes

    def path(self, key: Key) -> Path:
        return self.root / f"{key.number}.bin"

    def put(self, key: Key, data: bytes) -> bool:
        with self.path(key).open("wb", buffering=0) as stream:
            for start in range(0, len(data), len(data) // 4):
                stream.write(data[start : start + len(data) // 4])
                time.sleep(0.002)
        return True

    def get(self, key: Key, into: memoryview) -> bool:
        try:
            with self.path(key).open("rb") as stream:
                stream.readinto(into)
        except OSError:
            return False
        return True

    def files(self, key: Key) -> list[Path]:
        return [self.path(key)] if self.path(key).exists() else []


def make_in_place(
    root: Path, nbytes: int, *, max_bytes: int | None = None, durable: bool = False
) -> Subject:
    if max_bytes is not None or durable:
        raise NotApplicableError("in place")
    return InPlace(root, nbytes)


class TestCampaigns(DirectoryTest):
    """A campaign that cannot fail shows nothing."""

    @pytest.mark.thorough
    def test_torn_files_are_found(self) -> None:
        """Random kills find that files are written in place and not checked."""
        outcome = run_test(TESTS[1], Plan(make=make_in_place, own=False, directory=self.root))

        self.assertEqual("fail", outcome.verdict, outcome)
        self.assertRegex("\n".join(outcome.found), r"nothing wrong is read: [1-9]")

    @pytest.mark.thorough
    def test_kills_and_errors_are_injected(self) -> None:
        """An operation is killed at the call that was named, or that call fails, or neither."""
        reason = syscalls.why_not()
        if reason:
            self.skipTest(reason)
        path = self.root / "file"

        def write() -> None:
            fd = os.open(path, os.O_CREAT | os.O_WRONLY)
            for text in (b"a", b"b", b"c"):
                os.write(fd, text)
            os.close(fd)

        self.assertEqual(3, syscalls.calls_of(write)["write"])
        self.assertTrue(syscalls.run_tampered(write, "write:signal=SIGKILL:when=3").killed)
        self.assertEqual(b"abc", path.read_bytes())  # two of them new
        path.unlink()
        self.assertIn("[Errno 5]", syscalls.run_tampered(write, "write:error=EIO:when=2").text)
        self.assertEqual(b"a", path.read_bytes())
