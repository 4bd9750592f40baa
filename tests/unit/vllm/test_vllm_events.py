"""What `vua events` sends, as a router of vLLM's events reads it."""

from __future__ import annotations

import shutil

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import (
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)

from commands import TOKENS, SocketTest
from helpers import keys_of, remove_tree

pytestmark = pytest.mark.vllm


class DirectoryTest(SocketTest):
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
