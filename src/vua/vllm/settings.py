"""What of an engine's whole configuration counts for K and V, see `vua.vllm.config_fields`.

Walks everything that vLLM's `VllmConfig` holds, as resolved for this engine. Promises that two
engines with equal settings differ in nothing but what the table excludes; a value without a lasting
form is refused, for nothing could be said about it.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from vua.connector.cache_spec import UncachedError
from vua.format.reasons import listed
from vua.vllm.config_fields import (
    ADAPTER_CLASSES,
    EXCLUDED,
    HOLDERS,
    MEDIA_CLASSES,
    NEUTRAL,
)

__all__ = ["Settings", "known_fields", "settings_of"]

_SAME_KERNELS: Final = ("_marlin",)
"""What vLLM appends to a quantisation where the hardware has a faster kernel for it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Fields that count and their canonical values, by "Class.field"."""

    always: dict[str, Any] = field(default_factory=dict)
    adapters: dict[str, Any] = field(default_factory=dict)
    """Count for requests with an adapter."""
    media: dict[str, Any] = field(default_factory=dict)
    """Count from a prompt's first image, sound or video on."""


def known_fields(name: str) -> tuple[set[str], set[str]]:
    """Return the fields of a class that are excluded, and those that count and are known."""
    return {*listed(EXCLUDED.get(name, {}))}, {
        *NEUTRAL.get(name, {}),
        *HOLDERS.get(name, "").split(),
    }


def settings_of(vllm_config: Any, kv_dtype: torch.dtype) -> Settings:  # noqa: ANN401
    """Return what counts of an engine's configuration whose KV cache has elements of ``kv_dtype``.

    Raises UncachedError for a value that has no lasting form, with the field's name.
    """
    model = vllm_config.model_config
    same = {"ModelConfig.dtype": kv_dtype, "LoRAConfig.lora_dtype": model.dtype}
    found = Settings()
    for owner, name, value in _fields(vllm_config, "VllmConfig"):
        place = f"{owner}.{name}"
        if place in same and value == same[place]:
            continue
        canonical = _canonical(value, place)
        if place == "ModelConfig.quantization" and canonical is not None:
            canonical = _same_kernels(str(canonical))
        if place == "LoRAConfig.target_modules" and canonical is not None:
            canonical = sorted(set(canonical))  # which modules, in any order
        if _is_neutral(canonical, NEUTRAL.get(owner, {}).get(name, ())):
            continue
        part = found.adapters if owner in ADAPTER_CLASSES else found.always
        (found.media if owner in MEDIA_CLASSES else part)[place] = canonical
    return found


def _fields(config: Any, owner: str) -> Iterator[tuple[str, str, Any]]:  # noqa: ANN401
    """Yield class, field and value of everything that is not excluded."""
    excluded, _ = known_fields(owner)
    holders = HOLDERS.get(owner, "").split()
    for each in dataclasses.fields(config):
        if each.name in excluded:
            continue
        value = getattr(config, each.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _fields(value, type(value).__name__)
        elif value is not None or each.name not in holders:
            yield owner, each.name, value


def _same_kernels(quantization: str) -> str:
    for suffix in _SAME_KERNELS:
        quantization = quantization.removesuffix(suffix)
    return quantization


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    if isinstance(value, str) and value.startswith(
        tuple(each for each in neutral if isinstance(each, str) and each.endswith("."))
    ):
        return True
    text = json.dumps(value, sort_keys=True)
    return any(text == json.dumps(each, sort_keys=True) for each in neutral)


def _canonical(value: Any, place: str) -> Any:  # noqa: ANN401, C901, PLR0911 - each kind
    """Return a value in the one JSON form that all equal values share."""
    if value is None or isinstance(value, bool | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, int | float):
        return int(value) if math.isfinite(value) and value == int(value) else value
    if isinstance(value, torch.dtype | torch.device | pathlib.PurePath):
        return str(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        parts = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return {type(value).__name__: _canonical(parts, place)}
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        named = {str(key): _canonical(each, f"{place}.{key}") for key, each in value.items()}
        if len(named) == len(value):
            return named
    if isinstance(value, list | tuple):
        return [_canonical(each, f"{place}[{at}]") for at, each in enumerate(value)]
    if isinstance(value, set | frozenset):
        items = [_canonical(each, place) for each in value]
        return sorted(items, key=lambda item: json.dumps(item, sort_keys=True))
    msg = (
        f"vLLM's setting {place} is a {type(value).__name__}: whether two engines have the same "
        "one cannot be told"
    )
    raise UncachedError(msg)
