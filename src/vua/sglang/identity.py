"""What an SGLang engine's K and V depend on: the identity of its caches, and their layouts.

The identity is computed from the served model's files. Anything else that affects the engine's
results counts, too, unless it is listed as harmless (`vua.sglang.argument_fields`): such an engine
has its own namespace.

All arguments and variables count, except those in the tables of `vua.sglang.argument_fields`. A
file's name counts with the file's content. Two engines with equal results then differ only in what
the tables exclude; a value without a canonical form is refused.

Foreign code is code that runs in an SGLang engine and is not SGLang's own: classes of the model and
of its modules, functions that replace theirs, hooks of modules, and plug-ins. Source counts by
content, and so do the values that a function holds (closure, defaults, attributes of its object).
Two engines with equal results run the same code with the same values, as long as it reads no files,
clocks or random numbers while it runs.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import site
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import sglang
import torch
from packaging.version import InvalidVersion, Version
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.plugins.hook_registry import HookRegistry

import vua
from vua.connector.adapters import content_digest
from vua.connector.cache_spec import Group, UncachedError, division, local_directory
from vua.errors import ConfigError
from vua.format.excluded import listed
from vua.format.identity import Identity, named_by, rope_order, varies_with_length
from vua.format.layout import KVLayout, Shard
from vua.serdes import DTYPE_NAMES
from vua.sglang.argument_fields import (
    COUNTED_VARIABLES,
    EXCLUDED,
    EXCLUDED_VARIABLES,
    FAMILIES,
    NEUTRAL,
)
from vua.weights import identify_weights
from vua.weights.fingerprint import code_digest

_PLUGINS: Final = ("sglang.srt.plugins", "sglang.srt.platforms")
_OF_SGLANG: Final = frozenset(("smg-grpc-servicer",))
"""Packages that SGLang itself requires, whose plug-ins only receive requests."""
_CODE: Final = b"vua.sglang.code.v1"
_INSTALLED: Final = tuple(
    f"{os.path.realpath(path)}{os.sep}"
    for path in {
        *site.getsitepackages(),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    }
)
_OWN: Final = tuple(
    f"{os.path.realpath(Path(str(module.__file__)).parent)}{os.sep}"
    for module in (sglang, torch, vua)
)
"""SGLang's, whose version is checked, and torch's; VUA's own additions change nothing."""
_TRUSTED: Final = frozenset(("sglang", "torch", "builtins", "abc", "typing", ""))
"""Packages whose functions may have no file."""
_HANDLES: Final = frozenset(("_io", "_thread", "_random", "random", "socket"))
"""Modules whose objects have unknown state."""
_STARTERS: Final = frozenset(("__main__", "__mp_main__", "sitecustomize"))


def foreign_code(runner: Any) -> dict[str, Any]:
    """Return the code in an engine that is not SGLang's own: where it is, and its content.

    Raises UncachedError: the content of one is unknown.
    """
    found: dict[str, Any] = {}
    for place, code in _foreign(runner.model):
        found.setdefault(place, _state(code))
    found |= _plugins()
    if found:
        found["modules"] = _local_modules()
    return found


