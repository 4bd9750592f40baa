"""VUA beside others: stores, routers, releases of vLLM."""

from __future__ import annotations

import shutil
import tempfile
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from e2e.damage import CHUNK, exchange_for_noise, stored
from e2e.harness import (
    OTHER_VLLM,
    PROMPT,
    SETTLE,
    Batch,
    Driver,
    EngineTest,
    Phase,
    Served,
    run,
    vllm_version,
)
from helpers import keys_of
from vua.vllm import CONNECTOR

pytestmark = pytest.mark.vllm


BATCH = Batch([PROMPT])


@pytest.mark.thorough
class MultiTest(EngineTest):
    def setUp(self) -> None:
        super().setUp()
        self.root.mkdir()
        self.roots = [self.root / "one", self.root / "two"]

    def child(self, root: Path) -> dict[str, Any]:
        extra = {"shared_storage_path": str(root), "chunk_tokens": CHUNK, "strict": True}
        extra |= {"witness_every": 0, "load_policy": "always"}
        return {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": "vua.vllm.kv_connector_v1",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }

    def other(self, root: Path) -> dict[str, Any]:
        """The ExampleConnector of vLLM, which stores a prompt as one file per layer."""
        return {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(root)},
        }

    def multi(self, *connectors: dict[str, Any]) -> Served:
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_connector_module_path": None,
            "kv_connector_extra_config": {"connectors": connectors},
        }
        return self.serve(BATCH, transfer=transfer)

    def test_both_store_and_either_loads(self) -> None:
        """Both directories get the same files, and the tokens stay right when one is lost."""
        both = [self.child(root) for root in self.roots]
        expected = self.baseline(BATCH)
        cold = self.multi(*both)
        files = [
            {str(path.relative_to(root)): path.stat().st_size for path in stored(root)}
            for root in self.roots
        ]
        warm = self.multi(*both)
        shutil.rmtree(self.roots[0])
        half = self.multi(*both)

        self.assertEqual([expected] * 3, [cold.tokens, warm.tokens, half.tokens])
        loaded = [each.counts.get("tokens_loaded", 0) for each in (cold, warm, half)]
        self.assertEqual([0, 640, 640], loaded)
        self.assertEqual([10, 10, 10], [len(files[0]), *(len(stored(r)) for r in self.roots)])
        self.assertEqual(files[0], files[1])

    def test_beside_another_store(self) -> None:
        """In either order: the first one loads, the second one where the first has lost it.

        What one of them has lost it stores again, from what the other one has loaded. VUA loads 640
        tokens of the prompt, in chunks of 64, and the other store 672, in blocks of 32.
        """
        expected = self.baseline(BATCH)
        for ahead in (0, 1):
            with self.subTest(first=("VUA", "the other store")[ahead]):
                self.setUp()
                both = [self.child(self.roots[0]), self.other(self.roots[1])]
                by = [(640, 640), (672, 0)]
                first, second = ahead, 1 - ahead
                order = [both[first], both[second]]

                served = [self.multi(*order), self.multi(*order)]
                for lost in (first, second):
                    self.assertEqual((10, 2), self.files())
                    shutil.rmtree(self.roots[lost])
                    served.append(self.multi(*order))
                self.assertEqual((10, 2), self.files())
                self.noise(self.roots[first])
                noise = self.multi(*order)

                self.assertEqual([expected] * 4, [each.tokens for each in served])
                found = [(*each.cached, each.counts.get("tokens_loaded", 0)) for each in served]
                self.assertEqual([(0, 0), by[first], by[second], by[first]], found)
                self.assertEqual(by[first][0], *noise.cached)
                self.assertNotEqual(expected, noise.tokens)

    def files(self) -> tuple[int, int]:
        """How many each store has: of VUA's chunks, and of the other one's layers."""
        ours, theirs = self.roots
        return len(stored(ours)), len([*theirs.glob("*/*.safetensors")])

    def noise(self, root: Path) -> None:
        if root == self.roots[0]:
            exchange_for_noise(root, PROMPT)
        chance = torch.Generator().manual_seed(0)
        for path in root.glob("*/*.safetensors"):
            tensors = load_file(path)
            noise = {
                name: torch.randn(one.shape, generator=chance) for name, one in tensors.items()
            }
            save_file(noise, path)


if find_spec("vllm"):
    import msgspec
    import zmq
    from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

BLOCK = 32


