"""The layers and heads that SGLang's host pools hold, in the terms of `vua.format.layout`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sglang.srt.mem_cache.hicache_storage import PoolName

from vua.connector.cache_spec import Group, UncachedError
from vua.format.layout import KVLayout, Shard
from vua.serdes import DTYPE_NAMES

_KINDS: Final = ("BF16", "F16", "F32")


def groups_of(
    runner: Any,
    pools: Mapping[str, Any],
    dtype: str,
    *,
    latent: bool,
) -> dict[str, Group]:
    """Return the layers that each pool holds, all ranks' together."""
    models = runner.model_config
    if PoolName.SWA not in pools:
        layers = range(models.num_hidden_layers)
        heads = 1 if latent else models.get_total_num_kv_heads()
        return {PoolName.KV: _group(layers, pools[PoolName.KV], heads, dtype, latent=latent)}
    if latent:
        raise UncachedError("a model with latents (MLA) and sliding windows is not supported")
    kept = _group(
        models.full_attention_layer_ids,
        pools[PoolName.KV],
        models.get_total_num_kv_heads(),
        dtype,
    )
    window = _group(
        models.swa_attention_layer_ids,
        pools[PoolName.SWA],
        models.get_swa_num_kv_heads(1),
        dtype,
        # SGLang counts the tokens before the one that attends
        name=f"w{runner.sliding_window_size + 1}",
        table=1,
    )
    return {PoolName.KV: kept, PoolName.SWA: window}


def _group(
    layers: Sequence[int],
    pool: Any,
    heads: int,
    dtype: str,
    *,
    latent: bool = False,
    name: str = "",
    table: int = 0,
) -> Group:
    layout = KVLayout(
        layers=len(layers),
        kv_heads=heads,
        k_dim=pool.kv_cache_dim if latent else pool.head_dim,
        v_dim=0 if latent else pool.v_head_dim,
        dtype=dtype,
        chunk_tokens=pool.page_size,
        group=name,
    )
    return Group(layout, tuple(layers), ((layout.full,),), (table,))


def dtype_of(pool: Any) -> str:
    """Return the safetensors name of a pool's dtype. Raises UncachedError."""
    name = DTYPE_NAMES.get(pool.dtype)
    if name not in _KINDS:
        msg = f"a KV cache of {pool.dtype} is not supported; use one of {', '.join(_KINDS)}"
        raise UncachedError(msg)
    return str(name)


def shard_of(
    group: Group,
    layers: range,
    pool: Any,
    rank: int,
    ranks: int,
) -> tuple[Shard, bool]:
    """Return the rectangle that a rank's pool holds, and whether this rank writes it.

    Ranks share a head if there are fewer heads than ranks, and always a latent; then the first of
    them writes.

    Args:
        group: the layers that such pools hold on all ranks together.
        layers: the model's layers that this rank computes.
        pool: this rank's host pool.
        rank: its number among those of tensor parallelism.
        ranks: how many of these there are.

    Raises UncachedError: the pool holds other layers or heads than a rank of this size should.
    """
    layout, heads = group.layout, group.layout.kv_heads
    latent = not layout.v_dim
    each = max(1, heads // ranks)
    first = 0 if latent else rank * heads // ranks
    held = 1 if latent else pool.head_num
    start, stop = (
        sum(layer < edge for layer in group.layers) for edge in (layers.start, layers.stop)
    )
    whole = stop - start == pool.layer_num == pool.target_layer_num
    whole = whole and not getattr(pool, "_layer_shard_enabled", False)
    if not whole or (not latent and held != each) or first + held > heads:
        raise UncachedError(
            f"rank {rank} of {ranks} holds {pool.layer_num} layers, of the model's {layers.start} "
            f"to {layers.stop}, and {held} heads of a model with {layout.layers} such layers and "
            f"{heads} KV heads"
        )
    before = rank > 0 and (rank - 1) * heads // ranks == first
    writes = rank == 0 if latent else heads >= ranks or not before
    return Shard(start, stop, first, first + held, layout.group), writes
