"""Users' tokens and KV caches: split into sequences, checked, and mapped to memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from vua.errors import InputError
from vua.format.keys import ChunkKey, token_ids
from vua.format.layout import KVLayout, Shard
from vua.io.memory import BufferPool
from vua.native import MemoryMap
from vua.serdes import DTYPE_NAMES, DTYPES
from vua.store.store import Store

KVCache = Sequence[Sequence[torch.Tensor]]
"""``[layer][0: K, 1: V]``, each ``(batch, heads, tokens, head_dim)``."""


class Sequences(NamedTuple):
    """Single sequences: their ids as u32 bytes, and the tensors that answers are cut from."""

    ids: list[bytes]
    rows: list[torch.Tensor]
    listed: bool


def sequences(tokens: torch.Tensor | Sequence[torch.Tensor] | Sequence[int]) -> Sequences:
    """Split the tokens of one or several sequences. Raises InputError."""
    if isinstance(tokens, torch.Tensor):
        if tokens.ndim not in (1, 2):
            msg = f"tokens of shape {tuple(tokens.shape)}; expected (T,), (1, T) or (B, T)"
            raise InputError(msg)
        if tokens.ndim == 2 and tokens.shape[0] != 1:
            rows = list(tokens)
            return Sequences([token_ids(row) for row in rows], rows, listed=True)
        return Sequences([token_ids(tokens)], [tokens], listed=False)
    if isinstance(tokens, Sequence) and len(tokens) and isinstance(tokens[0], int):
        ids = token_ids(tokens)  # type: ignore[arg-type] # which looks at each
        row = torch.from_numpy(np.frombuffer(ids, dtype="<u4").astype(np.int64))
        return Sequences([ids], [row], listed=False)
    if not isinstance(tokens, Sequence) or isinstance(tokens, str | bytes):
        raise InputError(
            "tokens must be an integer tensor, a sequence of int, or a list of such, found "
            f"{type(tokens).__name__}; torch.as_tensor() makes one of an array"
        )
    parts = [sequences(row) for row in tokens]  # type: ignore[arg-type] # each is checked
    if any(part.listed for part in parts):
        msg = "a list of sequences must hold one sequence per item, found a batch inside it"
        raise InputError(msg)
    return Sequences([part.ids[0] for part in parts], [part.rows[0] for part in parts], listed=True)


class Cache:
    """One sequence's KV cache as given: checked, and mapped to memory."""

    def __init__(self, kvcache: Any, row: int, rows: int) -> None:
        layers = [list(pair) for pair in kvcache]
        if not layers or any(len(pair) != 2 for pair in layers):
            msg = "a KV cache is a list of layers, each [K, V]; found " + (
                f"layers of {sorted({len(pair) for pair in layers})} tensors" if layers else "none"
            )
            raise InputError(msg)
        for number, (k, v) in enumerate(layers):
            for name, tensor in (("K", k), ("V", v)):
                if not isinstance(tensor, torch.Tensor) or tensor.ndim != 4:
                    shape = tuple(getattr(tensor, "shape", ()))
                    raise InputError(
                        f"{name} of layer {number} is a {type(tensor).__name__} of shape {shape}; "
                        "expected a tensor (batch, heads, tokens, head_dim)"
                    )
                if tensor.shape[0] != rows:
                    msg = f"{name} of layer {number}: batch {tensor.shape[0]}, tokens have {rows}"
                    raise InputError(msg)
        self.arrays = [[pair[array].detach()[row] for pair in layers] for array in (0, 1)]
        for array, name in zip(self.arrays, "KV", strict=True):
            if len({(t.shape, t.dtype) for t in array}) != 1:
                seen = sorted({f"{tuple(t.shape)} {t.dtype}" for t in array})
                msg = f"{name} differs between layers: {', '.join(seen)}; expected one shape"
                raise InputError(msg)
        k, v = self.arrays[0][0], self.arrays[1][0]
        if k.shape[:2] != v.shape[:2] or k.dtype != v.dtype:
            raise InputError(
                f"K {tuple(k.shape)} {k.dtype} and V {tuple(v.shape)} {v.dtype} differ in heads, "
                "tokens or dtype; expected [K, V] of one layer of one prompt"
            )
        self.length: int = k.shape[1]

    def layout(self, chunk_tokens: int) -> KVLayout:
        k, v = self.arrays[0][0], self.arrays[1][0]
        if k.dtype not in DTYPE_NAMES:
            msg = f"KV caches of {k.dtype} are not supported; expected one of {list(DTYPE_NAMES)}"
            raise InputError(msg)
        return KVLayout(
            layers=len(self.arrays[0]),
            kv_heads=k.shape[0],
            k_dim=k.shape[2],
            v_dim=v.shape[2],
            dtype=DTYPE_NAMES[k.dtype],
            chunk_tokens=chunk_tokens,
        )

    def rows(self, shard: Shard, tokens: range) -> list[torch.Tensor]:
        """Return K and V of one layer and head, ``[1, 1, tokens, dim]``, without empty V."""
        place = (shard.head_start, slice(tokens.start, tokens.stop))
        cut = [array[shard.layer_start][place] for array in self.arrays]
        return [one.cpu()[None, None] for one in cut if one.shape[-1]]

    def memory(self, chunk_tokens: int) -> MemoryMap:
        """Return where the bytes lie: in the tensors themselves if their rows are contiguous."""
        # resolve_neg: a negative view is a flag on the bytes of another tensor
        arrays = [[t.cpu().resolve_neg() for t in a] for a in self.arrays if a[0].shape[2]]
        for array in arrays:
            strides = {t.stride() for t in array}
            dim = array[0].shape[2]
            if len(strides) != 1 or array[0].stride()[1:] != (dim, 1):
                array[:] = [t.contiguous() for t in array]
        return memory_map(arrays, chunk_tokens)


