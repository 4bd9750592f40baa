"""A cache directory of which every right byte is known, for campaigns that do harm to it.

The content of a chunk is drawn from a generator seeded with the chunk's own name. So any process
can write it, any other can judge it, and prompts that share a prefix have the same bytes there.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

import numpy as np
import torch

from vua.capacity.limits import Limits
from vua.capacity.removal import Collection
from vua.capacity.spaces import GRACE_S, TRASH
from vua.catalog.collect import bring_within
from vua.catalog.opening import open_catalog
from vua.format.identity import Identity
from vua.format.keys import ChunkKey, KeyChain, token_ids
from vua.format.layout import KVLayout
from vua.io.buffers import BufferPool
from vua.storage.base import WRITTEN
from vua.storage.mark import UPKEEP
from vua.storage.names import SUFFIX, TEMPORARY
from vua.store.namespace import Namespace
from vua.store.store import Store
from vua.store.tensors import allocate, memory_map
from vua.store.writer import EntryWriter

ROOMY: Final = Limits(max_bytes="1T", min_free_bytes=0)
"""Bounds that nothing in a test reaches."""


class WrongBytesError(AssertionError):
    """A reader got bytes that nobody put: the one thing that must never happen."""


def layout_of(file_nbytes: int, *, chunk_tokens: int = 8) -> KVLayout:
    """Return a layout of 2 layers whose chunk files have about ``file_nbytes`` bytes of payload."""
    heads = max(1, file_nbytes // (2 * 2 * chunk_tokens * 64 * 4))
    return KVLayout(2, heads, 64, 64, "I32", chunk_tokens)


class World:
    """Some prompts of a made-up model in a directory; see the module. For one thread at a time."""

    def __init__(
        self,
        root: Path,
        layout: KVLayout,
        *,
        prompts: int = 3,
        chunks: int = 3,
        bounds: Limits = ROOMY,
        durable: bool = False,
    ) -> None:
        """Prepare ``prompts`` prompts of ``chunks`` chunks; writes nothing.

        Prompts 2n and 2n + 1 share their first third (at least a chunk).
        """
        self.root, self.layout, self.bounds, self.durable = root, layout, bounds, durable
        self.identity = Identity(
            model=f"world {layout.kv_heads}", chunk_tokens=layout.chunk_tokens, name="world"
        )
        self.keys = [self._keys(number, chunks) for number in range(prompts)]
        self._content: dict[str, list[list[torch.Tensor]]] = {}

    def _keys(self, number: int, chunks: int) -> list[ChunkKey]:
        size, shared = self.layout.chunk_tokens, max(1, chunks // 3)
        tokens = np.arange(chunks * size) + 100_000 * (number + 1)
        tokens[: shared * size] = np.arange(shared * size) + 7 * (number // 2)
        chain = KeyChain(token_ids(torch.from_numpy(tokens)), size)
        return [chain[place] for place in range(chunks)]

    @property
    def prompts(self) -> range:
        return range(len(self.keys))

    def content(self, key: ChunkKey) -> list[list[torch.Tensor]]:
        """The right bytes of a chunk: ``[K, V][layer]``, each ``[heads, tokens, dim]``."""
        found = self._content.get(key.name)
        if found is None:
            layout = self.layout
            generator = np.random.default_rng(int(key.name[:16], 16))
            shape = (2, layout.layers, layout.kv_heads, layout.chunk_tokens, layout.k_dim)
            drawn = torch.from_numpy(generator.integers(0, 1 << 31, shape, dtype=np.int32))
            found = self._content[key.name] = [list(array) for array in drawn]
        return found

    # -- what is done to it ---------------------------------------------------------------------

    def writer(self) -> Store:
        """Open the namespace for writing, as an engine's process would. Raises VUAError."""
        return Namespace.create(
            self.root, self.identity, [self.layout], durable=self.durable, bounds=self.bounds
        ).stores[0]

    def put(self, number: int, store: Store | None = None) -> int:
        """Put a prompt; return how many chunks were written. Raises VUAError."""
        with contextlib.ExitStack() as stack:
            if store is None:
                store = self.writer()
                stack.callback(store.close)
            keys = self.keys[number]
            stored = store.lookup(keys)
            store.used(keys, stored, wait=True)
            size = self.layout.chunk_tokens
            statuses = [
                EntryWriter(store, memory_map(self.content(key), size)).save([key]) for key in keys
            ]
            return statuses.count([WRITTEN])

    def get(self, number: int, store: Store | None = None) -> int:
        """Return how many chunks of a prompt can be had. Raises WrongBytesError, nothing else."""
        with contextlib.ExitStack() as stack:
            if store is None:
                with contextlib.suppress(OSError):  # as `VUA.get_closest` does
                    namespace = Namespace.open(self.root / self.identity.namespace)
                    store = namespace.stores[0] if namespace else None
                if store is None:
                    return 0
                stack.callback(store.close)
            keys = self.keys[number]
            found = store.lookup(keys)
            arrays = allocate(self.layout, found, BufferPool(0), pinned=False) if found else []
            if not found:
                return 0
            loaded = store.load(keys[:found], memory_map(arrays, self.layout.chunk_tokens))
        self.judge(keys[: loaded.chunks], arrays)
        return loaded.chunks

    def judge(self, keys: list[ChunkKey], arrays: list[list[torch.Tensor]]) -> None:
        """Compare what was loaded with what is right. Raises WrongBytesError."""
        size = self.layout.chunk_tokens
        for place, key in enumerate(keys):
            for got, right in zip(arrays, self.content(key), strict=True):
                for layer, (mine, theirs) in enumerate(zip(got, right, strict=True)):
                    span = mine[:, place * size : (place + 1) * size]
                    if not np.array_equal(span.numpy(), theirs.numpy()):
                        raise WrongBytesError(f"chunk {key.name[:12]} (place {place}, {layer=})")

    # -- what is left of it ---------------------------------------------------------------------

    def check(self) -> list[int]:
        """Read everything; return the chunks found per prompt. Raises WrongBytesError."""
        return [self.get(number) for number in self.prompts]

    def heal(self) -> None:
        """Put every prompt again; afterwards all of it is there. Raises AssertionError if not."""
        before, self.bounds = self.bounds, ROOMY
        try:
            for number in self.prompts:
                self.put(number)
        finally:
            self.bounds = before
        found, wanted = self.check(), [len(keys) for keys in self.keys]
        if found != wanted:
            raise AssertionError(f"after putting everything again {found} of {wanted} are there")

    def leftovers(self) -> list[str]:
        """Paths of what no reader will ever look at: temporary and half-deleted things."""
        found = []
        for path in self.root.rglob("*"):
            is_lease = path.parent.name == UPKEEP and path.name.startswith("search-")
            if is_lease or path.name.startswith((TEMPORARY, TRASH)):
                found.append(path)
            elif len(path.name) == 64 and len(path.parent.name) == 2:
                names = [below.name for below in path.iterdir()] if path.is_dir() else []
                if not any(name.endswith(SUFFIX) or name.startswith(TEMPORARY) for name in names):
                    found.append(path)
        return [str(path.relative_to(self.root)) for path in found]

    def age(self, seconds: float = 2 * GRACE_S) -> None:
        """Let everything in the directory look older, by setting its times back."""
        paths = [self.root, *self.root.rglob("*")]
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                stamp = path.lstat().st_mtime_ns - int(seconds * 1e9)
                os.utime(path, ns=(stamp, stamp), follow_symlinks=False)

    def collect(self) -> Collection:
        catalog = open_catalog(str(self.root))
        return bring_within(catalog, lambda: catalog.limits(self.bounds, catalog.bounds()))

    def sweep(self) -> None:
        """Age what is left and collect once. Raises AssertionError where that leaves anything."""
        self.age()
        self.collect()
        left = self.leftovers()
        if left:
            raise AssertionError(f"one collection left behind {left[:5]}")
