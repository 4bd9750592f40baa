"""A chunk that cannot be loaded: what is behind it is read, and judged.

On both ways into an engine's blocks: those in CPU memory, and those of GPU memory, with tensors on
the CPU.
"""

from __future__ import annotations

import errno
import unittest
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
from devices import on_cpu_too

from helpers import DirectoryTest, flip, keys_of, noise, save_step, until
from scheduling import loading, saving, worker_of
from vua.connector.metadata import ConnectorMetadata, WitnessOrder
from vua.format.layout import KVLayout
from vua.security.keyring import Keyring, NoKeyError
from vua.storage.base import ReadResult
from vua.storage.local import LocalStorage

pytestmark = pytest.mark.vllm

LAYOUT = KVLayout(2, 2, 32, 32, "F32", 16)


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class BadChunkTest(DirectoryTest):
    def begin(self) -> None:
        """A worker that has stored five chunks of noise."""
        layers = [noise(16, 2, 16, 64, seed=at) for at in range(2)]
        self.side = worker_of(self.root, layers, LAYOUT)
        self.addCleanup(self.side.shutdown)
        self.keys = keys_of(range(80), 16)
        self.save(self.keys)

    def save(self, keys: Any) -> None:
        save_step(self.side, saving(keys, [1, 2, 3, 4, 5], request_id="r"))
        until(lambda: self.side.saves.pending == 0)

    def load(self) -> set[int]:
        """Load all of it; return the blocks that were not filled."""
        self.side.start_loads(loading(self.keys, [6, 7, 8, 9, 10]))
        until(lambda: self.side.take_received(idle=True))
        failed: set[int] = self.side.take_failed_blocks()
        return failed

    def hurt(self) -> None:
        """Damage chunks 1 and 4, and delete chunk 3."""
        paths = {at: self.path(at) for at in (1, 3, 4)}
        for bad in (1, 4):
            flip(paths[bad], paths[bad].stat().st_size - 1)
        paths[3].unlink()

    def path(self, number: int) -> Any:
        name = self.keys[number].name
        (path,) = (path for path in self.files() if name in str(path))
        return path

    def test_mended(self) -> None:
        """One load sees the damage behind the first bad chunk, too: all is mended at once."""
        self.begin()
        self.hurt()
        self.assertEqual({7, 8, 9, 10}, self.load())
        self.assertEqual(2, self.side.groups[0].store.counts["corrupt"])
        self.save(self.keys)
        self.assertEqual(set(), self.load())

    def compared(self) -> tuple[list[int], str]:
        """Compare the ends of a request that has computed all: which were compared; why not."""
        order = WitnessOrder(1, [[1, 2, 3, 4, 5]], [(0, [self.keys[0], self.keys[4]])])
        save_step(self.side, ConnectorMetadata(witnesses=[order]))
        (verdict,) = until(self.side.take_notes).verdicts
        self.assertTrue(all(one.same for one in verdict.chunks))
        return [one.start for one in verdict.chunks], verdict.text

    def test_compared(self) -> None:
        """What is damaged is not compared; where nothing is left the verdict says why."""
        self.begin()
        self.assertEqual(([0, 64], ""), self.compared())
        self.hurt()
        self.assertEqual(([0], ""), self.compared())
        self.path(0).unlink()
        self.assertRegex(self.compared()[1], "its file is missing")

    def test_errors(self) -> None:
        """A storage that fails, or a missing key, costs the load; the chunks stay."""
        self.begin()
        broken, missing = OSError(errno.EIO, "broken"), NoKeyError("the key is missing")
        fails = mock.patch.multiple(
            LocalStorage,
            read=mock.Mock(return_value=ReadResult(0, broken)),
            ahead=mock.Mock(side_effect=broken),
        )
        sealed = mock.patch.multiple(
            Keyring, seals=mock.Mock(return_value=True), seal=mock.Mock(side_effect=missing)
        )
        for problem in (fails, sealed):
            with problem:
                self.assertEqual({6, 7, 8, 9, 10}, self.load())
        self.assertEqual(set(), self.load())


class StagedBadChunkTest(BadChunkTest):
    """The same through the buffers of GPU memory."""

    def setUp(self) -> None:
        on_cpu_too(self)
        super().setUp()
