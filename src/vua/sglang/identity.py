"""What an SGLang engine's K and V depend on: the identity of its caches, their layouts, its setup.

The identity is computed from the served model's files, and from all arguments and environment
variables that are in no table of ``excluded.json``, each with its reason there. Those that a new
release adds count: that costs hits, never a wrong hit. A test walks those of the release that VUA
knows. A value without a canonical form is refused, and so is a file's name.

Code is part of the setup (`vua.connector.setup`), not of the identity: engines that run other code
compare. But one that runs other code than SGLang's has a namespace of its own. It is named by the
code, so a server that runs the same finds it. Hooks may hold anything: such an engine's namespace
ends with its process.

:class:`Engine` is the SGLang engine that owns the backend: its model, its settings, and changes of
its weights. SGLang passes a backend neither. The backend is created on the scheduler's thread, at
the start or when it is attached later, so the scheduler is found on the call stack. If it is not
found nothing is cached, since the weights would be unknown.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.plugins.hook_registry import HookRegistry

from vua.connector.cache_spec import Group, Model, UncachedError, division, local_directory
from vua.connector.log import logger
from vua.connector.setup import Engine as SetupOf
from vua.connector.setup import (
    code_of,
    in_text,
    is_installed,
    joined,
    setting_form,
    settings_digest,
)
from vua.connector.weights_watch import Snapshot
from vua.errors import ConfigError
from vua.format.identity import (
    NOT_COMPUTED,
    Identity,
    listed,
    named_by,
    rope_order,
    tables_of,
    varies_with_length,
)
from vua.format.layout import KVLayout, Shard
from vua.serdes import DTYPE_NAMES
from vua.sglang.session import Part, Pools
from vua.sglang.transfers import HostPages
from vua.weights import process_began_s
from vua.weights.fingerprint import code_digest

log = logger("worker")

_UPDATES: Final = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
    "end_weight_update",
)
"""The methods by which a model runner of SGLang gets new weights; other changes are seen in
memory."""


def passes_prefix_keys() -> bool:
    """Whether SGLang passes this backend, which is being created, the pages before each page."""
    name = "hicache_storage_pass_prefix_keys"
    return any(frame.f_locals.get(name) is True for frame in _callers())


class Engine:
    """The engine that creates a backend, watched from its start on. Thread-safe."""

    def __init__(self, runner: Any) -> None:
        """Watch SGLang's model runner; :meth:`find` calls this. Raises UncachedError."""
        self.runner: Any = runner
        self.loaded_s = process_began_s()
        """When the weights' loading began at the earliest, in seconds since the epoch."""
        self._snapshot, self._left = Snapshot(runner.model), False
        updater = runner.weight_updater
        if missing := [name for name in _UPDATES if not hasattr(updater, name)]:
            msg = f"SGLang's weight updater has no {missing[0]}: updates could not be noticed"
            raise UncachedError(msg)
        runner.weight_updater = _Updater(updater, self)

    @classmethod
    def find(cls) -> Engine:
        """Return the engine that is creating a backend right now.

        Raises UncachedError: it is not found; or it is running already and was not watched, so that
        its weights may have changed since its start.
        """
        runner: Any = None
        starting = False
        for frame in _callers():
            worker = getattr(frame.f_locals.get("self"), "tp_worker", None)
            runner = getattr(worker, "model_runner", None)
            if callable(getattr(getattr(runner, "model", None), "modules", None)):
                starting = frame.f_code.co_name == "__init__"
                break
        else:
            msg = "SGLang did not create this backend in its scheduler: its model cannot be found"
            raise UncachedError(msg)
        if isinstance(watched := runner.weight_updater, _Updater):
            return watched.vua_engine
        if not starting:
            raise UncachedError(
                "VUA was attached to a running server, whose weights may have been updated before; "
                "start SGLang with VUA, then it can be detached and attached again"
            )
        return cls(runner)

    def proof(self) -> Callable[[], bool]:
        """Return a function that checks, on any thread, for still the same weights.

        If so, they have been since this call.
        """
        moment_s = time.monotonic()
        return lambda: not self._left and self._snapshot.still_at(moment_s)

    def unchanged(self) -> bool:
        """Whether the weights are those of the start; checks some of them."""
        if not self._left and not self.proof()():
            self.leave(self._snapshot.differs or "other weights")
        return not self._left

    def leave(self, change: str) -> None:
        """Have nothing loaded or stored any more."""
        if not self._left:
            text = "VUA: the weights change (%s): nothing is loaded or stored until a restart"
            log.warning(text, change)
        self._left = True


