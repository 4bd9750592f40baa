"""Hostile files: a corpus of named attacks, fuzzing, and gets under an audit hook."""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import sys
import time
import tracemalloc
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as some

from helpers import TESTS, DirectoryTest, caches_of, in_child, kv_bits
from properties import HealthCheck, given, seed, settings
from scorecard.attacks import PLANTS, clear, hostile_bytes, mutated
from vua.core import VUA, VUAConfig
from vua.errors import CorruptEntryError
from vua.format.parse import parse_entry
from vua.security.keyring import write_key
from vua.security.settings import Security

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

    @pytest.mark.thorough
    @seed(21)
    @settings(max_examples=100, database=None, suppress_health_check=list(HealthCheck))
    @given(
        some.recursive(
            some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=9),
            lambda inner: (
                some.lists(inner, max_size=4)
                | some.dictionaries(
                    some.sampled_from(
                        ["__metadata__", "k", "v", "format", "shape", "shard", "seal"]
                    ),
                    inner,
                    max_size=4,
                )
            ),
        ),
        some.sampled_from(["vua.entry.v1", "vua.sealed.v2"]),
    )
    def test_json(self, value: object, version: str) -> None:
        """Any JSON at all in a header's place is corrupt, whatever format it claims."""
        if isinstance(value, dict) and isinstance(value.get("__metadata__"), dict):
            value["__metadata__"]["format"] = version
        text = json.dumps(value).encode()
        with self.assertRaises(CorruptEntryError):
            parse_entry(len(text).to_bytes(8, "little") + text)

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


FORBIDDEN = (
    *("exec", "compile", "import", "code.", "marshal.", "pickle.", "cpython.run_"),
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.spawn", "subprocess.", "pty."),
    *("socket.", "ctypes.dlopen", "ctypes.dlsym", "urllib.", "http.", "ftplib.", "smtplib."),
    *("webbrowser.", "sqlite3.", "syslog."),
)
"""Audit events, or what they begin with, that reading a cache never causes."""


class Watch:
    """Notes forbidden events while it is armed, and files opened outside of a directory."""

    def __init__(self, root: Path) -> None:
        """Install the hook, for the rest of the process's life."""
        self.root, self.events, self.armed = str(root), list[str](), False
        sys.addaudithook(self.see)

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        first = str(arguments[0]) if arguments else ""
        elsewhere = first.startswith("/") and not first.startswith(self.root)  # not by descriptor
        if event.startswith(FORBIDDEN) or (event == "open" and elsewhere):
            self.events.append(f"{event} {first[:200]}")


@pytest.mark.thorough
class TestAudit(DirectoryTest):
    def test_gets(self) -> None:
        """Hundreds of hostile gets execute, import and start nothing, open nothing elsewhere."""
        key = self.root / "key"
        write_key(key)
        for name, security in (
            ("plain", Security()),
            ("sealed", Security(key_file=str(key), encrypt=True)),
        ):
            with self.subTest(name):
                root = self.root / name
                self.assertEqual("well", in_child(lambda: self.attacked(root, security)))  # noqa: B023

    def attacked(self, root: Path, security: Security) -> None:
        """Attack one stored chunk in 400 ways, and get it after each. For a child."""
        logging.disable()  # a traceback that is logged shows lines of files elsewhere
        tokens, chance, hits = torch.arange(8), random.Random(0), 0
        cache = caches_of(layers=2, heads=2, tokens=8, dim=16)
        with VUA(VUAConfig(split_factor=8, threads=1, security=security), root) as vua:
            vua.put(tokens, cache)
            [path] = root.rglob("*.safetensors")
            sound, victim = path.read_bytes(), root / "victim"
            victim.write_bytes(sound)
            attacks: list[Any] = [*hostile_bytes(sound).values(), *PLANTS.values()]
            watch = Watch(self.root)
            for number in range(-1, 400):
                clear(path)
                path.parent.mkdir(parents=True, exist_ok=True)
                chosen = attacks[number] if number < len(attacks) else mutated(sound, chance)
                if callable(chosen):
                    chosen(path, victim)
                else:
                    path.write_bytes(chosen)
                watch.armed = number >= 0  # what is imported once has been imported before
                found = vua.get_closest(tokens)
                watch.armed = False
                hits += bool(found)
                self.assertIn(kv_bits(found.data), ([], kv_bits(cache)))
            self.assertEqual(sound, victim.read_bytes())
        self.assertGreater(len(attacks), 100)
        self.assertLess(hits, 100)  # the attacks were real
        self.assertEqual([], watch.events)

    def test_events_are_seen(self) -> None:
        """The hook notes what it is there to note."""

        def misbehave() -> None:
            watch = Watch(self.root)
            watch.armed = True
            eval("1")
            os.system("true")
            Path("/dev/null").open().close()
            socket.socket().close()
            watch.armed = False
            seen = {event.split()[0] for event in watch.events}
            self.assertLessEqual({"compile", "exec", "os.system", "open"}, seen)
            self.assertTrue(any(event.startswith("socket.") for event in seen))

        self.assertEqual("well", in_child(misbehave))
