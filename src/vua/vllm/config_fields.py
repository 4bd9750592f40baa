"""Which settings of vLLM count, and at which values they add nothing: tables in ``excluded.json``.

Everything not listed in `EXCLUDED` (each with its reason) counts, including fields that a new
release adds: an unknown field costs hits, never a wrong hit. A field of `NEUTRAL` counts too,
unless it has one of the values listed there, with which the engine computes the usual result; these
are not read from the classes, whose defaults may change.
`tests/unit/vllm/test_vllm_fields.py` walks all fields of the releases that VUA knows and fails for
one that is in neither list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from vua.format.identity import tables_of

_TABLES: Final = tables_of("vua.vllm")

ADAPTER_CLASSES: Final = frozenset({"LoRAConfig"})
"""Their fields count for requests with an adapter."""
MEDIA_CLASSES: Final = frozenset({"MultiModalConfig"})
"""Their fields count from a prompt's first image, sound or video on."""

EXCLUDED: Final[Mapping[str, Mapping[str, Sequence[str]]]] = _TABLES["fields"]
"""Class, word for the reason, fields."""
NEUTRAL: Final[Mapping[str, Mapping[str, Sequence[Any]]]] = _TABLES["neutral"]
"""Class, field, values with which it adds nothing; a word that ends with a dot matches all that
begin with it."""
HOLDERS: Final[Mapping[str, Sequence[str]]] = _TABLES["holders"]
"""Class, fields that hold another class's fields, or None and then add nothing."""
EXCLUDED_VARIABLES: Final[Mapping[str, Sequence[str]]] = _TABLES["variables"]
NEUTRAL_VARIABLES: Final[Mapping[str, Sequence[str]]] = _TABLES["neutral_variables"]
"""Name, texts with which a variable adds nothing. Unset, each adds nothing."""
