"""Which rectangle of the model each worker holds, as vLLM cuts a model among them."""

from __future__ import annotations

from vua.format.layout import KVLayout, Shard

__all__ = ["worker_shards"]


def worker_shards(layout: KVLayout, *, pp_size: int, tp_size: int) -> tuple[tuple[Shard, ...], ...]:
    """Return the rectangle that each worker holds, ``[pp rank][tp rank]``, as vLLM cuts a model."""
    rows = []
    for pp_rank in range(pp_size):
        first, last = _layer_range(layout.layers, pp_rank, pp_size)
        ranges = [_head_range(layout.kv_heads, tp_rank, tp_size) for tp_rank in range(tp_size)]
        rows.append(tuple(Shard(first, last, *heads, group=layout.group) for heads in ranges))
    return tuple(rows)


def _layer_range(layers: int, rank: int, size: int) -> tuple[int, int]:
    from vllm.distributed.utils import get_pp_indices

    first, last = get_pp_indices(layers, rank, size)
    return first, last


def _head_range(heads: int, rank: int, size: int) -> tuple[int, int]:
    """The KV heads of a tensor-parallel rank; ranks share a head where there are too few."""
    if heads >= size:
        each = heads // size
        return rank * each, (rank + 1) * each
    head = rank * heads // size
    return head, head + 1
