"""Why something that an engine can be told is no part of an identity: the reasons of all tables.

Each engine has tables of what it excludes, by reason: settings, arguments and variables of the
environment. A reason that only one engine has stands beside its table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = [
    "CONTENT",
    "ELSEWHERE",
    "FILES",
    "KERNEL",
    "LOGITS",
    "READ",
    "SEEN",
    "SPLIT",
    "TEXT",
    "WHEN",
    "WHERE",
    "listed",
]

WHEN: Final = "when and beside which others a token is computed, not from what"
WHERE: Final = "where processes, memory, files and caches are, and how they find each other"
KERNEL: Final = "which kernel, compiler or graph computes the same function: rounding alone"
SPLIT: Final = "over which workers the same function is spread; a file names its part of K and V"
SEEN: Final = "what is logged, measured, traced or returned"
LOGITS: Final = "what becomes of the logits; tokens are in the key"
TEXT: Final = "how requests become tokens, and tokens answers; tokens are in the key"
FILES: Final = "where files come from; their content counts"
READ: Final = "how bytes come off the disk; the weights' fingerprint counts"
CONTENT: Final = "shows in the tensors that a model gets of an image, and these are digested"
ELSEWHERE: Final = "counts in another part of the identity or of the layout"


def listed(table: Mapping[str, str]) -> frozenset[str]:
    """Return the names of a table of reasons and names: ``{WHEN: "one another"}``.

    >>> sorted(listed({WHEN: "one another", SEEN: "third"}))
    ['another', 'one', 'third']
    """
    return frozenset(" ".join(table.values()).split())
