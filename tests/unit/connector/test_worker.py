"""The worker's half of the vLLM connector, also on storage that hangs or fails; no engine."""

from __future__ import annotations

import threading
import unittest
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from devices import on_cpu_too

from helpers import DirectoryTest, bits, has_native, keys_of, noise, save_step, until
from scheduling import loading, saving, worker_of
from vua.connector.cache_spec import UncachedError
from vua.connector.config import Timeouts, WorkerResources
from vua.connector.device_transfer import DeviceGroupTransfer
from vua.connector.metadata import ConnectorMetadata, LoadOrder
from vua.connector.weights_watch import EngineMemory, EngineState
from vua.connector.worker import WorkerSide
from vua.device.staging import Fence, Staging
from vua.errors import StorageError
from vua.format.identity import Identity
from vua.format.layout import KVLayout
from vua.io.pool import Job, Pool
from vua.storage.base import Batch
from vua.store.store import Loader

pytestmark = pytest.mark.vllm

ONE_THREAD = WorkerResources(load_threads=1)
LITTLE = WorkerResources(load_threads=1, max_pending_save_mib=1)
LAYOUT = KVLayout(2, 1, 8, 4, "F32", 16)
BLOCKS = 12
IO_S = 1.0
"""After which work counts as hanging, by a clock that stands still until a test moves it."""


