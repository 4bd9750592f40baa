"""What an SGLang engine's K and V depend on: the identity of its caches, and their layouts.

The identity is computed from the served model's files, and from all arguments and environment
variables that are in no table of ``excluded.json``, each with its reason there. Those that a new
release adds count: that costs hits, never a wrong hit. A test walks those of the release that VUA
knows. A file's name counts with the file's content. A value without a canonical form is refused.

Code is not a part of it, see `vua.sglang.setup`: engines that run other code compare.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import sglang
import torch
from packaging.version import InvalidVersion, Version
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import PoolName

from vua.connector.cache_spec import Group, UncachedError, division, local_directory
from vua.connector.setup import setting_form
from vua.errors import ConfigError
from vua.format.excluded import listed, tables_of
from vua.format.identity import Identity, named_by, rope_order, varies_with_length
from vua.sglang.pools import dtype_of, groups_of
from vua.weights import identify_weights
from vua.weights.content import State, Work, read_digest
from vua.weights.fingerprint import code_digest

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
        if any(type(value) is type(one) and value == one for one in NEUTRAL.get(name, ())):
            continue
        what = f"argument {name}"
        found[name] = _with_files(setting_form(value, what), what, folder)
    return found


def variables_that_count(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the environment variables that may change what an engine computes.

    Raises UncachedError: a file that one names cannot be read.
    """
    found = {}
    for name, value in sorted(environment.items()):
        known = name in COUNTED_VARIABLES or name.startswith(FAMILIES)
        if not known or name in _EXCLUDED_VARIABLES or value == "":
            continue
        found[name] = _text(value, f"environment variable {name}", None)
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


def _with_files(value: Any, what: str, folder: Path | None) -> Any:
    if isinstance(value, list):
        return [_with_files(each, what, folder) for each in value]
    if isinstance(value, dict):
        return {name: _with_files(each, what, folder) for name, each in value.items()}
    return _text(value, what, folder) if isinstance(value, str) else value


def _text(value: str, what: str, folder: Path | None) -> Any:
    """Return a text: JSON by its value, the name of a file or directory by its content."""
    if value.lstrip().startswith(("{", "[")):
        try:
            return _with_files(json.loads(value), what, folder)
        except (ValueError, RecursionError):
            return value
    try:
        for path in (Path(value), *((folder / value,) if folder else ())):
            if value and path.is_file():
                return {"file": path.name, "content": read_digest(path, State.of(path), Work())}
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
    beside: Identity | None
    """The one that vLLM has for the same config, if its chunks may be the same; None: none.
    """


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
    dtype = dtype_of(pool)
    _check_supported(arguments, models, text is whole)
    config = dict(text.to_dict())
    counted = {
        "vua.sglang": settings_that_count(arguments, directory),
        "vua.sglang_environment": variables_that_count(os.environ),
        "vua.sglang_kernels": attention_that_counts(runner),
    }
    config |= {name: each for name, each in counted.items() if each}
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
    groups = groups_of(runner, pools, dtype, latent=latent)
    config |= division(list(groups.values()))
    own, vllm = (
        Identity.of_config(
            named_by(engine, config),
            kv_dtype=dtype,
            rope=rope,
            epoch=epoch,
            chunk_tokens=pool.page_size,
            name=_name(arguments.model_path, directory),
        )
        for engine in ("sglang", "vllm")
    )
    alike = len(groups) == 1 and bool(rope) and not latent
    alike = alike and not any(key.startswith("vua.sglang") for key in config)
    return CacheDescription(own, groups, vllm if alike else None)


def _build() -> str | None:
    try:
        released = Version(sglang.__version__).local is None
    except InvalidVersion:
        released = False
    return None if released else str(sglang.__version__)


def _check_supported(arguments: Any, models: Any, is_text: bool) -> None:  # noqa: FBT001
    """Raise UncachedError for engines whose caches depend on information that a backend lacks."""
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
