"""Loads by a ring of buffers, with tensors on the CPU: what comes, and what is told as loaded."""

from __future__ import annotations

import unittest
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from devices import on_cpu_too

from helpers import DirectoryTest, bits, has_native, keys_of, noise, save_step, until
from scheduling import loading, saving, worker_of
from vua.connector import device_transfer
from vua.device import xxh3
from vua.format.layout import KVLayout

pytestmark = pytest.mark.vllm

LAYOUT = KVLayout(3, 2, 8, 8, "BF16", 16)
CHUNKS, BLOCKS = 33, 80


@unittest.skipUnless(find_spec("vllm") and has_native(), "needs vLLM, and native code")
class RingTest(DirectoryTest):
    """A prompt of 33 chunks by buffers of two."""

    def setUp(self) -> None:
        super().setUp()
        on_cpu_too(self)
        two = 2 * LAYOUT.full.payload_nbytes(LAYOUT)
        self.enterContext(mock.patch.object(device_transfer, "_LOAD_NBYTES", two))
        self.keys = keys_of(range(16 * CHUNKS), 16)
        self.memory = noise(3, BLOCKS, 2, 16, 16, dtype=torch.bfloat16, seed=1)
        first = worker_of(self.root, list(self.memory), LAYOUT)
        save_step(first, saving(self.keys, range(CHUNKS)))
        until(lambda: first.saves.pending == 0)
        first.shutdown()
        self.other = torch.zeros(3, BLOCKS, 2, 16, 16, dtype=torch.bfloat16)
        self.reader = worker_of(self.root, list(self.other), LAYOUT)
        self.addCleanup(self.reader.shutdown)
        self.group = self.reader.groups[0]
        self.blocks = [BLOCKS - 1 - at for at in range(CHUNKS)]

    def load(self) -> None:
        self.reader.start_loads(loading(self.keys, self.blocks))
        until(lambda: self.reader.take_received(idle=True))

    def check(self, chunks: int) -> None:
        """So many leading chunks are told as loaded, and are in their blocks."""
        self.assertEqual({*self.blocks[chunks:]}, self.reader.take_failed_blocks())
        for at in range(chunks):
            wanted, found = self.memory[:, at], self.other[:, self.blocks[at]]
            self.assertEqual(bits(wanted), bits(found), at)

    def rings(self) -> SimpleNamespace:
        found: list[int] = []
        load = device_transfer.RingLoads.load

        def note(ring: device_transfer.RingLoads, *given: object) -> int:
            found.append(load(ring, *given))
            return found[-1]

        self.enterContext(mock.patch.object(device_transfer.RingLoads, "load", note))
        return SimpleNamespace(found=found)

    def path(self, chunk: int) -> Path:
        return next(path for path in self.files() if path.parent.name == self.keys[chunk].name)

    def test_many_laps(self) -> None:
        """All of it comes, by the ring alone, and again."""
        rings = self.rings()
        for _ in range(2):
            self.other.zero_()
            self.load()
            self.check(CHUNKS)
        self.assertEqual([CHUNKS] * 2, rings.found)
        self.assertEqual(self.group.load_buffers.limit, self.group.load_buffers.left)

    def test_another_chunk(self) -> None:
        """A sound file under the name of another chunk is not taken for it."""
        self.path(7).write_bytes(self.path(8).read_bytes())
        self.load()
        self.check(7)

    def test_busy_buffers(self) -> None:
        """With too few buffers for a ring it is loaded by what there is."""
        taken = [self.group.load_buffers.take() for _ in range(self.group.load_buffers.limit - 1)]
        rings = self.rings()
        self.load()
        self.check(CHUNKS)
        self.assertEqual([0], rings.found)
        for buffer in taken:
            self.group.load_buffers.give_back(buffer)


class DeviceCheckTest(RingTest):
    """The same where the device compares checksums: here by xxhash in place of a GPU's kernel."""

    wrong: int | None = None
    """Of the next comparisons, the block whose digest is told wrongly."""

    def setUp(self) -> None:
        def digests(
            data: torch.Tensor,
            starts: torch.Tensor,
            lengths: torch.Tensor,
            keys: torch.Tensor,
            word: int,
        ) -> torch.Tensor:
            found = xxh3.on_host(data, starts.numpy(), lengths.numpy())
            if self.wrong is not None and self.wrong < len(found):
                found[self.wrong] ^= 1
            return torch.from_numpy(found.view("int64"))

        self.digests = digests
        for where in (device_transfer, xxh3):
            self.enterContext(mock.patch.object(where, "kernel_for", return_value=digests))
        super().setUp()

    def test_nothing_is_hashed_here(self) -> None:
        """The host leaves the hashing to the device: its digests are not looked at."""
        ring = self.rings()
        with mock.patch("vua.store.entry_reader.check_payload", side_effect=AssertionError):
            self.load()
        self.check(CHUNKS)
        self.assertEqual([CHUNKS], ring.found)

    def test_a_device_that_errs(self) -> None:
        """Right bytes that it finds wrong are read by the host, which judges."""
        self.wrong = 3
        rings = self.rings()
        self.load()
        self.check(CHUNKS)
        self.assertEqual([0], rings.found)
        self.assertEqual(CHUNKS, len(self.files()))