class Hanging:
    """A storage that hangs in the verbs that move bytes for as long as it is told to."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        self.go = threading.Event()
        self.problem: OSError | None = None
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def _wait(self) -> None:
        self.calls += 1
        self.go.wait()
        if self.problem is not None:
            raise self.problem

    def read(self, batch: Batch) -> Any:
        self._wait()
        return self._storage.read(batch)

    def open_file(self, name: str) -> Any:
        """Open a file for a read that goes straight to the device, when it pleases."""
        self._wait()
        return self._storage.open_file(name)

    def write(self, batch: Batch) -> Any:
        self._wait()
        return self._storage.write(batch)


class WorkerTest(DirectoryTest):
    def setUp(self) -> None:
        """A worker with a cache full of noise, and three chunks of it stored."""
        super().setUp()
        self.now_s, self.tick_s = 100.0, 0.0
        self.layers = [noise(BLOCKS, 1, 16, 12, seed=layer) for layer in range(2)]
        self.side = self.worker()
        self.keys = keys_of(range(48), 16)
        self.save(self.keys)
        until(lambda: len(self.files()) == 3 and self.side.saves.pending == 0)
        self.side.stats.take()

    def clock(self) -> float:
        self.now_s += self.tick_s
        return self.now_s

    def worker(self, layers: Any = None, **given: Any) -> WorkerSide:
        """A worker on this test's directory."""
        given = {"worker": ONE_THREAD, "timeouts": Timeouts(io_s=IO_S)} | given
        layers = self.layers if layers is None else layers
        side: WorkerSide = worker_of(self.root, layers, LAYOUT, clock=self.clock, **given)
        self.addCleanup(side.shutdown)
        return side

    def save(self, keys: list[Any]) -> None:
        """Store chunks from the blocks 1, 2, 3."""
        save_step(self.side, saving(keys, [1, 2, 3]))

    def load(self, name: str, blocks: list[int]) -> None:
        self.side.start_loads(loading(self.keys, blocks, name))

    def received(self) -> set[str]:
        ended: set[str] = until(lambda: self.side.take_received(idle=True))
        return ended

    def blocks(self, *ids: int) -> list[bytes]:
        return [bits(layer[list(ids)]) for layer in self.layers]

    def counted(self, name: str) -> dict[str, Any]:
        stats = self.side.stats.take()
        found: dict[str, Any] = {} if stats is None else stats.get(name, {})
        return found


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class CachedLoadTest(WorkerTest):
    """Loads of what the page cache has: straight into the engine's blocks."""

    def setUp(self) -> None:
        if not has_native():
            self.skipTest("native code is not built: python3 dev.py build")
        super().setUp()
        (self.order,) = loading(self.keys, [5, 6, 7]).loads
        self.pool = Pool[LoadOrder](1, "test", timeout_s=60)
        self.job = Job(self.pool, print, self.order)

    def begin(self) -> tuple[int, str | None]:
        return self.side.groups[0].load(self.order.parts[0], self.job, lambda: None)

    def test_without_a_buffer(self) -> None:
        """All of it is there, and in no buffer."""
        nbytes = 3 * LAYOUT.full.payload_nbytes(LAYOUT)
        self.load("r", [5, 6, 7])
        self.received()
        self.assertEqual({"blocks": nbytes}, self.counted("vua_loaded_bytes_total"))
        self.assertEqual(set(), self.side.take_failed_blocks())
        self.assertEqual(self.blocks(1, 2, 3), self.blocks(5, 6, 7))

    def test_nobody_waits_any_more(self) -> None:
        """A load that was given up writes into no block; control: the same one that is wanted."""
        before = self.blocks(5, 6, 7)
        self.job.settle()
        self.assertEqual((0, None), self.begin())
        self.assertEqual(before, self.blocks(5, 6, 7))

        self.job = Job(self.pool, print, self.order)
        self.assertEqual((48, None), self.begin())
        self.assertEqual(self.blocks(1, 2, 3), self.blocks(5, 6, 7))

    def test_given_up_while_it_copies(self) -> None:
        """Who gives a load up goes on when it does not write any more, not earlier."""
        copies, go, load_cached = threading.Event(), threading.Event(), Loader.load_cached

        def slowly(loader: Loader, keys: Any, believed: Any) -> int:
            copies.set()
            go.wait()
            return load_cached(loader, keys, believed)

        self.addCleanup(go.set)
        with mock.patch.object(Loader, "load_cached", slowly):
            loads = threading.Thread(target=self.begin, daemon=True)
            loads.start()
            copies.wait()
            gives_up = threading.Thread(target=self.job.settle)
            gives_up.start()
            gives_up.join(0.1)
            self.assertTrue(gives_up.is_alive())
            go.set()
            gives_up.join()
            self.assertEqual(self.blocks(1, 2, 3), self.blocks(5, 6, 7))
            loads.join()


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class HangingTest(WorkerTest):
    def setUp(self) -> None:
        super().setUp()
        store = self.side.groups[0].store
        self.storage = Hanging(store.storage)
        store.storage = self.storage  # type: ignore[assignment]
        self.addCleanup(self.storage.go.set)

    def hang(self) -> None:
        """Let what is being read or written take too long."""
        until(lambda: self.storage.calls)
        self.now_s += 1.1 * IO_S

    @pytest.mark.thorough
    def test_the_end_is_bounded(self) -> None:
        """An engine ends within `timeouts.drain_s`, however much waits, and says what is left.

        No call of the storage returns, and none is ever overdue.
        """
        for model in ("loads", "saves"):
            with self.subTest(model):
                self.side = self.worker(timeouts=Timeouts(io_s=3600.0, drain_s=0.2))
                store = self.side.groups[0].store
                store.storage = storage = Hanging(store.storage)  # type: ignore[assignment]
                self.addCleanup(storage.go.set)
                if model == "loads":
                    self.load("hangs", [5, 6, 7])
                    self.side.shutdown()
                    continue
                for first in range(10):
                    self.save(keys_of(range(100 + first, 148 + first), 16))
                with self.assertLogs("vllm.vua.worker", "WARNING") as logged:
                    self.side.shutdown()
                (line,) = logged.output
                self.assertIn("30 chunks are not stored", line)
                self.assertIn("within 0.2 s (timeouts.drain_s)", line)

    def test_unknown_memory(self) -> None:
        """Where nobody can tell what the engine computes with, nothing is stored or loaded."""
        with self.assertRaisesRegex(UncachedError, "nobody can tell"):
            self.worker(memory=EngineState(unknown="nobody can tell"))

    def test_blocks_of_a_vllm_that_was_not_run(self) -> None:
        """They are tried: what is put into unused ones is there, or the engine goes uncached.

        Here the second layer lies where the first one does.
        """
        new, apart = {"trusts_itself": False, "blocks": BLOCKS}, torch.zeros(2, BLOCKS, 1, 16, 12)
        for of_vllm, layers, fits in (
            ({}, apart[[0, 0]], True),
            (new, apart, True),
            (new, (apart[0], apart[0]), False),
        ):
            with nullcontext() if fits else self.assertRaises(UncachedError):
                self.worker(layers, **of_vllm)
            self.assertFalse(apart.any())

    def test_hanging_load(self) -> None:
        """It is reported as failed in time, and what it reads later reaches nobody's blocks."""
        buffers = self.side.groups[0].load_buffers
        free = buffers.left
        self.load("late", [5, 6, 7])
        self.hang()
        self.assertEqual({"late"}, self.received())
        self.assertEqual({5, 6, 7}, self.side.take_failed_blocks())
        self.assertEqual({"timeout": 1}, self.counted("vua_load_stops_total"))

        for layer in self.layers:  # the blocks are given to another request
            layer[5:8] = 1.0
        before = self.blocks(5, 6, 7)
        self.assertLess(buffers.left, free, "its thread may still write to the buffer")
        self.storage.go.set()
        until(lambda: buffers.left == free)

        self.assertEqual(before, self.blocks(5, 6, 7))
        self.assertEqual(set(), self.side.take_received(idle=False))
        self.assertEqual(set(), self.side.take_failed_blocks())

    @pytest.mark.thorough
    def test_waits_for_the_engine(self) -> None:
        """Blocks that a step may still use are filled behind it: no hang, and no loading time.

        A load whose blocks are free does not wait behind one that waits.
        """
        self.side = self.worker(worker=WorkerResources(load_threads=2))
        group, step, looks = self.side.groups[0], threading.Event(), list[int]()

        def is_over() -> bool:
            looks.append(1)
            return step.is_set()

        before = self.blocks(8, 9, 10)
        busy: Any = SimpleNamespace(query=is_over)
        with mock.patch.object(group, "mark", return_value=Fence(busy)):
            self.load("waits", [8, 9, 10])
        until(lambda: looks)
        self.load("free", [5, 6, 7])
        self.assertEqual({"free"}, self.received())
        for _ in range(3):
            self.now_s += 1.1 * IO_S
            seen = len(looks)
            until(lambda seen=seen: len(looks) > seen + 1)
            self.assertEqual(set(), self.side.take_received(idle=False))
        self.assertEqual(before, self.blocks(8, 9, 10))

        step.set()

        self.assertEqual({"waits"}, self.received())
        self.assertEqual(set(), self.side.take_failed_blocks())
        self.assertEqual(self.blocks(1, 2, 3), self.blocks(8, 9, 10))
        notes = self.side.take_notes()
        self.assertEqual(["free", "waits"], sorted(notes.load_s))
        self.assertLess(notes.load_s["waits"], IO_S)

    def test_replicas_share_reads(self) -> None:
        """Ranks that hold the same heads read through the page cache, others past it."""
        for workers in (2, 1):
            store = self.worker(workers=workers).groups[0].store
            self.assertEqual(workers > 1, store.storage.shares_reads)

    @pytest.mark.thorough
    def test_changed_while_loading(self) -> None:
        """A load during which the namespace or the weights change fills no block that counts."""
        engine = EngineMemory(torch.nn.Linear(8, 8), last_call="update")
        other = Identity(model="other", chunk_tokens=16)

        def follow_another_namespace() -> None:
            save_step(self.side, replace(saving(self.keys, [1, 2, 3]), identity=other))

        def call_into_the_worker() -> None:
            engine.calls += 1
            self.side.start_loads(ConnectorMetadata())  # the next step sees it

        changes: list[tuple[Callable[[], object], bool]] = [
            (lambda: None, False),
            (follow_another_namespace, True),
            (call_into_the_worker, True),
            (lambda: engine.model.weight.data.add_(1), True),
        ]
        for change, fails in changes:
            with self.subTest(change=change):
                self.side = self.worker(memory=EngineState(engine))
                store = self.side.groups[0].store
                store.storage = storage = Hanging(store.storage)  # type: ignore[assignment]
                self.load("during", [5, 6, 7])
                until(lambda storage=storage: storage.calls)
                change()
                storage.go.set()

                self.assertEqual({"during"}, self.received())
                self.assertEqual({5, 6, 7} if fails else set(), self.side.take_failed_blocks())
                stops = {"reset": 1} if fails else {}
                self.assertEqual(stops, self.counted("vua_load_stops_total"))

    def test_loads_behind_a_hanging_one(self) -> None:
        """They are given up with it; after a few more, loads are refused at once, then resumed."""
        for at in range(3):
            self.load(f"{at}", [5, 6, 7])
        self.hang()
        ended: set[str] = set()
        while len(ended) < 3:
            ended |= self.received()
        calls = self.storage.calls
        self.load("refused", [8, 9, 10])
        self.assertEqual({"refused"}, self.side.take_received(idle=False))
        self.assertLessEqual({8, 9, 10}, self.side.take_failed_blocks())
        self.assertEqual({"timeout": 3, "paused": 1}, self.counted("vua_load_stops_total"))
        self.assertEqual(calls, self.storage.calls)

        self.storage.go.set()

        def loads_again() -> bool:
            self.now_s += 60.0  # the longest pause
            self.load("again", [8, 9, 10])
            self.received()
            return not self.side.take_failed_blocks()

        until(loads_again)
        self.assertEqual(self.blocks(1, 2, 3), self.blocks(8, 9, 10))

    def test_hanging_saves(self) -> None:
        """They never hold up the engine; they are given up, and after a few none is begun."""
        before = self.files()
        keys = keys_of(range(100, 148), 16)
        self.save(keys)
        self.hang()
        self.save([])
        self.save(keys)

        self.assertEqual({"timeout": 3, "paused": 3}, self.counted("vua_chunks_saved_total"))
        self.storage.go.set()

        def saved() -> bool:
            self.now_s += 60.0  # the longest pause
            self.save(keys)
            until(lambda: self.side.saves.pending == 0)
            return len(self.files()) == len(before) + 3

        until(saved)

    @pytest.mark.thorough
    def test_storage_slower_than_the_engine(self) -> None:
        """What does not fit into the buffers is told, not queued, and stored when it is ordered."""
        side = self.worker(worker=LITTLE)
        side.groups[0].store.storage = self.storage  # type: ignore[assignment]
        room = side.groups[0].save_buffers.left
        keys = keys_of(range(1000, 1000 + 16 * (room + 5)), 16)

        def order(first: int) -> ConnectorMetadata:
            table, start = [1] * (len(keys) + 63), keys[first].start
            return saving(keys[first:], table, request_id="r", start=start)

        with self.assertLogs("vllm.vua.worker", "WARNING"):
            save_step(side, order(0))
        notes = side.take_notes()
        assert notes is not None
        self.assertEqual(({"r": keys[room].start}, set()), (notes.unsaved, notes.retry))
        save_step(side, order(room + 3))  # the scheduler did not know yet
        self.assertIsNone(side.take_notes())

        stats = side.stats.take()
        assert stats is not None
        self.assertEqual({"dropped": 7}, stats["vua_chunks_saved_total"])
        self.assertEqual(room, side.saves.pending)
        self.storage.go.set()

        notes = until(side.take_notes)
        self.assertEqual(({}, {"r"}), (notes.unsaved, notes.retry))
        save_step(side, order(room))
        until(lambda: side.saves.pending == 0)
        self.assertEqual(3 + len(keys), len(self.files()))

    def test_copies_that_fail(self) -> None:
        """Where chunks cannot be copied out, their buffers are there for the next ones."""
        group, keys = self.side.groups[0], keys_of(range(100, 148), 16)
        room = group.save_buffers.left
        broken = mock.patch.object(group, "gather", side_effect=RuntimeError("broken"))
        with broken, self.assertRaisesRegex(RuntimeError, "broken"):
            self.save(keys)
        self.assertEqual((room, 0), (group.save_buffers.left, self.side.saves.pending))
        self.assertEqual({"error": 3}, self.counted("vua_chunks_saved_total"))
        self.storage.go.set()
        self.save(keys)
        until(lambda: len(self.files()) == 6 and self.side.saves.pending == 0)

    def test_no_thread(self) -> None:
        """Where the system gives no thread nothing is stored, and no buffer is lost."""
        side = self.worker()
        room, keys = side.groups[0].save_buffers.left, keys_of(range(100, 148), 16)
        order = saving(keys, [1, 2, 3])
        no_more = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("no more"))
        with no_more, self.assertLogs("vllm.vua.worker", "WARNING"):
            save_step(side, order)

        self.assertEqual((0, room), (side.saves.pending, side.groups[0].save_buffers.left))
        save_step(side, order)
        until(lambda: len(self.files()) == 6)

    @pytest.mark.thorough
    def test_failing_saves(self) -> None:
        """A full disk is not written to again and again."""
        self.storage.problem = StorageError(28, "no space left")
        self.storage.go.set()
        for at in range(20):
            self.save(keys_of(range(1000 * at, 1000 * at + 48), 16))
            until(lambda: self.side.saves.pending == 0)

        self.assertLess(self.storage.calls, 10)  # for 60 chunks

    def test_pin(self) -> None:
        """A client's hint holds the chunks of its request and their prefix; others are not held."""
        self.storage.go.set()
        keys = keys_of(range(100, 148), 16)
        save_step(self.side, saving(keys, [1, 2, 3], pin=True))
        until(lambda: self.side.saves.pending == 0)

        pins = sorted(path.parent.name for path in self.root.rglob("pin-*"))
        self.assertEqual(sorted(key.name for key in keys), pins)


