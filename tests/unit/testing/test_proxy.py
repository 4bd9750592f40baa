"""Mirrors `proxy`: each harm in front of a real server costs hits and bounded time."""

from __future__ import annotations

import time

import pytest

from proxied import CONFIG, KV, TOKENS, ProxiedTest
from proxy import HARMS
from vua.core import VUA
from vua.errors import StorageError
from vua.storage.bucket import Bucket

pytest.importorskip("obstore")
pytestmark = pytest.mark.thorough


class ProxyTest(ProxiedTest):
    """A bucket behind a proxy that does harm."""

    def get(self) -> int:
        """How many tokens are found; they are right."""
        with VUA(CONFIG, self.url) as vua:
            return self.found_by(vua)

    def harm(self, harm: str) -> None:
        """Harm the first answer about every fifth entry: what is asked again, is answered."""
        first: dict[str, int] = {}

        def plan(number: int, method: str, path: str) -> str:
            if method != "GET" or ".safetensors" not in path or path in first:
                return ""
            first[path] = len(first)
            return harm if first[path] % 5 == 2 else ""

        self.proxy.plan = plan

    def test_each_harm_of_some(self) -> None:
        """Some answers are harmed: others are asked for, or the prefix is shorter; never wrong."""
        for harm in HARMS:
            with self.subTest(harm):
                self.harm(harm)
                began_s = time.monotonic()
                tokens = self.get()
                took_s = time.monotonic() - began_s
                self.assertGreater(self.proxy.counts[harm], 0)
                self.assertLess(took_s, 60)
                if harm != "flipped":
                    self.assertEqual(128, tokens, f"{harm} is tried again")
                self.proxy.plan = lambda *_: ""
                with VUA(CONFIG, self.url) as vua:
                    vua.put(TOKENS, KV)
                self.assertEqual(128, self.get())

    def test_the_breaker(self) -> None:
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
