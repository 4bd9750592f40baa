"""Every system call of every operation is the last one, or fails; many processes at once."""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import time
import traceback
import unittest
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import islice, zip_longest
from pathlib import Path
from unittest import mock

import pytest

from helpers import DirectoryTest, in_child, walked
from scorecard.world import (
    ROOMY,
    Operation,
    World,
    WrongBytesError,
    calls_of,
    layout_of,
    operations,
    run_tampered,
    why_not,
)
from vua.capacity import evictor, reclaim
from vua.capacity.limits import Limits
from vua.capacity.lru import mtime_ns_of
from vua.errors import StorageError
from vua.io import posix
from vua.storage.local import LocalStorage
from vua.storage.names import TEMPORARY
from vua.store.store import Store

NBYTES = 16 << 10
CASES = 16 * int(os.environ.get("VUA_TEST_SCALE", "1"))
"""Of each test; there are some thousands."""
ERRORS = ("ENOSPC", "EIO", "ESTALE", "EACCES", "EINTR")
FAILING = {
    *("openat", "openat2", "mkdir", "mkdirat", "read", "preadv", "preadv2", "pwritev", "write"),
    *("close", "fsync", "rename", "renameat", "renameat2", "link", "linkat", "unlink", "unlinkat"),
    *("rmdir", "utimensat", "newfstatat", "fstat", "statx", "fchmod", "getdents64", "statfs"),
}
GONE = "statx,newfstatat,fstat:error=ESTALE"  # from one call on: one way to ask is like another
LYING = {"pwritev": 4096, "preadv": 4096, "read": 100}  # moves nothing, claims so many bytes
WHY_NOT = why_not()


