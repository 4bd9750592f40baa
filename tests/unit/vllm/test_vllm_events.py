"""KV cache events without an engine: when chunks are announced, and what is remembered."""

from __future__ import annotations

import os
import shutil
import unittest
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
import zmq
from vllm.distributed.kv_events import (
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from commands import TOKENS, SocketTest
from helpers import keys_of, remove_tree
from vua.connector import events
from vua.connector.cache_spec import Group, Model
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout
from vua.vllm.kv_connector_v1 import BlockEvents

pytestmark = pytest.mark.vllm

CHUNK = 16
IDS = list(range(64))
LAYOUT = KVLayout(1, 2, 8, 8, "BF16", CHUNK)


class EventPublisherTest(unittest.TestCase):
    def setUp(self) -> None:
        """The chunks of a prompt of 64 tokens; hashes in events are not shortened to integers."""
        whole = {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}
        self.enterContext(mock.patch.dict(os.environ, whole))
        self.keys = KeyChain(token_ids(IDS), CHUNK)
        self.names = [key.prefix_hash for key in self.keys.first(4)]

    def publisher(self, block: int) -> Any:
        """A publisher of an engine with blocks of so many tokens."""
        model = Model(
            Identity(model="m", chunk_tokens=CHUNK),
            (Group(LAYOUT, (0,), ((LAYOUT.full,),), (0,)),),
            (block,),
        )
        spec = FullAttentionSpec(
            block_size=block, num_kv_heads=1, head_size=8, dtype=torch.bfloat16
        )
        cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
        parallel = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)
        settings = SimpleNamespace(
            cache_config=SimpleNamespace(
                block_size=block, prefix_match_unit=None, enable_prefix_caching=True
            ),
            kv_transfer_config=None,
            parallel_config=parallel,
        )
        self.request = SimpleNamespace(
            block_hashes=[b"%d" % at for at in range(64 // block)],
            all_token_ids=IDS,
            lora_request=None,
            cache_salt=None,
            mm_features=[],
            session_id=None,
        )
        return BlockEvents(model, settings, cache)

    def store(self, publisher: Any, *chunks: int) -> list[Any]:
        """Let workers store chunks; return the events that come of it."""
        publisher.announce(self.request, self.keys, chunks)
        return [*publisher.take()]

    def lose(self, publisher: Any, chunk: int) -> list[Any]:
        """Let a worker find a chunk gone; return the events that come of it."""
        publisher.gone([self.names[chunk]])
        return [*publisher.take()]

    def test_chunks_that_are_stored(self) -> None:
        """Each is announced once, after those before it; a later step names the first one again."""
        publisher = self.publisher(8)
        told = self.store(publisher, 0) + self.store(publisher, 0, 1, 2)

        hashes = [event.block_hashes for event in told]
        self.assertEqual([[b"0", b"1"], [b"2", b"3", b"4", b"5"]], hashes)
        self.assertEqual([None, b"1"], [one.parent_block_hash for one in told])
        self.assertEqual([IDS[:16], IDS[16:48]], [one.token_ids for one in told])

    def test_blocks_longer_than_chunks(self) -> None:
        """A block is announced with the last chunk in it, and gone with any of them."""
        publisher = self.publisher(32)
        self.assertEqual([], self.store(publisher, 0))
        told = self.store(publisher, 1, 2) + self.store(publisher, 3)
        gone = self.lose(publisher, 0)
        again = self.store(publisher, 0, 1)
        gone += self.lose(publisher, 1) + self.lose(publisher, 0)

        self.assertEqual([[b"0"], [b"1"]], [event.block_hashes for event in told])
        self.assertEqual([IDS[:32], IDS[32:]], [event.token_ids for event in told])
        self.assertEqual([[b"0"]], [event.block_hashes for event in again])
        self.assertEqual([[b"0"], [b"0"]], [event.block_hashes for event in gone])

    def test_what_a_lookup_finds(self) -> None:
        """What others stored is announced once, at once; what they deleted meanwhile is gone."""
        publisher = self.publisher(16)
        publisher.announce_found(self.request, self.keys, 3)
        (event,) = publisher.take()
        self.assertEqual([b"0", b"1", b"2"], event.block_hashes)

        publisher.announce_found(self.request, self.keys, 3)
        self.assertEqual([], publisher.take())
        publisher.announce_found(self.request, self.keys, 1)
        gone = publisher.take()
        self.assertEqual([[b"1"], [b"2"]], [one.block_hashes for one in gone])
        again = self.store(publisher, 2)
        publisher.announce_found(self.request, self.keys, 4)  # around what is known
        again += publisher.take()
        self.assertEqual([[b"2"], [b"1"], [b"3"]], [one.block_hashes for one in again])

    def chain(self, at: int) -> KeyChain:
        """The chunk of another prompt."""
        return KeyChain(token_ids([at, *IDS[1:CHUNK]]), CHUNK)

    def test_forgotten(self) -> None:
        """What is too old to be remembered is announced as removed: nobody would say it later."""
        publisher = self.publisher(16)
        with mock.patch.object(events, "_MAX_ANNOUNCED", 3):  # race: memory of 20 MB
            for at in range(5):
                self.request.block_hashes = [b"%d" % at]
                publisher.announce_found(self.request, self.chain(at), 1)
        told = publisher.take()
        gone = [one.block_hashes for one in told if isinstance(one, BlockRemoved)]
        self.assertEqual([[b"0"], [b"1"]], gone)
        self.assertEqual(5, sum(isinstance(one, BlockStored) for one in told))

    def test_full_queue(self) -> None:
        """Of events that nobody takes those of removals are kept, and no other block is told."""
        publisher, believed = self.publisher(16), set()
        with mock.patch.object(events, "MAX_QUEUED", 4), self.assertLogs("vllm.vua.events"):
            for at in range(10):
                self.request.block_hashes = [b"%d" % at]
                publisher.announce_found(self.request, self.chain(at), 1)
            for at in range(10):
                publisher.announce_found(self.request, self.chain(at), 0)
        queue = publisher.take()
        self.assertLessEqual(len(queue), 2 * 4)
        for event in queue:
            hashes = set(event.block_hashes)
            believed = believed - hashes if isinstance(event, BlockRemoved) else believed | hashes
        self.assertEqual(set(), believed)


class DirectoryTest(SocketTest):
    """`vua events`, as a router of vLLM's events reads it."""

    def test_decoded(self) -> None:
        """What is stored, parents first, and what is removed is what vLLM's own decoder reads."""
        keys = [key.prefix_hash for key in keys_of(TOKENS.tolist(), 4)]
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        with self.running("--follow", "--interval", "0.01"):
            subscriber = self.socket(zmq.SUB, self.out)
            subscriber.subscribe(b"")
            batch = decoder.decode(subscriber.recv_multipart()[2])
            self.assertIsInstance(batch.events.pop(0), AllBlocksCleared)
            shutil.rmtree(self.entries()[0].parents[2])
            removed = decoder.decode(subscriber.recv_multipart()[2]).events[0]
            remove_tree(self.root)
        chains: dict[str, list[bytes]] = {}
        for event in batch.events:
            self.assertIsInstance(event, BlockStored)
            self.assertEqual((MEDIUM_STORAGE, "LOCAL"), (event.medium, event.locality))
            self.assertEqual((4, []), (event.block_size, event.token_ids))
            chain = chains.setdefault(event.ownership, [])
            self.assertEqual(chain[-1] if chain else None, event.parent_block_hash)
            chain += event.block_hashes
        self.assertEqual([keys[:1], keys], sorted(chains.values(), key=len))
        self.assertEqual(0, batch.data_parallel_rank)
        self.assertIsInstance(removed, BlockRemoved)
        self.assertEqual(keys, chains[removed.ownership])
        self.assertIn(removed.block_hashes[0], keys)
