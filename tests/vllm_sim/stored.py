"""Reads all that is stored back and compares it with what the fake model writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vllm_sim.truth import Chain, rows
from vllm_sim.worker import Wrong
from vua.directory import namespaces, open_store
from vua.keys import ChunkKey, KeyChain, token_ids
from vua.slab import Slab
from vua.store import Store


@dataclass
class Inventory:
    """What a directory holds."""

    chunk_tokens: int
    good: set[str] = field(default_factory=set)
    """Names of the chunks that are right."""
    damaged: int = 0

    @property
    def chunks(self) -> int:
        """How many chunks are right."""
        return len(self.good)

    def leading(self, chain: Chain) -> int:
        """How many leading chunks of a prompt are stored."""
        count = 0
        for key in keys_of(chain, self.chunk_tokens):
            if key.name not in self.good:
                break
            count += 1
        return count


def keys_of(chain: Chain, chunk_tokens: int) -> list[ChunkKey]:
    """The names of a prompt's chunks."""
    extras = {0: [("salt", chain.salt.encode())]} if chain.salt else {}
    keys = KeyChain(token_ids(chain.prompt), chunk_tokens, extras)
    return keys.first(len(keys))


def take_inventory(root: Path, chunk_tokens: int, chains: Sequence[Chain]) -> Inventory:
    """Read every stored chunk. Raises Wrong for one with a wrong value or an unknown name."""
    known = {key.name: (key, chain) for chain in chains for key in keys_of(chain, chunk_tokens)}
    inventory = Inventory(chunk_tokens)
    for namespace in namespaces(root):
        store = open_store(root, namespace.identity) if namespace.identity else None
        if store is None:
            raise Wrong(f"{namespace.path} is not described")
        slab = Slab(store.layout, store.layout.full, 1)
        for name in sorted({name for name, _, _ in store.storage.scan()}):
            if name not in known:
                raise Wrong(f"chunk {name} is stored and no prompt has it")
            if _is_right(store, slab, *known[name]):
                inventory.good.add(name)
            else:
                inventory.damaged += 1
    return inventory


def _is_right(store: Store, slab: Slab, key: ChunkKey, chain: Chain) -> bool:
    if not store.load([key], slab.memory).chunks:
        return False
    expected = rows(chain.hashes(key.start, key.stop))
    for (data, shape), wanted in zip(slab.arrays(0), expected, strict=True):
        found = data.view(np.int16).reshape(shape)
        if not np.array_equal(found, wanted.transpose(2, 1, 0, 3)):
            raise Wrong(f"the stored tokens {key.start}..{key.stop} of a prompt are wrong")
    return True