class StagedHangingTest(HangingTest):
    """All that the CPU's worker promises on storage that hangs or fails holds here too."""

    def setUp(self) -> None:
        """The same worker, with buffers between files and blocks."""
        on_cpu_too(self)
        super().setUp()
        self.assertIsInstance(self.side.groups[0], DeviceGroupTransfer)

    def test_threads_enter_the_device(self) -> None:
        """Each thread of ours says which device it is for before it moves anything there."""
        entered = set()

        def note() -> None:
            entered.add(threading.current_thread().name)

        enter = mock.patch.object(Staging, "enter_thread", side_effect=note)
        self.storage.go.set()
        with enter:
            self.load("good", [5, 6, 7])
            self.received()
            self.save(keys_of(range(100, 148), 16))
            until(lambda: self.side.saves.pending == 0)
        self.assertEqual({"vua-load", "vua-save"}, entered)

    @pytest.mark.thorough
    def test_marks_before_the_forward_pass(self) -> None:
        """A load waits for what was ordered before its step's forward pass, and not for that."""
        made, asked = list[int](), list[int]()
        group = self.side.groups[0]

        def mark() -> Fence:
            made.append(len(made))
            event: Any = SimpleNamespace(query=lambda number=made[-1]: asked.append(number) or True)
            return Fence(event)

        self.storage.go.set()
        orders = loading(self.keys, [5, 6, 7])
        with mock.patch.object(group, "mark", mark):
            self.side.mark_loads(orders)
            self.assertEqual([0], made)
            self.side.start_loads(orders)
            self.received()
        self.assertEqual(([0], {0}), (made, set(asked)))

    def test_engine_waits_for_a_load_that_is_given_up(self) -> None:
        """Once it can queue nothing more, what it has queued comes before the blocks' next use."""
        side = self.side
        wanted = []

        def join(staging: Staging) -> None:
            self.assertIs(side.groups[0].load_buffers, staging)
            self.assertIs(threading.main_thread(), threading.current_thread())
            # race: the load's thread hangs while the engine waits, and must have been given up
            wanted.extend(job.wanted for job in side._loads._open)

        with mock.patch.object(Staging, "join", join):
            self.load("late", [5, 6, 7])
            self.hang()
            self.assertEqual({"late"}, self.received())

        self.assertEqual([False], wanted)


