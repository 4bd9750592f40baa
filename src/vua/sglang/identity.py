"""What an SGLang engine's K and V depend on: the identity of its caches, and their layouts.

The identity is computed from the served model's files, so a model served by other engines in the
same dtype has the same one. Anything else that affects the engine's results counts, too, unless it
is listed as harmless (`vua.sglang.computation`): such an engine has its own namespace.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import sglang
from packaging.version import InvalidVersion, Version
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import PoolName

from vua.connector.cache_spec import Group, UncachedError, division, local_directory
from vua.errors import ConfigError
from vua.format.identity import Identity, config_digest, rope_order, varies_with_length
from vua.format.layout import KVLayout, Shard
from vua.format.shared_config import unshared
from vua.serdes import DTYPES
from vua.sglang.computation import (
    attention_that_counts,
    foreign_code,
    settings_that_count,
    variables_that_count,
)
from vua.weights.files import code_digest

__all__ = ["CacheDescription", "described", "settings_that_count", "shard_of"]

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_KINDS: Final = ("BF16", "F16", "F32")
_ELSEWHERE: Final = "weights, or K and V, come from another process, which is unknown"
_ONLY: Final[Mapping[str, tuple[object, ...]]] = {
    "weight_cache_mode": ("off",),
    "disaggregation_mode": ("null", "prefill"),
    "enable_pd_role_switch": (False,),
    "enable_lmcache": (False,),
    "enable_flexkv": (False,),
    "enable_unified_cache_external_linker": (False,),
}
"""Arguments, and the values with which an engine computes everything that it stores."""
_LOAD_FORMATS: Final = ("auto", "safetensors")
"""Those that load the files which `vua.weights.checkpoint_files` names."""


class CacheDescription(NamedTuple):
    """An engine's caches, without their weights, which take longer to identify."""

    identity: Identity
    groups: dict[str, Group]
    """By the pool of SGLang's that holds these layers; the one of all tokens first."""


def described(
    runner: Any,
    pools: Mapping[str, Any],
    *,
    latent: bool,
    epoch: str,
    adapters: Mapping[str, str],
) -> CacheDescription:
    """Describe the caches that a model runner of SGLang computes and its host pools hold.

    Args:
        runner: SGLang's ``ModelRunner``.
        pools: the host pools, by SGLang's names: ``kv``, and ``swa`` if layers with a sliding
            window have a pool that holds only the window.
        latent: whether it is one of latents (MLA).
        epoch: the setting.
        adapters: `vua.sglang.engine.Engine.adapters`.

    Raises:
        UncachedError: caches of this engine cannot be shared or cannot be distinguished.
        ConfigError: the model's code cannot be identified.
        OSError: a file cannot be read.
    """
    arguments, models = runner.server_args, runner.model_config
    directory = local_directory(arguments.model_path, arguments.revision, arguments.download_dir)
    kind = type(models.hf_config)  # read anew: SGLang adds to the one that it has
    whole = kind.from_pretrained(directory, local_files_only=True)
    text = whole.get_text_config()
    pool = pools[PoolName.KV]
    dtype = _dtype(pool)
    _check_supported(arguments, models, text is whole)
    config = dict(text.to_dict())
    own = {
        "vua.sglang": settings_that_count(arguments, directory),
        "vua.sglang_environment": variables_that_count(os.environ),
        "vua.sglang_kernels": attention_that_counts(runner),
        "vua.sglang_code": foreign_code(runner),
    }
    config |= {name: each for name, each in own.items() if each}
    if (build := _build()) is not None:
        config["vua.sglang_build"] = build
    if adapters:
        config["vua.sglang_adapters"] = dict(adapters)
    if runner.dtype != pool.dtype:
        config["vua.sglang_dtype"] = str(runner.dtype)
    if models.quantization is not None:
        config["vua.sglang_quantization"] = str(models.quantization)
    rope = rope_order(text.model_type)
    if varies_with_length(config):  # SGLang chooses the frequencies once, by this length
        config["vua.sglang_context_length"] = models.context_len
    if arguments.trust_remote_code and (code := _code(text, directory)):
        config["vua.code"] = code
    if unshared(config):  # others may compute something else
        config["vua.engine"] = ["sglang", *(whole.architectures or [])]
    groups = _groups(runner, pools, dtype, latent=latent)
    config |= division(list(groups.values()))
    identity = Identity(
        model=config_digest(config),
        kv_dtype=dtype,
        rope=rope,
        epoch=epoch,
        chunk_tokens=pool.page_size,
        name=_name(arguments.model_path, directory),
    )
    return CacheDescription(identity, groups)


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
        msg = (
            f"rank {rank} of {ranks} holds {pool.layer_num} layers, of the model's {layers.start} "
            f"to {layers.stop}, and {held} heads of a model with {layout.layers} such layers and "
            f"{heads} KV heads"
        )
        raise UncachedError(msg)
    before = rank > 0 and (rank - 1) * heads // ranks == first
    writes = rank == 0 if latent else heads >= ranks or not before
    return Shard(start, stop, first, first + held, layout.group), writes


def _groups(
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
        msg = "a model with latents (MLA) and sliding windows is not supported"
        raise UncachedError(msg)
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


def _dtype(pool: Any) -> str:
    name = _NAMES.get(pool.dtype)
    if name not in _KINDS:
        msg = f"a KV cache of {pool.dtype} is not supported; use one of {', '.join(_KINDS)}"
        raise UncachedError(msg)
    return str(name)


def _build() -> str | None:
    """Return the version of a custom build of SGLang; None: it is a release."""
    try:
        released = Version(sglang.__version__).local is None
    except InvalidVersion:
        released = False
    return None if released else str(sglang.__version__)


def _check_supported(arguments: Any, models: Any, is_text: bool) -> None:  # noqa: FBT001
    """Raise UncachedError for engines whose caches depend on information that a backend lacks."""
    for name, only in _ONLY.items():
        if getattr(arguments, name) not in only:
            msg = f"{name}={getattr(arguments, name)!r}: {_ELSEWHERE}"
            raise UncachedError(msg)
    if envs.SGLANG_USE_MODELSCOPE.get() and not Path(arguments.model_path).exists():
        msg = (
            "SGLANG_USE_MODELSCOPE: it is unknown which files were loaded; serve a local directory"
        )
        raise UncachedError(msg)
    if arguments.load_format not in _LOAD_FORMATS:
        msg = f"load_format {arguments.load_format!r}: it is unknown which weights it loads"
        raise UncachedError(msg)
    if not is_text or getattr(models, "is_multimodal", False):
        msg = "models that take images or sounds are not cached: SGLang names these by 30 bits"
        raise UncachedError(msg)


def _code(text: Any, directory: Path) -> list[str]:
    """Return digests of the Python code among the model's own files."""
    named = getattr(text, "auto_map", None) or {}
    if not named:
        return []
    if elsewhere := sorted({str(each) for each in named.values() if "--" in str(each)}):
        msg = f"the model runs code of another repository ({elsewhere[0]})"
        raise ConfigError(msg)
    return [code_digest(directory)]


def _name(path: str, directory: Path) -> str:
    return directory.resolve().name if Path(path).is_dir() else path
