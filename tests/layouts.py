"""Layouts, and any shards of them."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from vua.format.layout import KVLayout, Shard

SMALL = KVLayout(layers=3, kv_heads=4, k_dim=8, v_dim=4, dtype="BF16", chunk_tokens=4)

# Extents of 32 KiB and 16 KiB: checksum blocks of 4 layers.
DEEP = KVLayout(layers=11, kv_heads=2, k_dim=64, v_dim=32, dtype="F32", chunk_tokens=128)


def shards(layers: int, heads: int) -> st.SearchStrategy[Shard]:
    """Any rectangle in a model of this size."""
    edges = st.tuples(
        st.tuples(st.integers(0, layers), st.integers(0, layers)),
        st.tuples(st.integers(0, heads), st.integers(0, heads)),
    )
    return edges.map(lambda e: Shard(min(e[0]), max(e[0]), min(e[1]), max(e[1]))).filter(
        lambda shard: shard.layers > 0 and shard.heads > 0
    )


def cells(shard: Shard) -> set[tuple[int, int]]:
    return set(
        itertools.product(
            range(shard.layer_start, shard.layer_stop), range(shard.head_start, shard.head_stop)
        )
    )
