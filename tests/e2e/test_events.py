"""KV cache events: what a router on vLLM's ZMQ stream hears is what the directory holds."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

from e2e.damage import CHUNK, chunk_files, flip, stored
from e2e.harness import PROMPT, SETTLE, Batch, EngineTest, tokens
from helpers import keys_of

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

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

    def test_what_is_lost_is_announced(self) -> None:
        """Damage, somebody else's deletion and eviction: announced as removed, and what comes."""
        self.serve(Batch([PROMPT]))
        (path,) = chunk_files(self.root, PROMPT, 6)
        nbytes = path.stat().st_size
        with self.router() as (router, engine):
            flip(path)
            more = [Batch([tokens(400, seed=60 + at)]) for at in range(3)]
            extra = {"limits": {"max_bytes": 20 * nbytes}}

            first = (SETTLE, Batch([PROMPT]), SETTLE)
            served = self.serve(*first, *more, SETTLE, engine=engine, extra=extra)
            router.listen()

            self.assertEqual(1, served.counts["corrupt"])
            self.assertLess(len(self.names()), 10 + 3 * 6)  # something was evicted
            self.assertEqual(self.names(), router.chunks())
            hashes = [name for event in router.stored for name in event.block_hashes]
            self.assertEqual(2, len(hashes) - len(set(hashes)))  # the damaged chunk's, mended
            self.assertGreater(len(router.removed), 2)

    def test_extras(self) -> None:
        """What else names a block is in the event: no router takes it for another's tokens."""
        with self.router() as (router, engine):
            self.serve(SETTLE, Batch([PROMPT[:200]], salt="tenant"), SETTLE, engine=engine)
            router.listen()

            keys = [event.extra_keys for event in router.stored]
            self.assertEqual([[("tenant",), *[None] * 5]], keys)
            self.assertLessEqual(router.held, set(router.own))