class _Updater:
    """SGLang's weight updater: an update, from its start on, ends the use of what is stored."""

    def __init__(self, updater: Any, engine: Engine) -> None:
        self._vua_updater, self.vua_engine = updater, engine

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._vua_updater, name)

        def update(*args: Any, **named: Any) -> Any:
            self.vua_engine.leave(name)
            return found(*args, **named)

        return update if name in _UPDATES else found


def _callers() -> list[FrameType]:
    frames, frame = [], sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return frames


KNOWN: Final = (PoolName.KV, PoolName.SWA)
"""The pools that are stored, in the order of a model's groups."""
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


_TABLES: Final = tables_of("vua.sglang")
EXCLUDED: Final[Mapping[str, Sequence[str]]] = _TABLES["arguments"]
"""Word for the reason, arguments."""
NEUTRAL: Final[Mapping[str, list[Any]]] = {
    name: values for values, names in _TABLES["neutral"] for name in names
}
"""Argument, values with which it adds nothing; a release may change its default."""
FAMILIES: Final = ("SGLANG_", "SGL_")
"""A variable whose name begins like this counts although it is in no table."""
EXCLUDED_VARIABLES: Final[Mapping[str, Sequence[str]]] = _TABLES["variables"]
"""Word for the reason, variables of these families."""
COUNTED_VARIABLES: Final = frozenset(_TABLES["counted_variables"])
"""Variables of no family that count if they are set; the rest do not."""
_EXCLUDED: Final = listed(EXCLUDED)
_EXCLUDED_VARIABLES: Final = listed(EXCLUDED_VARIABLES)


def settings_that_count(arguments: Any, folder: Path | None = None) -> dict[str, Any]:
    """Return the arguments of a server that are neither excluded nor at a neutral value.

    Args:
        arguments: SGLang's ``ServerArgs``.
        folder: the model's, in which files may be named.

    Raises UncachedError: a value has no canonical form, or names a file.
    """
    found = {}
    for name in arguments.__struct_fields__:
        if name in _EXCLUDED:
            continue
        value = getattr(arguments, name)
        if any(type(value) is type(one) and value == one for one in NEUTRAL.get(name, ())):
            continue
        what = f"argument {name}"
        found[name] = setting_form(value, what)
        _check_no_file(found[name], what, folder)
    return found


