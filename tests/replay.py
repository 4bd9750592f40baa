"""Replays a trace of requests through a bounded cache, and through an LRU list of the same size."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from vua.capacity.limits import Limits
from vua.device.buffers import StagingBuffer
from vua.format.entry import EntryCodec
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout
from vua.store.namespace import Namespace
from vua.store.writer import EntryWriter

Trace = Sequence[Sequence[int]]
"""Per request the ids of its blocks; equal ids mean equal prefixes up to there."""

LAYOUT = KVLayout(layers=1, kv_heads=1, k_dim=4, v_dim=4, dtype="F32", chunk_tokens=1)
NBYTES = EntryCodec("0" * 64, LAYOUT, LAYOUT.full).file_nbytes


def synthetic_trace(requests: int, seed: int = 0) -> Trace:
    """Conversations that go on: each request extends one of the recent ones, or is new."""
    chance = random.Random(seed)
    open_: list[list[int]] = []
    fresh, trace = 1, []
    for _ in range(requests):
        if not open_ or chance.random() < 0.25:
            open_.append([0])  # all share a system prompt
        at = len(open_) - 1 - min(int(chance.expovariate(0.08)), len(open_) - 1)
        grown = chance.randint(1, 6)
        open_[at] = [*open_[at], *range(fresh, fresh + grown)]
        fresh += grown
        trace.append(open_[at])
    return trace


def lru_hits(trace: Trace, capacity: int) -> Iterator[int]:
    """Per request the leading blocks that an LRU list of ``capacity`` blocks has."""
    cached: OrderedDict[int, None] = OrderedDict()
    for blocks in trace:
        yield next((n for n, block in enumerate(blocks) if block not in cached), len(blocks))
        for block in reversed(blocks):  # the tail first, so that it goes first
            cached[block] = None
            cached.move_to_end(block)
        while len(cached) > capacity:
            cached.popitem(last=False)


class Cache:
    """A cache of tiny chunks in a directory."""

    def __init__(self, root: Path, capacity: int | None = None, model: str = "replay") -> None:
        identity = Identity(model=model, kv_dtype=LAYOUT.dtype, chunk_tokens=1, name=model)
        most = None if capacity is None else capacity * NBYTES
        bounds = Limits(max_bytes=most, min_free_bytes=0)
        self.store = Namespace.create(root, identity, [LAYOUT], bounds=bounds).stores[0]
        self.saver = EntryWriter(self.store, StagingBuffer(LAYOUT, LAYOUT.full, 1).memory)
        if self.store.capacity is None:
            raise AssertionError
        self.capacity = self.store.capacity

    def request(self, blocks: Sequence[int]) -> int:
        """Look a prompt up, use what is there, store the rest; return the chunks found."""
        keys = KeyChain(token_ids(blocks), 1)
        found = self.store.lookup(keys)
        self.store.used(keys, found, wait=True)
        for place in range(found, len(keys)):
            self.saver.save([keys[place]])
        return found


def ratio(hits: Iterator[int], trace: Trace) -> float:
    return sum(hits) / sum(map(len, trace))
