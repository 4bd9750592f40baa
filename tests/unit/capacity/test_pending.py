"""Mirrors `pending`: children written beside their parents get their mtimes after them."""

from __future__ import annotations

import threading
import unittest
from concurrent.futures import ThreadPoolExecutor

from helpers import SOON_S, DirectoryTest, until
from replay import LAYOUT, NBYTES, Cache
from vua.capacity.lru import MTIME_STEP_NS, mtime_ns_of
from vua.capacity.reservation import Pending
from vua.format.keys import KeyChain, token_ids
from vua.native import WRITTEN


class TestPending(unittest.TestCase):
    """What is being written, and its mtime."""

    def test_mtime(self) -> None:
        """Asked for an mtime it waits until that is known, or nothing is pending any more."""
        pending = Pending(30)
        self.assertIsNone(pending.mtime_ns_of("a"))
        with ThreadPoolExecutor(2) as pool:
            first, second = pending.enter("a"), pending.enter("b")
            asked = [pool.submit(pending.mtime_ns_of, name) for name in "ab"]
            self.assertFalse(any(one.done() for one in asked))
            pending.expect("a", 0)
            self.assertEqual(0, asked[0].result(SOON_S))
            self.assertFalse(asked[1].done())
            pending.leave(second)
            pending.leave(first)
        self.assertIsNone(asked[1].result(SOON_S))
        pending.expect("a", 5)  # late: nothing
        self.assertIsNone(pending.mtime_ns_of("a"))

    def test_first_one_counts(self) -> None:
        """A second writer of the same chunk neither ends nor prolongs the first one's time."""
        pending = Pending(30)
        ended = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            first, second = pending.enter("a"), pending.enter("ab")
            self.assertEqual((["a"], ["b"]), (first, second))
            pending.leave(second)
            pool.submit(lambda: (pending.wait_for("a"), ended.set()))
            self.assertFalse(ended.wait(0.05))
            pending.leave(first)
        self.assertTrue(ended.wait(SOON_S))

    def test_patience(self) -> None:
        """Nobody waits for ever."""
        pending = Pending(0.01)
        pending.enter("a")
        pending.wait_for("a")
        self.assertIsNone(pending.mtime_ns_of("a"))


class TestMtimes(DirectoryTest):
    """Chunks of one prompt, written at the same time."""

    def test_slow_parents(self) -> None:
        """Whichever file is there first, no child is newer than its parent: not the front goes."""
        cache, prompt = Cache(self.root), list(range(6))
        keys = KeyChain(token_ids(prompt), 1).first(len(prompt))
        names = [key.name for key in keys]
        home = self.root / cache.store.namespace
        written = [threading.Event() for _ in keys]
        began: list[str] = []

        def save(at: int) -> None:
            """Make the directory, wait for the child's file, then write."""
            with cache.capacity.reserve([keys[at]], NBYTES) as room:
                began.append(names[at])
                folder = home / names[at][:2] / names[at]
                folder.mkdir(parents=True)
                if at and at + 1 < len(names):
                    written[at + 1].wait(SOON_S)
                (folder / f"{LAYOUT.full.name}.safetensors").write_bytes(b"x")
                written[at].set()
                room.commit([WRITTEN])

        with ThreadPoolExecutor(6) as pool:
            for at in range(len(keys)):
                pool.submit(save, at)
                until(lambda at=at: len(began) > at)
        mtimes = [mtime_ns_of(cache.store.storage.fileno(), name) or 0 for name in names]
        steps = [mtime_ns // MTIME_STEP_NS for mtime_ns in mtimes]
        self.assertEqual([steps[0] - n for n in range(6)], steps)
