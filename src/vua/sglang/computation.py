"""Which arguments and variables of an SGLang engine count: all but what a table excludes.

The tables are `vua.sglang.argument_fields`. A name of a file counts with the file's content.
Promises that two engines with equal answers differ in nothing but what the tables exclude; what has
no lasting form is refused. Code that is not SGLang's is `vua.sglang.foreign`'s.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from vua.connector.cache_spec import UncachedError
from vua.errors import ConfigError
from vua.format.reasons import listed
from vua.sglang.argument_fields import (
    COUNTED_VARIABLES,
    EXCLUDED,
    EXCLUDED_VARIABLES,
    FAMILIES,
    NEUTRAL,
)
from vua.sglang.foreign import file_digest, package_digest
from vua.weights import identify_weights

__all__ = ["attention_that_counts", "settings_that_count", "variables_that_count"]

_EXCLUDED: Final = listed(EXCLUDED)
_EXCLUDED_VARIABLES: Final = listed(EXCLUDED_VARIABLES)
_NEUTRAL: Final = {name: values for values, names in NEUTRAL for name in names.split()}
_PACKAGES: Final = ("SGLANG_EXTERNAL_MODEL_PACKAGE",)
"""Variables that name a package which SGLang imports."""
_SINKS: Final = ("fa3", "fa4", "triton", "trtllm_mha", "aiter", "intel_amx", "intel_xpu", "xpu")
"""Attention backends of SGLang that read a layer's sinks."""
_SOFT_CAPS: Final = ("fa3", "fa4", "triton", "flashinfer", "aiter")
"""Attention backends of SGLang that read a layer's soft cap."""


def settings_that_count(arguments: Any, folder: Path | None = None) -> dict[str, Any]:  # noqa: ANN401
    """Return the arguments of a server that are neither excluded nor at a neutral value.

    Args:
        arguments: SGLang's ``ServerArgs``.
        folder: the model's, in which files may be named.

    Raises UncachedError: a value has no form that lasts, or a file cannot be read.
    """
    found = {}
    for name in arguments.__struct_fields__:
        if name in _EXCLUDED:
            continue
        value = getattr(arguments, name)
        if any(type(value) is type(one) and value == one for one in _NEUTRAL.get(name, ())):
            continue
        found[name] = _told(value, f"argument {name}", folder)
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
        found[name] = _told(value, f"environment variable {name}", None)
        if name in _PACKAGES:
            found[name] = [value, package_digest(value)]
    return found


def attention_that_counts(runner: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return what the choice of kernels means for more than rounding.

    An attention backend that does not read soft caps or sinks computes another function for a model
    that has them; an engine whose results are to be equal bit by bit shares with its like alone.
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


def _backends(runner: Any) -> Iterator[object]:  # noqa: ANN401
    arguments = runner.server_args
    resolved = [
        getattr(runner, f"{kind}_attention_backend_str", None) for kind in ("prefill", "decode")
    ]
    given = [arguments.prefill_attention_backend, arguments.decode_attention_backend]
    for one, other in zip(resolved, given, strict=True):
        yield one or other or arguments.attention_backend


# -- values --------------------------------------------------------------------------------------


def _told(value: Any, what: str, folder: Path | None) -> Any:  # noqa: ANN401, C901, PLR0911 - each kind
    """Return a value in a form that lasts, files by their content."""
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
        return sorted((_told(each, what, folder) for each in value), key=repr)
    if isinstance(value, Sequence):
        return [_told(each, what, folder) for each in value]
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        named = {str(key): _told(each, what, folder) for key, each in value.items()}
        if len(named) == len(value):
            return named
    if (fields := getattr(value, "__struct_fields__", None)) is not None:
        return {
            type(value).__name__: {
                name: _told(getattr(value, name), what, folder) for name in fields
            }
        }
    msg = f"SGLang's {what} is a {type(value).__name__}: whether two engines have the same one "
    raise UncachedError(f"{msg}cannot be told")


def _text(value: str, what: str, folder: Path | None) -> Any:  # noqa: ANN401
    """Return a text; of JSON what it says, of the name of a file or directory what it holds."""
    if value.lstrip().startswith(("{", "[")):
        try:
            return _told(json.loads(value), what, folder)
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
    except ValueError:  # no name of a file
        return value
    return value
