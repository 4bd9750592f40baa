"""Mirrors `vua.store.travel`: killed at any step, and what waits after a long outage."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import travellers
from travellers import CONFIG, KV, prompt, wait_for_travel

from buckets import seaweedfs, speaking_to
from helpers import DirectoryTest, caches_of, kv_bits, namespace_of, soak
from vua.core import VUA, VUAConfig

pytest.importorskip("obstore")
pytestmark = pytest.mark.thorough

KILLS = 20
WAITING = 2_000


class KilledTest(DirectoryTest):
    """A directory with a bucket behind it."""

    def setUp(self) -> None:
        """Start the process that forks those which die."""
        super().setUp()
        self.url = self.place()
        process = subprocess.Popen(
            [sys.executable, travellers.__file__, self.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.process = self.enterContext(process)

    def place(self) -> str:
        return f"file://{self.root}/bucket"

    def traveller(self, number: int, last: int) -> int:
        """Have a process store a prompt; return its steps, or -1 if it died at the last one."""
        self.process.stdin.write(f"{number} {last} {self.root}/{number}\n")
        return int(self.process.stdout.readline())

    def found(self, number: int) -> int:
        """How many tokens of a prompt the bucket has; they are right."""
        with VUA(CONFIG, self.url) as vua:
            found = vua.get_closest(prompt(number))
        tokens = found.num_tokens
        self.assertEqual(kv_bits(KV, tokens) if tokens else [], kv_bits(found.data))
        return tokens

    def test_killed_at_each_step(self) -> None:
        """20 times, each at another step: nothing wrong, and in the end all has travelled."""
        self.traveller(0, 0)  # makes the namespace
        steps = self.traveller(1, 0)
        self.assertGreater(steps, 2 * KILLS)
        found = []
        for kill in range(KILLS):
            number = 2 + kill
            self.assertEqual(-1, self.traveller(number, 1 + kill * steps // KILLS))
            found.append(self.found(number))
            self.assertNotEqual(-1, self.traveller(number, 0))  # stores and sends what is missing
            self.assertEqual(64, self.found(number))
        self.assertLessEqual({0, 16, 32, 48}, set(found), found)


@soak
class KilledBeforeAServerTest(KilledTest):
    """The same with a real server."""

    def place(self) -> str:
        """Return the URL of an empty place of its bucket."""
        self.enterContext(speaking_to(seaweedfs().endpoint))
        return seaweedfs().place()


class OutageTest(DirectoryTest):
    """A directory that has been in use for long without its bucket."""

    def test_many_wait(self) -> None:
        """2,000 chunks are sent, no faster than is allowed, and little memory is used for that."""
        upload_mib_s = 4.0
        near, behind = str(self.root / "a"), str(self.root / "bucket")
        kv = caches_of(layers=1, heads=1, tokens=16 * WAITING, dim=8)
        with VUA(CONFIG, near) as vua:
            self.assertEqual(WAITING, vua.put(torch.arange(16 * WAITING), kv))
        del kv
        limited = VUAConfig(split_factor=16, model="tiny", upload_mib_s=upload_mib_s)
        before, began_s = forget_peak(), time.monotonic()
        with VUA(limited, [near, f"file://{behind}"]) as vua:
            self.assertEqual(16, vua.get_closest(torch.arange(16)).num_tokens)
            wait_for_travel(vua)
            took_s = time.monotonic() - began_s
            counts = namespace_of(vua).travel.counts
        self.assertEqual(WAITING, counts["sent"])
        self.assertEqual(WAITING, sum(1 for _ in Path(behind).rglob("*.safetensors")))
        self.assertLess(counts["sent_nbytes"] / 2**20 / took_s, 1.02 * upload_mib_s)
        self.assertLess(peak_nbytes() - before, 100 << 20)


def peak_nbytes() -> int:
    """The most memory that this process has had since :func:`forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10


def forget_peak() -> int:
    """Measure the peak anew from now on; return what is used now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_nbytes()
