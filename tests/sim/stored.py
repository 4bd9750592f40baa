"""Reads all that is stored back and compares it with what the fake model writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from sim.truth import Chain, Shape, first_read, rows
from sim.worker import Wrong
from vua.device.buffers import StagingBuffer
from vua.format.keys import ChunkKey, KeyChain, token_ids
from vua.format.layout import KVLayout
from vua.storage.base import parse_name
from vua.storage.description import descriptions
from vua.store.namespace import Namespace
from vua.store.store import Store


@dataclass
class Inventory:
    """What a directory holds."""

    shape: Shape
    chunk_tokens: int
    good: set[tuple[int, str]] = field(default_factory=set)
    """The chunks that are right: the window of the layers, the name."""
    damaged: int = 0

    def stored(self, chain: Chain, window: int) -> list[bool]:
        """Which chunks of a prompt are stored for the layers of a window."""
        return [(window, key.name) in self.good for key in keys_of(chain, self.chunk_tokens)]

    def usable(self, chain: Chain, block_size: int) -> Iterator[int]:
        """How many tokens may be loaded, by the definition, the most first.

        Whoever computes the token behind them finds all that it attends to. What is loaded begins
        and ends with a block, as vLLM offers these blocks to other requests.
        """
        stored = {window: self.stored(chain, window) for window in self.shape.kinds}
        size = self.chunk_tokens
        most = min(len(chain.prompt) - 1, len(chain.prompt) // size * size)
        for end in range(most // block_size * block_size, 0, -block_size):
            if all(
                all(chunks[first_read(end, w) // block_size * block_size // size : -(-end // size)])
                for w, chunks in stored.items()
            ):
                yield end
        yield 0

    @property
    def leading(self) -> list[int]:
        """The windows of the layers of which everything is stored: no window, if there are such."""
        whole = [window for window in self.shape.kinds if not window]
        return whole or list(self.shape.kinds)

    def missing(self, chain: Chain, block_size: int, *, windows: bool) -> list[tuple[int, int]]:
        """What an engine with such blocks should have stored of a prompt: (window, chunk).

        It stores up to the last token where a block ends. With ``windows``,
        also what other layers than the leading ones need to go on there.
        """
        size, missing = self.chunk_tokens, []
        end = len(chain.prompt) // size * size // block_size * block_size
        for window in self.shape.kinds:
            stored = self.stored(chain, window)
            if 0 < window < size:
                continue  # vLLM may free the start of a chunk before its end is computed
            first = 0 if window in self.leading else first_read(end, window) // size
            if windows or window in self.leading:
                chunks = range(first, -(-end // size))
                missing += [(window, chunk) for chunk in chunks if not stored[chunk]]
        return missing

    def has_hole(self, chain: Chain) -> bool:
        """Whether something is stored behind what is missing, where all should be stored."""
        stored = [self.stored(chain, window) for window in self.leading]
        return any(chunks != sorted(chunks, reverse=True) for chunks in stored)


def keys_of(chain: Chain, chunk_tokens: int) -> list[ChunkKey]:
    extras = {0: [("salt", chain.salt.encode())]} if chain.salt else {}
    keys = KeyChain(token_ids(chain.prompt), chunk_tokens, extras)
    return keys.first(len(keys))


def kind_of(layout: KVLayout) -> int:
    """The window of a store's layers; 0 for none."""
    return layout.window or 0


def take_inventory(
    root: Path, shape: Shape, chunk_tokens: int, chains: Sequence[Chain]
) -> Inventory:
    """Read every stored chunk. Raises Wrong for one with a wrong value or an unknown name."""
    known = {key.name: (key, chain) for chain in chains for key in keys_of(chain, chunk_tokens)}
    inventory = Inventory(shape, chunk_tokens)
    for namespace in descriptions(root):
        if namespace.identity is None:
            raise Wrong(f"{namespace.path} is not described")
        stores = Namespace.create(root, namespace.identity, namespace.layouts).stores
        if {kind_of(store.layout) for store in stores} != set(shape.kinds):
            raise Wrong(f"{namespace.path} has other groups of layers: {namespace.layouts}")
        there = {
            (shard.group if shard else None, chunk)
            for chunk, shard in (parse_name(entry.name) for entry in stores[0].storage.list())
        }
        for store in stores:
            window, buffer = (
                kind_of(store.layout),
                StagingBuffer(store.layout, store.layout.full, 1),
            )
            for name in sorted(name for group, name in there if group == store.layout.group):
                if name not in known:
                    raise Wrong(f"chunk {name} is stored and no prompt has it")
                if _is_right(store, buffer, *known[name], shape):
                    inventory.good.add((window, name))
                else:
                    inventory.damaged += 1
    return inventory


def _is_right(
    store: Store, buffer: StagingBuffer, key: ChunkKey, chain: Chain, shape: Shape
) -> bool:
    if not store.load([key], buffer.memory).chunks:
        return False
    layers = shape.kinds[kind_of(store.layout)]
    expected = rows(chain.hashes(key.start, key.stop), shape, layers)
    for array, wanted in zip(buffer.arrays, expected, strict=True):
        found = array[0].view(torch.int16).numpy()
        if not np.array_equal(found, wanted.transpose(2, 1, 0, 3)):
            raise Wrong(f"the stored tokens {key.start}..{key.stop} of a prompt are wrong")
    return True