@unittest.skipIf(WHY_NOT, WHY_NOT or "")
@pytest.mark.thorough
class OperationsTest(DirectoryTest):
    """Puts, gets, evictions and collections, disturbed at each call that touches a file."""

    def drawn(self, inject: Callable[[str, int], list[str]]) -> list[tuple[Operation, str]]:
        """Some of the disturbances that ``inject`` names of a call, as many of each operation."""
        chance, cases = random.Random(os.environ.get("VUA_TEST_SEED", "1")), defaultdict(list)
        for operation in operations(self.root):
            operation.prepare()
            for call, count in sorted(calls_of(operation.run).items()):
                for turn in range(1, count + 1):
                    cases[operation.name] += [(operation, one) for one in inject(call, turn)]
        rows = zip_longest(*(chance.sample(some, len(some)) for some in cases.values()))
        return list(islice((case for row in rows for case in row if case), CASES))

    def check_state(self, operation: Operation, orphans: int) -> None:
        """Nothing wrong is read, and what is missing can be put; one collection leaves no rest."""
        world = operation.world
        world.check()
        self.assertLessEqual(len(world.leftovers()), orphans, world.leftovers()[:3])
        world.heal()
        world.sweep()

    def test_killed(self) -> None:
        """Killed at any call an operation leaves no more than its due, and nothing wrong."""
        survived = 0
        cases = self.drawn(lambda call, turn: [f"{call}:signal=SIGKILL:when={turn}"])
        for operation, inject in cases:
            operation.prepare()
            survived += not run_tampered(operation.run, inject).killed
            with self.subTest(operation=operation.name, inject=inject):
                self.check_state(operation, operation.orphans)
        self.assertLessEqual(survived, 1 + len(cases) // 50)  # a call depends on the moment

    def test_failing(self) -> None:
        """Each call fails, once or from then on, or lies about a length: "not stored", or right."""

        def inject(call: str, turn: int) -> list[str]:
            if call not in FAILING:
                return []
            found = [f"{call}:error={name}:when={turn}" for name in ERRORS]
            found.append(f"{call}:error=EIO:when={turn}+")
            if call in ("statx", "newfstatat"):
                found.append(f"{GONE}:when={turn}+")
            if call in LYING:
                found.append(f"{call}:retval={LYING[call]}:when={turn}")
            return found

        for operation, what in self.drawn(inject):
            operation.prepare()
            text = run_tampered(operation.run, what).text
            with self.subTest(operation=operation.name, inject=what):
                self.assertTrue(operation.may_end(text), text[-600:] or "it died")
                self.check_state(operation, 99)

    def test_kills_and_errors_are_injected(self) -> None:
        """An operation is killed at the call that was named, or that call fails, or neither."""
        path = self.root / "file"

        def write() -> None:
            fd = os.open(path, os.O_CREAT | os.O_WRONLY)
            for text in (b"a", b"b", b"c"):
                os.write(fd, text)
            os.close(fd)

        self.assertEqual(3, calls_of(write)["write"])
        self.assertTrue(run_tampered(write, "write:signal=SIGKILL:when=3").killed)
        self.assertEqual(b"abc", path.read_bytes())  # two of them new
        path.unlink()
        self.assertIn("[Errno 5]", run_tampered(write, "write:error=EIO:when=2").text)
        self.assertEqual(b"a", path.read_bytes())


class WorldTest(DirectoryTest):
    """The directory of which every right byte is known."""

    def setUp(self) -> None:
        """Store three prompts of three chunks; two of them share the first."""
        super().setUp()
        self.world = World(self.root, layout_of(NBYTES))
        self.world.heal()

    def test_wrong_bytes_are_seen(self) -> None:
        """A reader that believes all it is given raises what the tests look for."""
        key = self.world.keys[0][0]
        arrays = [[layer.clone() for layer in part] for part in self.world.content(key)]
        self.world.judge([key], arrays)
        arrays[1][0][0, 0, 0] += 1
        with self.assertRaises(WrongBytesError):
            self.world.judge([key], arrays)

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
        names = [name for name in posix.calls if name.endswith("_cached")]
        self.assertTrue(names)
        kept = {name: posix.calls.pop(name) for name in names}
        self.addCleanup(posix.calls.update, kept)
        with mock.patch.object(posix, "is_local", return_value=False):
            store = world.writer()
        self.addCleanup(store.close)
        self.assertIsInstance(store.storage, LocalStorage)

        self.assertEqual([3, 3, 3], [world.get(number, store) for number in world.prompts])
        self.assertFalse(store.shards("0" * 64))
        self.assertTrue(store.shards(world.keys[0][0].name))


SCALE = int(os.environ.get("VUA_TEST_SCALE", "1"))
SECONDS = 2.0 * SCALE
CROWD = min(2 * SCALE, 8)
"""So many write, and as many read."""
KEYS = 1000
NBYTES = 8192
PATIENCE_S = 60.0
"""On a busy machine so much longer, until each has had turns."""
TURNS = 20
MOST = KEYS // 4 * (NBYTES + 4096)


def world_of(root: Path, bounds: Limits) -> World:
    return World(root, layout_of(NBYTES), prompts=2 * KEYS, chunks=1, bounds=bounds)


class Worker:
    def __init__(self, world: World, stored: mmap.mmap, number: int) -> None:
        self.world, self.stored, self.counts = world, stored, Counter[str]()
        self.chance = random.Random(number)

    def run(self, role: str, until_s: float) -> None:
        """Work until then; who writes or reads at least for some turns."""
        turns, store = 0, self.world.writer()
        while time.monotonic() < until_s or (turns < TURNS and role != "sweep"):
            if time.monotonic() > until_s + PATIENCE_S:
                break
            turns += 1
            try:
                getattr(self, role)(store, self.chance.randrange(KEYS))
            except WrongBytesError:
                self.counts["wrong"] += 1
        store.close()

    def write(self, store: Store, key: int) -> None:
        """Put a prompt. One that is refused is not stored, which is no fault."""
        try:
            if self.world.put(2 * key, store):
                self.stored[key] = 1
                self.counts["stored"] += 1
        except StorageError:
            self.counts["refused"] += 1

    def read(self, store: Store, key: int) -> None:
        """Get a prompt; where it is not found although it had been stored, count that, too."""
        stored = self.stored[key]
        found = self.world.get(2 * key, store)
        self.counts["hit" if found else "unexplained" if stored else "miss"] += 1

    def sweep(self, store: Store, key: int) -> None:
        self.world.collect()
        time.sleep(0.2)


@pytest.mark.thorough
class CrowdTest(DirectoryTest):
    """Writers, readers, evictors, collectors: nothing wrong, no exception, within the limit."""

    def crowd(self, root: Path, roles: list[str], bounds: Limits) -> tuple[Counter[str], int]:
        """Let processes work; return what they counted, and the most bytes that there were."""
        root.mkdir(mode=0o700)
        world, stored = world_of(root, bounds), mmap.mmap(-1, KEYS)
        filled = KEYS // 4 if bounds is not ROOMY else 1
        self.assertEqual("well", in_child(lambda: [world.put(2 * key) for key in range(filled)]))
        until_s = time.monotonic() + SECONDS
        children = [self.start(world, stored, number, role, until_s)
                    for number, role in enumerate(roles)]  # fmt: skip
        highest, ends = 0, dict[int, int]()
        while len(ends) < len(children):
            running = [child for child in children if child not in ends]
            for child in running:  # at one moment: to look takes long
                os.kill(child, signal.SIGSTOP)
            nbytes = 0
            for path in walked(root):
                with suppress(FileNotFoundError):  # a call that was under way ends all the same
                    nbytes += path.stat().st_size if path.is_file() else 0
            highest = max(highest, nbytes)
            for child in running:
                os.kill(child, signal.SIGCONT)
            time.sleep(0.1)
            for child in running:
                ended, status = os.waitpid(child, os.WNOHANG)
                ends |= {child: os.waitstatus_to_exitcode(status)} if ended else {}
        said = [path.read_text() for path in sorted(self.root.glob(f"{root.name}-*.txt"))]
        self.assertEqual({0}, {*ends.values()}, said)
        return sum((Counter(json.loads(one)) for one in said), Counter[str]()), highest

    def start(self, world: World, stored: mmap.mmap, number: int, role: str, until_s: float) -> int:
        child, said = os.fork(), self.root / f"{world.root.name}-{number}.txt"
        if child:
            return child
        status = 1
        try:
            signal.alarm(int(SECONDS + 2 * PATIENCE_S))
            worker = Worker(world, stored, number)
            worker.run(role, until_s)
            said.write_text(json.dumps(worker.counts))
            status = 0
        except BaseException:  # noqa: BLE001 - the parent tells of it
            said.write_text(traceback.format_exc())
        finally:
            os._exit(status)

    def test_without_a_limit(self) -> None:
        """What was stored is a hit, always."""
        roles = ["write"] * CROWD + ["read"] * CROWD
        counts, _ = self.crowd(self.root / "unlimited", roles, ROOMY)
        self.assertGreater(min(counts["hit"], counts["stored"]), 0, counts)
        self.assertEqual((0, 0), (counts["wrong"], counts["unexplained"]), counts)

    def test_with_a_limit(self) -> None:
        """Victims of its own, and as in a directory of very many chunks told by others."""
        roles = ["write"] * CROWD + ["read"] * CROWD + ["sweep"]
        bounds = Limits(max_bytes=MOST, min_free_bytes=0)
        for name, many in (("few", False), ("many", True)):
            with self.subTest(name), ExitStack() as stack:
                if many:
                    for where, what, value in (
                        (evictor, "AT_ONCE", 0),
                        (evictor, "SHARED", 1),
                        (evictor, "_VICTIMS", KEYS // 32),
                        (reclaim, "AT_ONCE", 0),
                        (evictor, "_SAMPLED_CHUNKS", KEYS // 64),
                    ):
                        stack.enter_context(mock.patch.object(where, what, value))
                counts, highest = self.crowd(self.root / name, roles, bounds)
                self.assertGreater(min(counts["hit"], counts["stored"]), 0, counts)
                self.assertEqual(0, counts["wrong"], counts)
                self.assertLessEqual(highest, 1.05 * MOST)
                self.assertGreater(highest, 0.5 * MOST)  # the limit was reached
