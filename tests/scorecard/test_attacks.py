"""Hostile files: a corpus of named attacks, and fuzzing."""

from __future__ import annotations

import random
import time
import tracemalloc
import unittest
from pathlib import Path

import torch
from hypothesis import strategies as some

from helpers import TESTS, DirectoryTest, caches_of, kv_bits
from properties import HealthCheck, given, seed, settings
from scorecard.attacks import hostile_bytes, mutated
from vua.core import VUA, VUAConfig
from vua.errors import CorruptEntryError
from vua.format.parse import parse_entry

GOLDEN = sorted(
    path
    for folder in ("golden", "golden_sealed_v2")
    for path in (TESTS / folder).rglob("*.safetensors")
)
SLOW_S = 60.0
"""No file takes so long on any machine; the bar on a quiet one is 0.1 s."""


def header_of(path: Path) -> bytes:
    data = path.read_bytes()
    return data[: parse_entry(data).header_nbytes]


class TestCorpus(DirectoryTest):
    def test_parser(self) -> None:
        """No attack on a header is taken for an entry, in plain files and sealed ones."""
        for path in (GOLDEN[0], GOLDEN[-1]):
            header = header_of(path)
            attacks = hostile_bytes(header)
            self.assertGreaterEqual(len(attacks), 100)
            parse_entry(header)
            for name, data in attacks.items():
                if data.startswith(header):
                    continue  # what follows the header is none of the parser's business
                with self.subTest(name):
                    began_s = time.monotonic()
                    with self.assertRaises(CorruptEntryError):
                        parse_entry(data)
                    self.assertLess(time.monotonic() - began_s, SLOW_S)

    def test_store(self) -> None:
        """Each in an entry's place is a miss, taken out of sight, and healed by the next put."""
        tokens = torch.arange(4)
        cache = caches_of(layers=1, heads=1, tokens=4, dim=8)
        with VUA(VUAConfig(split_factor=4, threads=1), self.root) as vua:
            vua.put(tokens, cache)
            [path] = self.files()
            sound = path.read_bytes()
            for number, (name, data) in enumerate(hostile_bytes(sound).items()):
                with self.subTest(name):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)
                    found = vua.get_closest(tokens)
                    if found:  # in fields that nothing depends on
                        self.assertIn(name.split()[0], ("created", "writer", "check"))
                        self.assertEqual(kv_bits(cache), kv_bits(found.data))
                        path.unlink()
                    self.assertFalse(path.exists())
                    if number % 10 == 0:
                        self.assertEqual(1, vua.put(tokens, cache))
                        self.assertEqual(4, vua.get_closest(tokens).num_tokens)


class TestFuzz(unittest.TestCase):
    @seed(20)
    @settings(max_examples=150, database=None, suppress_health_check=list(HealthCheck))
    @given(some.sampled_from(GOLDEN), some.integers(0, 1 << 32), some.binary(max_size=64))
    def test_mutated(self, path: Path, number: int, extra: bytes) -> None:
        """Mutated headers of golden files never get further than CorruptEntryError."""
        header = header_of(path)
        data = mutated(header, random.Random(number))
        for hostile in (data, extra + data, data + extra):
            if not hostile.startswith(header):
                with self.assertRaises(CorruptEntryError):
                    parse_entry(hostile)

    def test_bounded(self) -> None:
        """What a header claims is never allocated."""
        header = header_of(GOLDEN[0])
        huge = header.replace(b'"kv_heads":"2"', b'"kv_heads":"99999"')
        huge = huge.replace(b"l0-2.h0-2", b"l0-2.h0-99999")
        tracemalloc.start()
        try:
            for data in (huge, *hostile_bytes(header).values()):
                if not data.startswith(header):
                    tracemalloc.reset_peak()
                    before, _ = tracemalloc.get_traced_memory()
                    with self.assertRaises(CorruptEntryError):
                        parse_entry(data)
                    _, peak = tracemalloc.get_traced_memory()
                    self.assertLess(peak - before, (4 << 20) + 16 * len(data))
        finally:
            tracemalloc.stop()
