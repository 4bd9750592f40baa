"""Mirrors `vua.storage.bucket`: what a server does wrong costs hits and bounded time."""

from __future__ import annotations

import logging
import time
import unittest
from collections.abc import Callable

import pytest

from buckets import seaweedfs
from proxied import CHUNKS, CONFIG, KV, TOKENS, ProxiedTest
from proxy import HARMS, REFUSALS
from vua.core import VUA
from vua.errors import StorageError
from vua.storage.bucket import Bucket

pytest.importorskip("obstore")
pytestmark = pytest.mark.thorough

SAID = {
    **dict.fromkeys(("wrong region", "redirected"), "AWS_REGION"),
    "expired": "AWS_SESSION_TOKEN",
    "clock": "the clock of this machine",
    "no bucket": "no such bucket",
}
"""What an operator reads."""
BOUND_S = 60.0
"""Far more than the 4 s of trying again, since a test may run on a slow machine."""


class FaultTest(ProxiedTest):
    """A bucket of a real server behind a proxy, with a prompt in it."""

    def found(self, vua: VUA) -> int:
        """How many tokens of the prompt are found in bounded time; they are right."""
        began_s = time.monotonic()
        tokens = self.found_by(vua)
        self.assertLess(time.monotonic() - began_s, BOUND_S)
        return tokens

    def go_on(self) -> None:
        """Do no more harm, and do not wait until the breaker finds that out."""
        self.proxy.plan = lambda *_: ""
        Bucket.at(self.url).breaker.went(well=True)

    def write(self, harm: str, write: Callable[[], object]) -> str:
        """Try a write that has to be refused, unless it has happened; return what the error says.

        Of an answer that is cut a client may have heard enough: nothing follows its headers.
        """
        try:
            write()
        except StorageError as problem:
            return str(problem)
        self.assertIn(harm, ("reset", "truncated"))
        return ""

    def check(self, harm: str) -> None:
        """Harm every answer: a miss, a refused write, and afterwards everything as before."""
        other = TOKENS + 1000
        with VUA(CONFIG, self.url) as vua, self.assertLogs("vua", logging.DEBUG) as said:
            self.assertEqual(0, vua.put(TOKENS, KV))
            self.proxy.plan = lambda *_: harm
            self.assertEqual(0, self.found(vua))
            self.go_on()
            self.proxy.plan = lambda *_: harm
            began_s = time.monotonic()
            self.write(harm, lambda: vua.put(other, KV))
            self.assertLess(time.monotonic() - began_s, BOUND_S)
            Bucket.at(self.url).breaker.went(well=True)
            refused = self.write(harm, lambda: Bucket.at(self.url).put("x", b"x"))
            self.assertRegex(refused, SAID.get(harm, ".*"))
            said.output.append(refused)
            self.go_on()
            vua.put(other, KV)
        self.assertNotIn("vuatestsecret", "".join(said.output))
        with VUA(CONFIG, self.url) as vua:
            self.assertEqual(128, self.found(vua))
            self.assertEqual(128, vua.get_closest(other).num_tokens)

    def check_behind(self, harm: str) -> None:
        """The same behind a directory: nothing is refused, and what waits is sent later."""
        places, other = [str(self.root / "near"), self.url], TOKENS + 1000
        with VUA(CONFIG, places) as vua:
            self.assertEqual(128, self.found(vua))
            self.proxy.plan = lambda *_: harm
            self.assertEqual(CHUNKS, vua.put(other, KV))
            self.assertEqual(128, vua.get_closest(other).num_tokens)
            self.go_on()
        with VUA(CONFIG, places) as vua:
            self.assertEqual(128, vua.get_closest(other).num_tokens)
        with VUA(CONFIG, self.url) as vua:
            stop_s = time.monotonic() + BOUND_S
            while vua.get_closest(other).num_tokens < 128 and time.monotonic() < stop_s:
                with VUA(CONFIG, places) as sender:
                    sender.get_closest(TOKENS[:16])
            self.assertEqual(128, vua.get_closest(other).num_tokens)

    def test_slow(self) -> None:
        """It costs time alone."""
        self.proxy.plan = lambda *_: "slow"
        with VUA(CONFIG, self.url) as vua:
            self.assertEqual(128, self.found(vua))

    def test_server_killed_and_restarted(self) -> None:
        """It is gone, and comes back with its data."""
        with VUA(CONFIG, self.url) as vua:
            self.assertEqual(128, self.found(vua))
            seaweedfs().stop()
            try:
                self.assertEqual(0, self.found(vua))
                with self.assertRaises(StorageError):
                    vua.put(TOKENS + 1000, KV)
            finally:
                seaweedfs().start()
            self.go_on()
            self.assertEqual(128, self.found(vua))
            self.assertEqual(CHUNKS, vua.put(TOKENS + 1000, KV))


class BreakerTest(ProxiedTest):
    def test_left_alone(self) -> None:
        """A server that fails again and again is left alone: its requests fail at once."""
        self.proxy.plan = lambda *_: "503"
        bucket = Bucket.at(self.url)
        for _ in range(3):
            with self.assertRaises(StorageError):
                bucket.head("x")
        asked = sum(self.proxy.counts.values())
        with self.assertRaisesRegex(StorageError, "is not asked again"):
            bucket.head("x")
        self.assertEqual(asked, sum(self.proxy.counts.values()))


def _tests() -> None:
    """A test per harm, with the bucket alone and behind a directory."""
    for harm in dict.fromkeys((*HARMS, *REFUSALS)):
        if harm in ("slow", "flipped"):  # they let writes through
            continue

        def alone(self: FaultTest, harm: str = harm) -> None:
            self.check(harm)

        def behind(self: FaultTest, harm: str = harm) -> None:
            self.check_behind(harm)

        name = harm.replace(" ", "_")
        setattr(FaultTest, f"test_{name}", alone)
        setattr(FaultTest, f"test_{name}_behind_a_directory", behind)


_tests()

if __name__ == "__main__":
    unittest.main()
