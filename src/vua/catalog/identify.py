"""Which namespace a model directory leads to, as far as its files tell, and which one is near it.

Engines take the digest of a config that they have completed (defaults of the installed version,
overrides, marks of their own), which `config.json` alone does not give. So a differing ``model`` is
never proof of another model; everything else is compared as the adapters fill it in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from vua.errors import ConfigError
from vua.format.config_digest import config_digest
from vua.format.identity import Identity
from vua.format.rope import rope_order, varies_with_length
from vua.storage.description import Description
from vua.weights import checkpoint_files, identify_weights

__all__ = ["Difference", "Expected", "compare", "expect", "nearest"]

_DTYPES: Final = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_SHORT: Final = 12


@dataclass(frozen=True, slots=True)
class Expected:
    """The identity that follows from a model's files."""

    identity: Identity
    unknown: tuple[str, ...]
    """Fields that the files do not tell; they are not compared."""
    notes: tuple[str, ...]
    """What an engine may do that the files do not show."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A field in which a stored identity differs from the expected one."""

    field: str
    stored: str | int
    expected: str | int
    certain: bool
    """Whether an engine that is given these files must see it too."""

    def __str__(self) -> str:
        """The difference in words."""
        text = f"{self.field} {_shown(self.stored)} instead of {_shown(self.expected)}"
        return text if self.certain else f"{text} (config.json alone does not tell)"


def _shown(value: str | int) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[: _SHORT + 1]}...'"


def expect(
    model: str,
    *,
    chunk_tokens: int,
    epoch: str,
    progress: Callable[[int, int], None] | None = None,
) -> Expected:
    """Return the identity that the files in directory ``model`` give.

    What the weights' files hold is remembered, as by engines; ``progress`` is told the bytes read
    and to read. Raises ConfigError where there is no usable ``config.json``, OSError.
    """
    root = Path(model)
    config = _read_config(root)
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    model_type = str(text.get("model_type", ""))
    rope = rope_order(model_type)
    notes = [
        "engines complete config.json (defaults of their version, overrides) before it is digested"
    ]
    if not rope:
        notes.append(
            f"rope order of {model_type!r} is not known: each engine has its own namespace"
        )
    if varies_with_length(text):
        notes.append("the rotary embedding varies with the length: vLLM adds its max_model_len")
    if config.get("quantization_config") or text.get("quantization_config"):
        notes.append("the model is quantised: vLLM adds the method")
    if text is not config:
        notes.append("the model has parts beside its text: vLLM adds the rest of its config")
    if text.get("sliding_window"):
        notes.append("layers with a sliding window: vLLM adds which layers these are")
    if {*(text.get("layer_types") or ())} - {"full_attention", "sliding_attention"}:
        notes.append("layers with a state: vLLM adds which these are, their form, and the TP size")
    named = [one.get(key) for one in (text, config) for key in ("dtype", "torch_dtype")]
    dtype = _DTYPES.get(str(next(filter(None, named), "")), "")
    unknown = [] if dtype else ["kv_dtype"]
    weights = ""
    try:
        files = checkpoint_files(root)
        weights = identify_weights(files, progress=progress).fingerprint
        if any(root.glob("consolidated*.safetensors")) and len(files) < len(
            [*root.glob("*.safetensors")]
        ):
            notes.append("vLLM may load consolidated*.safetensors in place of the files compared")
    except ConfigError as problem:
        unknown.append("weights")
        notes.append(str(problem))
    identity = Identity(
        model=config_digest(text),
        weights=weights,
        kv_dtype=dtype,
        rope=rope,
        epoch=epoch,
        chunk_tokens=chunk_tokens,
        name=root.resolve().name,
    )
    return Expected(identity, tuple(unknown), tuple(notes))


def _read_config(root: Path) -> Mapping[str, Any]:
    path = root / "config.json"
    if not path.is_file():
        msg = f"{path}: no such file; give the local directory of the model that the engine loads"
        raise ConfigError(msg)
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as problem:
        msg = f"{path} is no JSON: {problem}"
        raise ConfigError(msg) from problem
    if not isinstance(config, Mapping):
        msg = f"{path} is a JSON {type(config).__name__}, expected an object"
        raise ConfigError(msg)
    return config


def compare(expected: Expected, stored: Identity) -> list[Difference]:
    """Return in which fields ``stored`` differs; certain ones first."""
    found = []
    for field in fields(Identity):
        if field.name == "name" or field.name in expected.unknown:
            continue
        values = getattr(stored, field.name), getattr(expected.identity, field.name)
        if values[0] != values[1]:
            found.append(Difference(field.name, *values, certain=field.name != "model"))
    return sorted(found, key=lambda difference: not difference.certain)


def nearest(
    expected: Expected, found: Sequence[Description]
) -> list[tuple[Description, list[Difference]]]:
    """Return described namespaces with their differences, nearest first.

    The same weights count most, then the number of fields that differ for certain.
    """
    pairs = [(one, compare(expected, one.identity)) for one in found if one.identity is not None]

    def distance(pair: tuple[Description, list[Difference]]) -> tuple[bool, int, int, str]:
        differences = pair[1]
        others = any(one.field in ("weights", "adapter") for one in differences)
        certain = sum(one.certain for one in differences)
        return others, certain, len(differences), pair[0].name

    return sorted(pairs, key=distance)