class Router:
    """Listens to an engine's events and keeps account, as routers do."""

    def __init__(self, endpoint: str) -> None:
        """Listen; the engine may come later. It is to wait a moment first: it keeps nothing."""
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 5)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(endpoint)
        self._socket.subscribe(b"")
        self.stored: list[BlockStored] = []
        """Announced as stored in the directory."""
        self.removed: list[Any] = []
        self.held: set[Any] = set()
        """Hashes of the blocks that the directory is said to hold."""
        self.own: dict[Any, tuple[list[int], Any, int | None]] = {}
        """What vLLM says of its own blocks: tokens, parent and cache group by hash."""
        self.blocks: dict[Any, tuple[list[int], Any, int | None]] = {}
        """The same of those announced as stored in the directory."""

    def listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        while self._socket.poll(500):
            for event in decoder.decode(self._socket.recv_multipart()[2]).events:
                self._take(event)

    def _take(self, event: Any) -> None:
        if isinstance(event, BlockStored):
            where = self.own
            if event.medium == "STORAGE":
                where = self.blocks
                self.stored.append(event)
                self.held.update(event.block_hashes)
            parent = event.parent_block_hash
            for at, name in enumerate(event.block_hashes):
                ids = event.token_ids[at * event.block_size : (at + 1) * event.block_size]
                where[name] = (ids, parent, event.group_idx)
                parent = name
        elif isinstance(event, BlockRemoved) and event.medium == "STORAGE":
            self.removed += event.block_hashes
            self.held.difference_update(event.block_hashes)

    def chunks(self) -> list[str]:
        """The names of the chunks that end with a block of those held."""
        prefixes = [self._prefix(name) for name in self.held]
        whole = [ids for ids in prefixes if len(ids) % CHUNK == 0]
        return sorted(keys_of(ids, CHUNK)[-1].name for ids in whole)

    def _prefix(self, name: Any) -> list[int]:
        ids: list[int] = []
        while name is not None:
            own, name, _ = self.blocks[name]
            ids = own + ids
        return ids

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest.mark.thorough
class EventsTest(EngineTest):
    @contextmanager
    def router(self) -> Iterator[tuple[Router, dict[str, Any]]]:
        """A router, and the engine's settings for it."""
        with tempfile.TemporaryDirectory(prefix="vua-zmq-") as folder:
            endpoint = f"ipc://{folder}/events"
            router = Router(endpoint)
            events = {"enable_kv_cache_events": True, "endpoint": endpoint}
            try:
                yield router, {"enable_prefix_caching": True, "kv_events_config": events}
            finally:
                router.close()

    def names(self) -> list[str]:
        return [path.parent.name for path in stored(self.root)]

    def test_cold_then_warm(self) -> None:
        """Every stored chunk is announced once, in the words that vLLM has for its own blocks."""
        for when in ("stored", "found"):
            with self.subTest(when), self.router() as (router, engine):
                self.serve(SETTLE, Batch([PROMPT]), SETTLE, engine=engine)
                router.listen()

                self.assertEqual(640 // BLOCK, len(router.held))
                self.assertEqual(self.names(), router.chunks())
                self.assertEqual([], router.removed)
                hashes = [name for event in router.stored for name in event.block_hashes]
                self.assertEqual(len(hashes), len(set(hashes)))
                own = {name: router.own[name] for name in router.held}
                self.assertEqual(own, router.blocks)
                self.assertEqual({BLOCK}, {event.block_size for event in router.stored})
                self.assertEqual(1, len(router.stored))  # a run


BATCH = Batch([PROMPT])


@cache
def installed() -> Driver:
    """Engines of the installed vLLM, not of the one that hides it."""
    return Driver(left_out=OTHER_VLLM)


class VersionsTest(EngineTest):
    @unittest.skipUnless(OTHER_VLLM, "needs a second vLLM: dev.py test-oldest")
    def test_directory_of_another_version(self) -> None:
        """What one release wrote the other one loads, though their paged caches differ in form."""
        drivers: dict[str, Driver | None] = {"this": None, "installed": installed()}
        plain = {name: self.by(driver, Phase([BATCH])) for name, driver in drivers.items()}
        for first, second in (("this", "installed"), ("installed", "this")):
            with self.subTest(first=first):
                phase = Phase([BATCH], root=self.root.with_name(first))
                cold = self.by(drivers[first], phase)
                files = stored(self.root.with_name(first))
                warm = self.by(drivers[second], phase)

                self.assertEqual([plain[first].tokens, [0]], [cold.tokens, cold.cached])
                self.assertEqual([plain[second].tokens, [640]], [warm.tokens, warm.cached])
                self.assertEqual(10, len(files))
                self.assertEqual(files, stored(self.root.with_name(first)))
        this, other = (plain[name].log for name in ("this", "installed"))
        self.assertIn(f"engine (v{vllm_version().public})", this)
        self.assertNotIn(f"engine (v{vllm_version().public})", other)

    def by(self, driver: Driver | None, phase: Phase) -> Served:
        (served,) = run(phase, by=driver)
        self.assertIsNone(served.problem)
        return served
