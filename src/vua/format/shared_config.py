"""Whether engines compute the same K and V from a model's config, as far as measurements show.

Engines read the same config differently: one applies a key that another ignores. Caches may be
shared between engines only for keys and values for which `tests/e2e/meeting.py` has shown, for this
model type, that transformers and vLLM compute the same K and V. Any other key or value makes the
namespace the engine's own. `shared_configs.json` holds what was shown; the command ``python
tests/make_shared_configs.py`` writes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final

from vua.format.identity import IGNORED_CONFIG_KEYS, rope_order, varies_with_length

_CODE: Final = "vua.code"
"""Code that came with the model's files runs, which measurements do not cover."""
_MARKED: Final = frozenset(("vua.whole", "vua.quantization", "vua.sglang_quantization"))
"""With one of these the namespace is already one engine's own."""
_ANYTHING: Final = frozenset(
    # Quantised weights: each engine marks these itself. Python code beside the weights: it counts
    # as _CODE where it runs.
    "quantization_config compression_config auto_map".split()  # noqa: SIM905
)


def unshared(config: Mapping[str, Any]) -> str:
    """Return why caches of a config must not be shared between engines; "" if they may.

    For an engine's adapter, when the config is complete and before `config_digest` takes it::

        config = dict(model.config.get_text_config().to_dict())
        ...                                     # config["vua.code"] and the like
        if reason := unshared(config):          # for the log: "llama with head_dim=64"
            config["vua.engine"] = ["sglang", *(architectures or ())]

    Args:
        config: a text config as the engine resolved it, by `to_dict()`. The key "vua.code" makes it
            the engine's own. The keys "vua.whole", "vua.quantization" and "vua.sglang_quantization"
            already mark it as one engine's, so no second mark is needed and the result is "".

    >>> unshared({"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5})
    ''
    >>> unshared({"model_type": "llama", "partial_rotary_factor": 0.5})
    'llama with partial_rotary_factor=0.5'
    """
    kind = str(config.get("model_type", ""))
    if not rope_order(kind) or (proven := _proven().get(kind)) is None:
        return f"the model type {kind!r}"
    if not _MARKED.isdisjoint(config):
        return ""
    if _CODE in config:
        return f"{kind} with Python code of its own"
    nothing: dict[str, list[Any]] = {place: [] for place, _ in facts(config)}
    found = unproven(config, nothing | proven)
    return f"{kind} with {found}" if found else ""


def unproven(config: Mapping[str, Any], places: Mapping[str, list[Any]]) -> str:
    """Return the first fact of a config whose value was not shown for its key; "" if none.

    Args:
        config: as `unshared` takes it.
        places: the shown values, by key of `facts`; a missing key may have any value.
    """
    for place, value in facts(config):
        if place in places and not _is_among(value, places[place]):
            return f"{place}={json.dumps(value, default=str):.60}"
    return ""


def facts(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield a config as single plain values, which can be shown one by one.

    Elements of a list share one key, and `layer_types` has one for their order; rotation parameters
    are keyed by their ``rope_type``. Values that cannot change K and V are left out.

    >>> rope = {"rope_type": "linear", "factor": 4.0}
    >>> for fact in facts({"layer_types": ["full_attention"], "rope_parameters": rope}):
    ...     print(*fact)
    layer_types[] full_attention
    layer_types order one
    rope_parameters.linear.factor 4.0
    """
    by_length = varies_with_length(config)
    for key, value in config.items():
        if key in IGNORED_CONFIG_KEYS or key in _ANYTHING or key.startswith("vua."):
            continue
        if key == "rope_parameters" and isinstance(value, Mapping):
            if not by_length:  # each engine counts its own longest context
                yield from _rotation(key, value)
        elif isinstance(value, list | tuple) and value:
            yield from ((f"{key}[]", each) for each in value)
            if key == "layer_types":
                yield f"{key} order", _order(value)
        else:
            yield key, value


def _order(kinds: Sequence[str]) -> str:
    """Return how layers alternate; some engines support only one order."""
    if len({*kinds}) == 1:
        return "one"
    turns = all(kinds[at] == kinds[at % 2] for at in range(len(kinds)))
    return f"alternating from {kinds[0]}" if turns else "other"


def _rotation(place: str, rope: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    kind = rope.get("rope_type", "default")
    for key, value in rope.items():
        if isinstance(value, Mapping):  # of the layers of one kind
            yield from _rotation(f"{place}.{key}", value)
        elif key != "rope_type":
            yield f"{place}.{kind}.{key}", value


@cache
def _proven() -> dict[str, dict[str, list[Any]]]:
    """Return the shown values by model type and key, see `_is_among`."""
    text = (files("vua.format") / "shared_configs.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, list[Any]]] = json.loads(text)
    everywhere = table.pop("*")
    return {kind: everywhere | places for kind, places in table.items()}


def _is_among(value: Any, known: list[Any]) -> bool:
    """Whether a value was shown: "*" matches any value, "+" any number above 0."""
    if "*" in known:
        return True
    if (
        "+" in known
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 < value < math.inf
    ):
        return True
    return any(_is_same(value, each) for each in known)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)
