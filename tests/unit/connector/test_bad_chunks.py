"""A chunk that cannot be loaded: whoever follows the cache is told, and what is behind it is read.

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

from helpers import DirectoryTest, bits, flip, keys_of, noise, save_step, until
from posix_mover import PosixMover
from scheduling import model_of
from vua.format.layout import KVLayout
from vua.security.keyring import Keyring, NoKeyError
from vua.storage.base import ReadResult
from vua.storage.local import LocalStorage

pytestmark = pytest.mark.vllm

if find_spec("vllm"):
    from vua.connector.config import ConnectorConfig
    from vua.connector.events import LOST
    from vua.connector.group_transfer import Rank
    from vua.connector.metadata import (
        ConnectorMetadata,
        GroupLoad,
        LoadOrder,
        SaveOrder,
        WitnessOrder,
        WorkerOutput,
    )
    from vua.connector.worker import WorkerSide
    from vua.vllm import page_layout

LAYOUT = KVLayout(2, 2, 32, 32, "F32", 16)


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class BadChunkTest(DirectoryTest):
    def begin(self, *, on_device: bool, **settings: Any) -> None:
        """A worker that has stored five chunks of noise."""
        if on_device:
            on_cpu_too(self)
        model = model_of(LAYOUT, name=f"device {on_device}")
        self.namespace = model.identity.namespace
        path = str(self.root)
        config = ConnectorConfig(shared_storage_path=path, chunk_tokens=16, **settings)
        self.side = WorkerSide(model, config, Rank(0, 0), events=True)
        self.addCleanup(self.side.shutdown)
        self.layers = {f"model.layers.{at}": noise(16, 2, 16, 64, seed=at) for at in range(2)}
        numbers = {name: at for at, name in enumerate(self.layers)}
        self.side.register(self.layers, numbers, dict.fromkeys(self.layers, 0), page_layout)
        self.keys = keys_of(range(80), 16)
        orders = ConnectorMetadata(saves=[SaveOrder([[1, 2, 3, 4, 5]], [(0, self.keys)])])
        save_step(self.side, orders)
        until(lambda: self.side.saves.pending == 0)

    def load(self) -> Any:
        """Load all of it; return what is told of chunks, by their numbers."""
        part = GroupLoad(0, 0, 80, self.keys)
        order = LoadOrder("r", [[6, 7, 8, 9, 10]], [part])
        self.side.start_loads(ConnectorMetadata(loads=[order]))
        until(lambda: self.side.take_received(idle=True))
        numbers = {key.prefix_hash: at for at, key in enumerate(self.keys)}
        notes = self.side.take_notes() or WorkerOutput()
        return [numbers[chunk] for chunk in notes.gone]

    def path(self, number: int) -> Any:
        name, namespace = self.keys[number].name, self.namespace
        (path,) = (path for path in self.files() if name in str(path) and namespace in str(path))
        return path

    def test_told(self) -> None:
        """A damaged chunk is told of, and so are those behind it, missing or damaged."""
        for on_device in (False, True):
            with self.subTest(on_device=on_device):
                self.begin(on_device=on_device)
                for bad in (1, 4):
                    flip(self.path(bad), self.path(bad).stat().st_size - 1)
                self.path(3).unlink()
                self.assertEqual([1, 3, 4], self.load())
                self.assertEqual({7, 8, 9, 10}, self.side.take_failed_blocks())
                self.assertEqual(2, self.side.groups[0].store.counts["corrupt"])

    def test_many(self) -> None:
        """Of more than a step can tell, all that is known is told to be gone."""
        self.begin(on_device=False)
        with mock.patch("vua.connector.worker.MAX_GONE", 3):
            for key in self.keys:
                self.side.groups[0].tell_gone(key.prefix_hash, LAYOUT.full)
        rest = [key.prefix_hash for key in self.keys[3:]]
        self.assertEqual([LOST, *rest], self.side.take_notes().gone)

    def compared(self, *numbers: int) -> WorkerOutput:
        """Compare these chunks of a request that has computed all; return what is told of it."""
        parts = [(0, [self.keys[at] for at in numbers])]
        order = WitnessOrder(1, [[1, 2, 3, 4, 5]], parts, "r", [(0, self.keys)])
        save_step(self.side, ConnectorMetadata(witnesses=[order]))
        told = WorkerOutput()

        def is_over() -> bool:
            nonlocal told
            told = told.aggregate(self.side.take_notes())
            return bool(told.verdicts)

        until(is_over)
        return told

    def test_compared(self) -> None:
        """A damaged chunk that is compared: all of its prompt is read, and can be stored anew."""
        for on_device in (False, True):
            with self.subTest(on_device=on_device):
                self.begin(on_device=on_device)
                told = self.compared(0, 4)
                self.assertEqual([{}, set(), []], [told.unsaved, told.retry, told.gone])
                for bad in (1, 4):
                    flip(self.path(bad), self.path(bad).stat().st_size - 1)
                self.path(3).unlink()
                told = self.compared(0, 4)
                numbers = {key.prefix_hash: at for at, key in enumerate(self.keys)}
                self.assertEqual([1, 3, 4], [numbers[chunk] for chunk in told.gone])
                self.assertEqual([{"r": 16}, {"r"}], [told.unsaved, told.retry])
                self.assertEqual(2, self.side.groups[0].store.counts["corrupt"])
                order = SaveOrder([[1, 2, 3, 4, 5]], [(0, self.keys[1:])], request_id="r")
                save_step(self.side, ConnectorMetadata(saves=[order]))
                until(lambda: self.side.saves.pending == 0)
                self.load()
                self.assertEqual(set(), self.side.take_failed_blocks())

    def test_compared_without_storage(self) -> None:
        """A comparison that the storage does not answer says nothing of the chunks."""
        self.begin(on_device=False)
        broken = OSError(errno.EIO, "broken")
        answer = ReadResult(0, broken)
        with (
            mock.patch.object(LocalStorage, "read", return_value=answer),
            mock.patch.object(LocalStorage, "ahead", side_effect=broken),
        ):
            told = self.compared(0, 4)
        self.assertEqual([{}, set(), []], [told.unsaved, told.retry, told.gone])

    def test_errors_tell_nothing(self) -> None:
        """Of a storage that fails nothing is known: chunks may be there all the same."""
        for on_device in (False, True):
            with self.subTest(on_device=on_device):
                self.begin(on_device=on_device)
                broken = OSError(errno.EIO, "broken")
                answer = ReadResult(0, broken)
                with (
                    mock.patch.object(LocalStorage, "read", return_value=answer),
                    mock.patch.object(LocalStorage, "ahead", side_effect=broken),
                ):
                    self.assertEqual([], self.load())
                self.assertEqual({6, 7, 8, 9, 10}, self.side.take_failed_blocks())

    @pytest.mark.thorough
    def test_missing_key_tells_nothing(self) -> None:
        """Without the key of sealed chunks nothing is known of them: they may be there."""
        for on_device in (False, True):
            with self.subTest(on_device=on_device):
                self.begin(on_device=on_device)
                missing = NoKeyError("the key is missing")
                with (
                    mock.patch.object(Keyring, "seals", return_value=True),
                    mock.patch.object(Keyring, "seal", side_effect=missing),
                ):
                    self.assertEqual([], self.load())
                self.assertEqual({6, 7, 8, 9, 10}, self.side.take_failed_blocks())
                self.assertEqual(1, self.side.groups[0].store.counts["locked"])

    def test_direct_reads_of_other_bytes(self) -> None:
        """Files that are right although they came wrong into device memory: that way is given up.

        They come by way of the host. Control: a way that reads them right is used.
        """
        read = PosixMover.read

        def wrong(mover: Any, handle: Any, memory: Any, at: int, *more: Any) -> int:
            got = read(mover, handle, memory, at, *more)
            memory[at] ^= 1
            return got

        self.begin(on_device=True, gds_mode="required")
        self.side.stats.take()
        with mock.patch.object(PosixMover, "attach") as attach:
            for _ in range(3):
                self.assertEqual([], self.load())
        self.assertEqual(1, attach.call_count, "the same buffer each time")
        self.assertEqual({"gds"}, {*(self.side.stats.take() or {})["vua_loaded_bytes_total"]})
        for layer in self.layers.values():
            layer[6:11] = 0
        with mock.patch.object(PosixMover, "read", wrong), self.assertLogs("vua.device", "WARNING"):
            self.assertEqual([], self.load())
        self.assertIsNone(self.side.gds.mover)
        self.assertEqual({"pinned"}, {*(self.side.stats.take() or {})["vua_loaded_bytes_total"]})
        self.assertEqual(set(), self.side.take_failed_blocks())
        for layer in self.layers.values():
            self.assertEqual(bits(layer[1:6]), bits(layer[6:11]))
