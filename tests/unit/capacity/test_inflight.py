"""Mirrors `pending`: children written beside their parents get their stamps after them."""

from __future__ import annotations

import threading
import unittest
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

from helpers import DirectoryTest
from replay import LAYOUT, Cache
from vua.capacity.lru import STEP_NS, stamp_ns
from vua.capacity.pending import InFlight
from vua.format.keys import KeyChain, token_ids
from vua.storage.local import LocalStorage


class TestInFlight(unittest.TestCase):
    """What is in flight, and its stamp."""

    def test_stamp(self) -> None:
        """Asked for a stamp it waits until that is known, or nothing is in flight any more."""
        flight = InFlight(30)
        self.assertIsNone(flight.stamp_of("a"))
        with ThreadPoolExecutor(2) as pool, flight.entered("a"), flight.entered("b"):
            asked = [pool.submit(flight.stamp_of, name) for name in "ab"]
            self.assertFalse(any(one.done() for one in asked))
            flight.expect("a", 0)
            self.assertEqual(0, asked[0].result(20))
            self.assertFalse(asked[1].done())
        self.assertIsNone(asked[1].result(20))
        flight.expect("a", 5)  # late: nothing
        self.assertIsNone(flight.stamp_of("a"))

    def test_first_one_counts(self) -> None:
        """A second writer of the same chunk neither ends the first one's flight nor prolongs it."""
        flight = InFlight(30)
        landed = threading.Event()
        with ThreadPoolExecutor(1) as pool, flight.entered("a"):
            with flight.entered("a"):
                pool.submit(lambda: (flight.landed("a"), landed.set()))
            self.assertFalse(landed.wait(0.05))
        self.assertTrue(landed.wait(20))

    def test_patience(self) -> None:
        """Nobody waits for ever."""
        flight = InFlight(0.01)
        with flight.entered("a"):
            flight.landed("a")
            self.assertIsNone(flight.stamp_of("a"))


class TestStamps(DirectoryTest):
    """Chunks of one prompt, published at the same time."""

    def test_slow_parents(self) -> None:
        """Whichever file is there first, no child is newer than its parent: not the front goes."""
        cache, prompt = Cache(self.root), list(range(6))
        keys = KeyChain(token_ids(prompt), 1).first(len(prompt))
        names = [key.name for key in keys]
        real, written = LocalStorage.publish, [threading.Event() for _ in keys]

        def publish(storage: LocalStorage, chunk: str, *args: Any) -> None:
            """Create the directory, wait for the child's file, then write."""
            at = names.index(chunk)
            real(storage, chunk, *args)
            if at and at + 1 < len(names):
                written[at + 1].wait(20)
            real(storage, chunk, *args)
            written[at].set()

        began: list[str] = []

        def save(at: int) -> None:
            with cache.keeper.writing(keys[at]):
                began.append(names[at])
                cache.keeper.publish(keys[at], LAYOUT.full, cache.iovecs)

        with mock.patch.object(LocalStorage, "publish", publish), ThreadPoolExecutor(6) as pool:
            for at in range(len(keys)):
                pool.submit(save, at)
                while len(began) <= at:
                    threading.Event().wait(0.001)
        stamps = [stamp_ns(cache.store.storage.fileno(), name) or 0 for name in names]
        self.assertEqual([stamps[0] - n * STEP_NS for n in range(6)], stamps)


if __name__ == "__main__":
    unittest.main()
