"""Many processes in one directory, judged by the bytes, and by marks that they share outside."""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import time
import traceback
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest

from helpers import DirectoryTest, in_child
from scorecard.faults.world import ROOMY, World, WrongBytesError, layout_of
from vua.capacity import evictor, reclaim, scan
from vua.capacity.limits import Limits
from vua.errors import StorageError
from vua.store.store import Store

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
            paths = (path for path in root.rglob("*") if path.is_file())
            highest = max(highest, sum(path.stat().st_size for path in paths))
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
                        (scan, "_SAMPLED_CHUNKS", KEYS // 64),
                    ):
                        stack.enter_context(mock.patch.object(where, what, value))
                counts, highest = self.crowd(self.root / name, roles, bounds)
                self.assertGreater(min(counts["hit"], counts["stored"]), 0, counts)
                self.assertEqual(0, counts["wrong"], counts)
                self.assertLessEqual(highest, 1.05 * MOST)
                self.assertGreater(highest, 0.5 * MOST)  # the limit was reached