def variables_that_count(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that may change what an engine computes.

    Raises UncachedError: one names a file.
    """
    found = {}
    for name, value in sorted(environment.items()):
        known = name in COUNTED_VARIABLES or name.startswith(FAMILIES)
        if not known or name in _EXCLUDED_VARIABLES or value == "":
            continue
        found[name] = value
        _check_no_file(value, f"environment variable {name}")
    return found


def _check_no_file(value: Any, what: str, folder: Path | None = None) -> None:
    """Raise UncachedError for a setting that names a file, also within JSON: its content counts."""
    if isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            _check_no_file(each, what, folder)
    if not isinstance(value, str) or not value:
        return
    with suppress(ValueError, RecursionError, OSError):  # no JSON; no file's name
        if value.lstrip().startswith(("{", "[")):
            _check_no_file(json.loads(value), what, folder)
        elif Path(value).exists() or (folder is not None and (folder / value).exists()):
            raise UncachedError(f"SGLang's {what} names {value!r}, whose content is unknown")


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


def pools_of(engine: Engine, pools: Mapping[str, Any], rank_config: Any, *, epoch: str) -> Pools:
    """Describe the caches that an engine computes and a rank's host pools hold.

    Without the weights, which take longer to identify.

    Args:
        engine: whose K and V they hold.
        pools: the host pools, by SGLang's names: ``kv``, and ``swa`` if layers with a sliding
            window have a pool that holds only the window.
        rank_config: SGLang's ``HiCacheStorageConfig``.
        epoch: the setting.

    Raises:
        UncachedError: the pools cannot be stored, shared or distinguished.
        ConfigError: the model's code cannot be identified.
        LayoutError: a pool of no layers, or of more than any model has.
        OSError: a file of the model cannot be read.
    """
    runner, latent, pool = engine.runner, bool(rank_config.is_mla_model), pools[PoolName.KV]
    arguments, models = runner.server_args, runner.model_config
    directory = local_directory(arguments.model_path, arguments.revision, arguments.download_dir)
    kind = type(models.hf_config)  # read anew: SGLang adds to the one that it has
    whole = kind.from_pretrained(directory, local_files_only=True)
    text = whole.get_text_config()
    for name in pools:
        check_name(name)
    _check_supported(arguments, models, rank_config, text is whole)
    if runner.lora_manager is not None:
        raise UncachedError("LoRA adapters: SGLang names their pages by ids, not by their content")
    setup = setup_of(runner, pools.values())
    if setup.epoch:
        log.warning(
            "VUA: beside SGLang's own code this engine runs %s: it has a namespace of its own, "
            "epoch %s",
            *(", ".join(setup.unusual[:3]), epoch := f"{epoch}+{setup.epoch}"),
        )
    groups = groups_of(runner, pools, dtype_of(pool), latent=latent)
    config = dict(text.to_dict())
    config |= _counted(runner, pool, directory, config)
    if arguments.enable_deterministic_inference:  # equal bit by bit
        config["vua.sglang_setup"] = setup.digest
    if arguments.trust_remote_code and (code := _code(text, directory)):
        config["vua.code"] = code
    config |= division(list(groups.values()))
    rope = rope_order(text.model_type)
    own, vllm = (
        Identity.of_config(
            named_by(one, config),
            kv_dtype=dtype_of(pool),
            rope=rope,
            epoch=epoch,
            chunk_tokens=pool.page_size,
            name=_name(arguments.model_path, directory),
        )
        for one in ("sglang", "vllm")
    )
    alike = len(groups) == 1 and bool(rope) and not latent
    alike = alike and not any(key.startswith("vua.sglang") for key in config)
    layers = range(runner.layer_info.start_layer, runner.layer_info.end_layer)
    parts = {}
    for name, group in groups.items():
        shard, writes = shard_of(
            *(group, layers, pools[name]), rank_config.tp_rank, rank_config.tp_size
        )
        pages = HostPages(pools[name], latent=latent)
        parts[name] = Part(replace(group, shards=((shard,),)), pages, writes)
    held = tuple(part.group for part in parts.values())
    blocks = tuple(group.layout.chunk_tokens for group in held)
    model = Model(own, held, blocks, models.quantization is not None, identified=False)
    return Pools(parts, model, setup.digest, vllm if alike else None)


def _counted(runner: Any, pool: Any, directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what counts beside the model's own config."""
    arguments, models = runner.server_args, runner.model_config
    longest = config.get("max_position_embeddings")
    past = isinstance(longest, int) and models.context_len > longest  # its table of rotations ends
    found = {
        "": settings_that_count(arguments, directory),
        "_environment": variables_that_count(os.environ),
        "_dtype": None if runner.dtype == pool.dtype else str(runner.dtype),
        "_quantization": models.quantization and str(models.quantization),
        # SGLang chooses the frequencies once, by this length
        "_context_length": models.context_len if varies_with_length(config) else None,
        "_positions": longest if past else None,
    }
    return {f"vua.sglang{name}": each for name, each in found.items() if each}


def check_name(name: str) -> None:
    """Raise UncachedError for a pool that is not stored."""
    if name not in KNOWN:
        raise UncachedError(
            f"the engine has a pool {getattr(name, 'value', name)!r} (a state, an index or a "
            "draft model), which is not stored"
        )


def _check_supported(
    arguments: Any,
    models: Any,
    rank_config: Any,
    is_text: bool,  # noqa: FBT001
) -> None:
    """Raise UncachedError for engines whose caches depend on information that a backend lacks."""
    if rank_config.attn_cp_size > 1 or rank_config.dcp_size > 1:
        msg = "with context parallelism a page is spread over ranks, which is not supported"
        raise UncachedError(msg)
    if rank_config.should_split_heads:
        raise UncachedError("VUA divides pages at heads itself; leave out tp_lcm_size")
    for name, only in _ONLY.items():
        if getattr(arguments, name) not in only:
            raise UncachedError(f"{name}={getattr(arguments, name)!r}: {_ELSEWHERE}")
    if envs.SGLANG_USE_MODELSCOPE.get() and not Path(arguments.model_path).exists():
        raise UncachedError(
            "SGLANG_USE_MODELSCOPE: it is unknown which files were loaded; serve a local directory"
        )
    if arguments.load_format not in _LOAD_FORMATS:
        msg = f"load_format {arguments.load_format!r}: it is unknown which weights it loads"
        raise UncachedError(msg)
    if not is_text or getattr(models, "is_multimodal", False):
        msg = "models that take images or sounds are not cached: SGLang names these by 30 bits"
        raise UncachedError(msg)


def _code(text: Any, directory: Path) -> list[str]:
    named = getattr(text, "auto_map", None) or {}
    if not named:
        return []
    if elsewhere := sorted({str(each) for each in named.values() if "--" in str(each)}):
        raise ConfigError(f"the model runs code of another repository ({elsewhere[0]})")
    return [code_digest(directory)]


def _name(path: str, directory: Path) -> str:
    return directory.resolve().name if Path(path).is_dir() else path


ENGINE: Final = SetupOf(
    ("sglang", "sglang-kernel", "sgl-kernel", "torch", "triton", "flashinfer-python"),
    ("sglang.srt.plugins", "sglang.srt.platforms"),
    ("SGLANG_", "SGL_", "AITER_", "FLASHINFER_"),
    (
        *("sglang.srt.arg_groups", "sglang.srt.entrypoints", "sglang.srt.environ"),
        *("sglang.srt.managers", "sglang.srt.observability", "sglang.srt.server_args"),
        "sglang.srt.utils",
    ),
    listed(EXCLUDED_VARIABLES, *NOT_COMPUTED, "where"),
)
_APART: Final = listed(EXCLUDED, *NOT_COMPUTED, "where")
_BESIDE: Final = ("attn_backend", "decode_attn_backend", "token_to_kv_pool", "req_to_token_pool")
"""What a model runner has beside its model."""
_OF_SGLANG: Final = ("smg-grpc-servicer",)
"""Packages that SGLang itself requires, whose plug-ins only receive requests."""
_KNOWN: Final = frozenset(("sglang", "sgl_kernel", "sitecustomize", "torch", "vua"))
"""Packages wherever they are installed, and what Python's own start may change in them."""


class Setup(NamedTuple):
    """Facts about an engine that other engines must know."""

    digest: str
    """Equal for two engines that compute the same, 64 hex digits; "": unknown."""
    unusual: list[str]
    """Software that runs in it beside SGLang, in words."""
    epoch: str
    """The part of an unusual engine in its namespace's name; "" if it is not."""


def setup_of(runner: Any, pools: Iterable[Any] = ()) -> Setup:
    """Return the setup of an engine with these host pools; takes about a second.

    ``runner``: SGLang's ``ModelRunner``.
    """
    try:
        plugins, hooks = {one.name: one.module for one in _plugins()}, [*_hook_names(runner)]
        package = os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE", "")
        arguments, beside = (
            runner.server_args,
            {each: getattr(runner, each, None) for each in _BESIDE},
        )
        config = {
            name: in_text(getattr(arguments, name))
            for name in arguments.__struct_fields__
            if name not in _APART
        }
        config["precision"] = torch.get_float32_matmul_precision()
        beside = {name: each for name, each in beside.items() if hasattr(each, "__dict__")}
        beside |= {type(pool).__name__: type(pool) for pool in pools}
        own = _KNOWN | {name.partition(".")[0] for name in (package, *plugins.values())}
        code = code_of(runner.model, ENGINE.aside, {"runner": runner, **beside}, own)
    except Exception as problem:  # SGLang's code may raise any
        log.debug("its code cannot be read", exc_info=True)
        return Setup("", [f"code that cannot be read ({problem})"], secrets.token_hex(8))
    known = _KNOWN | {package.partition(".")[0]}
    local = {
        name
        for name, file in code.sources
        if name.partition(".")[0] not in known and not is_installed(name, file)
    }
    unusual = [*hooks, *(f"the plug-in {name}" for name in plugins)]
    unusual += [f"code of {name}" for name in sorted(local)]
    epoch = secrets.token_hex(8) if hooks else code.digest[:16] if unusual else ""
    return Setup(joined(settings_digest(ENGINE, config), [code.digest]), unusual, epoch)


def _hook_names(runner: Any) -> Iterator[str]:
    everywhere = torch.nn.modules.module
    held = [everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks]  # noqa: SLF001
    for module in runner.model.modules():
        held += [module._forward_hooks, module._forward_pre_hooks]  # noqa: SLF001 - no public list
    for hook in [hook for hooks in held for hook in hooks.values()]:
        name = str(getattr(hook, "__module__", None) or type(hook).__module__)
        if name.partition(".")[0] not in _KNOWN:
            yield f"a hook of {name}"
    for target, hooks in HookRegistry._hooks.items():  # noqa: SLF001 - there is no public list
        if any(source is None or source.dist_name not in _OF_SGLANG for _, _, source in hooks):
            yield f"a hook on {target}"


def _plugins() -> Iterator[EntryPoint]:
    allowed = {one.strip() for one in os.environ.get("SGLANG_PLUGINS", "").split(",")} - {""}
    for one in (one for group in ENGINE.plugins for one in entry_points(group=group)):
        owned = one.dist is not None and one.dist.name in _OF_SGLANG
        if not owned and (not allowed or one.name in allowed):
            yield one
