"""Which of SGLang's arguments and environment cannot change K and V: tables, each with its reason.

All arguments and variables in no table count, including those that a new release adds: an unknown
one costs hits, never a wrong hit. `tests/unit/sglang/test_sglang_fields.py` walks all arguments and
variables of the release that VUA knows and fails on one that is in no table. The tables are in
``excluded.json``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from vua.format.excluded import tables_of

_TABLES: Final = tables_of("vua.sglang")

EXCLUDED: Final[Mapping[str, Sequence[str]]] = _TABLES["arguments"]
"""Word for the reason, arguments."""
NEUTRAL: Final[Mapping[str, list[Any]]] = {
    name: values for values, names in _TABLES["neutral"] for name in names
}
"""Argument, values with which it adds nothing; not read from the classes, whose defaults may
change."""
FAMILIES: Final = ("SGLANG_", "SGL_")
"""A variable whose name begins like this counts although it is in no table."""
EXCLUDED_VARIABLES: Final[Mapping[str, Sequence[str]]] = _TABLES["variables"]
"""Word for the reason, variables of these families."""
COUNTED_VARIABLES: Final = frozenset(_TABLES["counted_variables"])
"""Variables of no family that count if they are set; the rest do not."""