def sequences_with_caches(
    tokens: torch.Tensor | Sequence[torch.Tensor] | Sequence[int],
    kvcache: KVCache | Sequence[KVCache],
    chunk_tokens: int,
) -> tuple[list[bytes], list[Cache]]:
    """Split tokens and their KV caches: each sequence's ids as u32 bytes, and its cache.

    A list of sequences has a list of caches, a tensor of tokens one cache of as many rows. Raises
    InputError, also if a sequence is not whole chunks.
    """
    batch = sequences(tokens)
    if isinstance(tokens, torch.Tensor) or not batch.listed:
        caches = [Cache(kvcache, row, len(batch.ids)) for row in range(len(batch.ids))]
    else:
        if len(kvcache) != len(batch.ids):
            msg = f"{len(batch.ids)} sequences need as many KV caches, found {len(kvcache)}"
            raise InputError(msg)
        caches = [Cache(one, 0, 1) for one in kvcache]
    for ids, cache in zip(batch.ids, caches, strict=True):
        length = len(ids) // 4
        if length % chunk_tokens:
            raise InputError(
                f"{length} tokens are not a multiple of split_factor {chunk_tokens}; use "
                "VUAConfig.trim_to_split_factor() and cut the KV cache to the same length"
            )
        if cache.length != length:
            msg = f"{length} tokens need K and V of {length} tokens, found {cache.length}"
            raise InputError(msg)
    return batch.ids, caches


def stored_rows(store: Store, key: ChunkKey, shard: Shard) -> list[torch.Tensor] | None:
    """Load one stored layer and head, as :meth:`Cache.rows` returns it.

    None if it cannot be loaded, e.g. because it is damaged or was evicted meanwhile.
    """
    layout = store.layout
    shape, dtype = (1, layout.chunk_tokens), DTYPES[layout.dtype]
    arrays = [[torch.empty((*shape, dim), dtype=dtype)] for dim in layout.dims]
    loaded = store.load([key], memory_map(arrays, layout.chunk_tokens), target=shard)
    return [one[None] for (one,) in arrays] if loaded.chunks else None


def allocate(
    layout: KVLayout, chunks: int, buffers: BufferPool, *, pinned: bool
) -> list[list[torch.Tensor]]:
    """Return tensors ``[K, V][layer]``, each (heads, tokens, head_dim), of one (pinned) buffer."""
    shape = (layout.layers, layout.kv_heads, chunks * layout.chunk_tokens)
    dtype = DTYPES[layout.dtype]
    if pinned:  # torch pools such memory itself
        whole = [torch.empty((*shape, dim), dtype=dtype, pin_memory=True) for dim in layout.dims]
        return [list(array) for array in whole]
    sizes = [math.prod((*shape, dim)) * dtype.itemsize for dim in layout.dims]
    memory, start, arrays = torch.from_numpy(buffers.take(sum(sizes))), 0, []
    for dim, nbytes in zip(layout.dims, sizes, strict=True):
        array = memory[start : start + nbytes].view(dtype).view(*shape, dim)
        arrays.append(list(array))
        start += nbytes
    return arrays


def memory_map(arrays: list[list[torch.Tensor]], segment_tokens: int) -> MemoryMap:
    """Map tensors ``[K, V][layer]``, each (heads, tokens, head_dim) with contiguous rows."""
    tokens = arrays[0][0].shape[1]
    segments = np.arange(max(tokens // max(segment_tokens, 1), 1), dtype=np.uint64)
    return MemoryMap(
        base=tuple(np.array([t.data_ptr() for t in array], dtype=np.uint64) for array in arrays),
        head_stride=tuple(array[0].stride(0) * array[0].element_size() for array in arrays),
        segment_offset=tuple(
            segments * np.uint64(segment_tokens * array[0].shape[2] * array[0].element_size())
            for array in arrays
        ),
        segment_tokens=segment_tokens,
        owner=arrays,
    )