def _foreign(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield place and object of everything that is not SGLang's or torch's own."""
    found = [*_of_instances(model)]
    classes = {kind for module in model.modules() for kind in type(module).__mro__}
    for kind in sorted(classes, key=_qualified):
        found.append((_qualified(kind), kind))
        found += [
            (f"{_qualified(kind)}.{name}", _unbound(value))
            for name, value in vars(kind).items()
            if isinstance(_unbound(value), types.FunctionType)
        ]
    yield from ((place, code) for place, code in found if not _is_own(code))
    for name in sorted({kind.__module__ for kind in classes}):
        module = sys.modules.get(name)
        if module is not None and _is_own_file(getattr(module, "__file__", None)):
            for key, value in vars(module).items():
                if isinstance(value, types.FunctionType | type) and _is_local(value):
                    yield f"{name}.{key}", value


def _of_instances(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield hooks, and attributes of objects that replace their class's methods."""
    everywhere = torch.nn.modules.module
    held: list[tuple[str, Mapping[int, Any]]] = [
        (name, getattr(everywhere, name))
        for name in ("_global_forward_hooks", "_global_forward_pre_hooks")
    ]
    for path, module in model.named_modules(prefix="model"):
        held += [(f"{path}.hook", module._forward_hooks)]  # noqa: SLF001 - there is no public list
        held += [(f"{path}.pre_hook", module._forward_pre_hooks)]  # noqa: SLF001
        yield from (
            (f"{path}.{name}", value)
            for name, value in vars(module).items()
            if callable(value) and not isinstance(value, torch.nn.Module)
        )
    for place, hooks in held:
        yield from ((f"{place}.{number}", hook) for number, hook in enumerate(hooks.values()))


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _unbound(value: Any) -> Any:
    """Return the function of a method, property or wrapper."""
    if isinstance(value, staticmethod | classmethod | types.MethodType):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    return value


def _file_of(value: Any) -> str | None:
    """Return the file of a function's or class's code; None: it has none (built-in)."""
    value = _unbound(value)
    if isinstance(value, functools.partial):
        return _file_of(value.func)
    if (code := getattr(value, "__code__", None)) is not None:
        return str(code.co_filename)
    kind = value if isinstance(value, type) else type(value)
    module = sys.modules.get(kind.__module__)
    return getattr(module, "__file__", None)


def _is_own(value: Any) -> bool:
    file = _file_of(value)
    if file is None or file.startswith("<"):  # built-in, or made by torch and dataclasses
        return (getattr(value, "__module__", None) or "").partition(".")[0] in _TRUSTED
    return _is_own_file(file) or _is_standard(file)


def _is_own_file(file: str | None) -> bool:
    return file is not None and os.path.realpath(file).startswith(_OWN)


def _is_standard(file: str) -> bool:
    path = os.path.realpath(file)
    return path.startswith(_INSTALLED) and "-packages" not in path


def _is_local(value: Any) -> bool:
    """Whether code is outside all installed packages."""
    file = _file_of(value)
    if file is None or file.startswith("<"):
        return False
    return not os.path.realpath(file).startswith((*_INSTALLED, *_OWN))


def _state(code: Any) -> str:
    """Return a digest of code and of all values that it holds: closures, defaults, attributes."""
    seen: set[int] = set()

    def attributes(value: Any) -> Mapping[str, Any] | None:
        if id(value) in seen:
            return {"seen": True}
        seen.add(id(value))
        return _held(value)

    try:
        return content_digest(code, _CODE, attributes)
    except (UncachedError, TypeError, ValueError, OSError, RecursionError) as problem:
        msg = f"code that is not SGLang's runs in this engine and cannot be identified: {problem}"
        raise UncachedError(msg) from problem


def _held(value: Any) -> Mapping[str, Any] | None:  # noqa: PLR0911 - each kind
    """Return the parts of a function, class or object; None: unknown."""
    if isinstance(value, types.ModuleType):
        return {"module": value.__name__}
    if isinstance(value, type):
        return {"class": _qualified(value), "code": _source(value)}
    if isinstance(value, types.MethodType):
        return {"function": value.__func__, "owner": value.__self__}
    if isinstance(value, types.FunctionType):
        return {
            "function": f"{value.__module__}.{value.__qualname__}",
            "code": _source(value),
            "closure": [_cell(each) for each in value.__closure__ or ()],
            "defaults": [value.__defaults__, value.__kwdefaults__],
        }
    if isinstance(value, functools.partial):
        return {"function": value.func, "given": [value.args, value.keywords]}
    if isinstance(value, enum.Enum | os.PathLike | torch.device):
        return {"value": str(value)}
    if isinstance(value, set | frozenset):
        return {"set": sorted(map(repr, value))}
    return _held_by_object(value)


def _held_by_object(value: Any) -> Mapping[str, Any] | None:
    attributes = getattr(value, "__dict__", None)
    if attributes is None or type(value).__module__ in _HANDLES:
        return None
    kept = {name: each for name, each in attributes.items() if isinstance(name, str)}
    return {"class": _qualified(type(value)), "code": _source(type(value)), "held": kept}


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _source(code: Any) -> str:
    """Return the source of a function or class, or a substitute."""
    file = _file_of(code)
    if file is None:
        return ""
    if _is_own_file(file):
        return "sglang"
    if not Path(file).is_file():
        compiled = getattr(_unbound(code), "__code__", None)
        if compiled is None:
            msg = f"there is no source code of {code!r:.80}"
            raise UncachedError(msg)
        return _compiled(compiled)
    return file_digest(Path(file))


def _compiled(code: types.CodeType) -> str:
    constants = [
        _compiled(one) if isinstance(one, types.CodeType) else repr(one) for one in code.co_consts
    ]
    parts = [code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars]
    return hashlib.sha256(json.dumps([sys.version, parts]).encode()).hexdigest()


def _plugins() -> dict[str, Any]:
    """Return the plug-ins that SGLang loads, with their code."""
    allowed = {one.strip() for one in os.environ.get("SGLANG_PLUGINS", "").split(",")} - {""}
    found: dict[str, Any] = {}
    for group in _PLUGINS:
        for one in importlib.metadata.entry_points(group=group):
            owned = one.dist is not None and one.dist.name in _OF_SGLANG
            if not owned and (not allowed or one.name in allowed):
                package = one.value.partition(":")[0].partition(".")[0]
                found[f"{group}.{one.name}"] = [one.value, package_digest(package)]
    for target, hooks in HookRegistry._hooks.items():  # noqa: SLF001 - there is no public list
        states = [
            [str(kind), _state(hook)]
            for kind, hook, source in hooks
            if source is None or source.dist_name not in _OF_SGLANG
        ]
        found |= {f"hooks.{target}": states} if states else {}
    return found


def package_digest(name: str) -> str:
    """Return a digest of a package's Python files, or of a module's one. Raises UncachedError."""
    try:
        spec = importlib.util.find_spec(name)
        places = [Path(each) for each in (spec.submodule_search_locations or ())] if spec else []
        if spec is not None and not places and spec.origin:
            return file_digest(Path(spec.origin))
        if not places:
            msg = f"the package {name} that SGLang imports is not found"
            raise UncachedError(msg)
        return " ".join(code_digest(each) for each in places)
    except (ConfigError, OSError, ImportError, ValueError) as problem:
        msg = f"the package {name} that SGLang imports cannot be identified: {problem}"
        raise UncachedError(msg) from problem


def _local_modules() -> dict[str, str]:
    """Return the content of each loaded module that is not installed: foreign code may call it."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        path = os.path.realpath(file) if isinstance(file, str) else ""
        mine = name in _STARTERS
        if path.endswith(".py") and not path.startswith((*_INSTALLED, *_OWN)) and not mine:
            with contextlib.suppress(FileNotFoundError):  # torch has modules without a file
                found[name] = file_digest(Path(path))
    return found


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, 64 hex digits. Raises OSError."""
    digest = hashlib.sha256()  # Python 3.10 has no `hashlib.file_digest`
    with path.open("rb") as stream:
        while part := stream.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


_EXCLUDED: Final = listed(EXCLUDED)
_EXCLUDED_VARIABLES: Final = listed(EXCLUDED_VARIABLES)
_NEUTRAL: Final = {name: values for values, names in NEUTRAL for name in names.split()}
_PACKAGES: Final = ("SGLANG_EXTERNAL_MODEL_PACKAGE",)
"""Variables that name a package which SGLang imports."""
_SINKS: Final = ("fa3", "fa4", "triton", "trtllm_mha", "aiter", "intel_amx", "intel_xpu", "xpu")
"""Attention backends of SGLang that read a layer's sinks."""
_SOFT_CAPS: Final = ("fa3", "fa4", "triton", "flashinfer", "aiter")
"""Attention backends of SGLang that read a layer's soft cap."""


def settings_that_count(arguments: Any, folder: Path | None = None) -> dict[str, Any]:
    """Return the arguments of a server that are neither excluded nor at a neutral value.

    Args:
        arguments: SGLang's ``ServerArgs``.
        folder: the model's, in which files may be named.

    Raises UncachedError: a value has no canonical form, or a file cannot be read.
    """
    found = {}
    for name in arguments.__struct_fields__:
        if name in _EXCLUDED:
            continue
        value = getattr(arguments, name)
        if any(type(value) is type(one) and value == one for one in _NEUTRAL.get(name, ())):
            continue
        found[name] = _canonical(value, f"argument {name}", folder)
    return found


def variables_that_count(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the environment variables that may change what an engine computes.

    Raises UncachedError: a file or a package that one names cannot be read.
    """
    found = {}
    for name, value in sorted(environment.items()):
        known = name in COUNTED_VARIABLES or name.startswith(FAMILIES)
        if not known or name in _EXCLUDED_VARIABLES or value == "":
            continue
        found[name] = _canonical(value, f"environment variable {name}", None)
        if name in _PACKAGES:
            found[name] = [value, package_digest(value)]
    return found


def attention_that_counts(runner: Any) -> dict[str, Any]:
    """Return the effects of the choice of kernels beyond rounding.

    An attention backend that ignores soft caps or sinks computes another function for a model that
    has them; an engine whose results must be equal bit by bit shares only with engines like it.
    """
    arguments, found = runner.server_args, dict[str, Any]()
    backends = sorted({str(one) for one in _backends(runner)})
    layers = list(runner.model.modules())
    capped = any(getattr(one, "logit_cap", None) for one in layers)
    tempered = any(getattr(one, "xai_temperature_len", -1) > 0 for one in layers)
    names = (name for name, _ in runner.model.named_parameters())
    sinks = any(name.rpartition(".")[2] in ("sinks", "attention_sink_bias") for name in names)
    unread = (capped and not set(backends) <= set(_SOFT_CAPS)) or (
        sinks and not set(backends) <= set(_SINKS)
    )
    if unread or tempered or arguments.enable_deterministic_inference:
        found["attention"] = backends
    if arguments.enable_deterministic_inference:
        device = torch.device(arguments.device or "cpu")
        cuda = device.type == "cuda" and torch.cuda.is_available()
        found["device"] = torch.cuda.get_device_name() if cuda else device.type
    if (precision := torch.get_float32_matmul_precision()) != "highest":
        found["float32_matmul_precision"] = precision
    return found


def _backends(runner: Any) -> Iterator[object]:
    arguments = runner.server_args
    resolved = [
        getattr(runner, f"{kind}_attention_backend_str", None) for kind in ("prefill", "decode")
    ]
    given = [arguments.prefill_attention_backend, arguments.decode_attention_backend]
    for one, other in zip(resolved, given, strict=True):
        yield one or other or arguments.attention_backend


# -- values --------------------------------------------------------------------------------------


def _canonical(value: Any, what: str, folder: Path | None) -> Any:  # noqa: C901, PLR0911 - each kind
    """Return a value in a canonical form, files by their content."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, int | float):
        return int(value) if math.isfinite(value) and value == int(value) else repr(value)
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if isinstance(value, str):
        return _text(value, what, folder)
    if isinstance(value, set | frozenset):
        return sorted((_canonical(each, what, folder) for each in value), key=repr)
    if isinstance(value, Sequence):
        return [_canonical(each, what, folder) for each in value]
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        named = {str(key): _canonical(each, what, folder) for key, each in value.items()}
        if len(named) == len(value):
            return named
    if (fields := getattr(value, "__struct_fields__", None)) is not None:
        return {
            type(value).__name__: {
                name: _canonical(getattr(value, name), what, folder) for name in fields
            }
        }
    msg = f"SGLang's {what} is a {type(value).__name__}: two engines' values cannot be "
    raise UncachedError(f"{msg}compared")


def _text(value: str, what: str, folder: Path | None) -> Any:
    """Return a text: JSON by its value, the name of a file or directory by its content."""
    if value.lstrip().startswith(("{", "[")):
        try:
            return _canonical(json.loads(value), what, folder)
        except (ValueError, RecursionError):
            return value
    try:
        for path in (Path(value), *((folder / value,) if folder else ())):
            if value and path.is_file():
                return {"file": path.name, "content": file_digest(path)}
            if value and path.is_dir():
                files = sorted(one for one in path.rglob("*") if one.is_file())
                names = [one.relative_to(path).as_posix() for one in files]
                digest = identify_weights(files).fingerprint if files else ""
                return {"folder": path.name, "names": names, "content": digest}
    except (OSError, ConfigError) as problem:
        msg = f"SGLang's {what} names {value!r}, which cannot be read: {problem}"
        raise UncachedError(msg) from problem
    except ValueError:  # not the name of a file
        return value
    return value


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
    longest = config.get("max_position_embeddings")
    if isinstance(longest, int) and models.context_len > longest:  # its table of rotations ends
        config["vua.sglang_positions"] = longest
    if arguments.trust_remote_code and (code := _code(text, directory)):
        config["vua.code"] = code
    groups = _groups(runner, pools, dtype, latent=latent)
    config |= division(list(groups.values()))
    identity = Identity.of_config(
        named_by("sglang", config),
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
    name = DTYPE_NAMES.get(pool.dtype)
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
