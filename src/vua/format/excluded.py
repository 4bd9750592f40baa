"""Settings that cannot change K and V, and do not count in the identity: tables of names.

Each engine has a file ``excluded.json``. Its tables have lists of names by a word for the reason,
and "reasons" says what the words mean. What is in no table counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

NOT_COMPUTED: Final = ("files", "logits", "read", "seen", "text")
"""Reasons of what is not a part of the computation of K and V in any engine."""


def tables_of(package: str) -> Mapping[str, Any]:
    """Return the tables of an engine's package, such as "vua.vllm"."""
    text = (files(package) / "excluded.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def listed(table: Mapping[str, Sequence[str]], *reasons: str) -> frozenset[str]:
    """Return the names in a table that are there for one of these reasons; by default all.

    >>> sorted(listed({"when": ["one", "another"], "seen": ["third"]}))
    ['another', 'one', 'third']
    """
    return frozenset(name for reason in reasons or table for name in table.get(reason, ()))
