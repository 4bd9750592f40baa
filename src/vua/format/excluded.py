"""What cannot change K and V, so that it is no part of the identity: tables of names, as data.

Each engine has a file ``excluded.json``. Its tables have lists of names by a word for the reason,
and "reasons" says what the words mean. What is in no table counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

WHEN: Final = "when, and in which batch, a token is computed; not its input"
WHERE: Final = "where processes, memory, files and caches are, and how they find each other"
KERNEL: Final = "which kernel, compiler or graph computes the same function: only rounding differs"
SPLIT: Final = "how the same function is split over workers; a file names its part of K and V"
SEEN: Final = "what is logged, measured, traced or returned"
LOGITS: Final = "what happens to the logits; tokens are in the key"
TEXT: Final = "conversion between text and tokens; tokens are in the key"
FILES: Final = "where files come from; their content counts"
READ: Final = "how bytes are read from disk; the weights' fingerprint counts"
ELSEWHERE: Final = "counts in another part of the identity or of the layout"


def tables_of(package: str) -> Mapping[str, Any]:
    """Return the tables of an engine's package, such as "vua.vllm"."""
    text = (files(package) / "excluded.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def listed(table: Mapping[str, str | Sequence[str]]) -> frozenset[str]:
    """Return the names in a table, whatever the reason.

    >>> sorted(listed({"when": ["one", "another"], "seen": ["third"]}))
    ['another', 'one', 'third']
    """
    each = (names.split() if isinstance(names, str) else names for names in table.values())
    return frozenset(name for names in each for name in names)