@pytest.mark.thorough
class DirectHangingTest(StagedHangingTest):
    """The same with files read straight into what stands for GPU memory."""

    def worker(self, layers: Any = None, **given: Any) -> Any:
        """Require GDS; its mover is the one of the CPU."""
        return super().worker(layers, gds_mode="required", **given)


class DirectPathsTest(DirectHangingTest):
    """What is read straight, what is not, and how both are told apart."""

    test_hanging_load = test_loads_behind_a_hanging_one = None
    test_hanging_saves = test_failing_saves = test_pin = None
    test_engine_waits_for_a_load_that_is_given_up = None

    def test_paths(self) -> None:
        """Bytes are counted by the way they came; a damaged file is read by both, and is a miss."""
        self.storage.go.set()
        self.load("good", [5, 6, 7])
        self.received()
        self.assertEqual(["gds"], list(self.counted("vua_loaded_bytes_total")))
        path = next(p for p in self.files() if p.parent.name == self.keys[1].name)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(bytes(data))

        self.load("damaged", [8, 9, 10])
        self.received()

        self.assertEqual({9, 10}, self.side.take_failed_blocks())
        self.assertEqual(self.blocks(1), self.blocks(8))
        found = self.side.stats.take()
        self.assertEqual({"corrupt": 1}, found["vua_load_stops_total"])
        self.assertNotIn("vua_gds_fallbacks_total", found)
        self.assertNotIn(path, self.files())
        self.assertIsNotNone(self.side.gds.mover)

    def test_liar(self) -> None:
        """A mover that brings other bytes is found out, and not used again."""
        self.storage.go.set()
        mover = self.side.gds.mover
        read = mover.read

        def lie(handle: Any, memory: torch.Tensor, at: int, nbytes: int, offset: int) -> int:
            got: int = read(handle, memory, at, nbytes, offset)
            memory[at + nbytes - 1] ^= 1
            return got

        with mock.patch.object(mover, "read", lie):
            self.load("lied to", [5, 6, 7])
            self.received()

        self.assertEqual(set(), self.side.take_failed_blocks())
        self.assertEqual(self.blocks(1, 2, 3), self.blocks(5, 6, 7))
        self.assertIsNone(self.side.gds.mover)
        self.assertEqual({"": 1}, self.counted("vua_gds_fallbacks_total"))
