"""The reasons why a setting, argument or variable of the environment is not a part of the identity.

Each engine has tables of what it excludes, by reason; a reason that only one engine has is beside
its table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

WHEN: Final = "when, and in which batch, a token is computed; not its input"
WHERE: Final = "where processes, memory, files and caches are, and how they find each other"
KERNEL: Final = "which kernel, compiler or graph computes the same function: only rounding differs"
SPLIT: Final = "how the same function is split over workers; a file names its part of K and V"
SEEN: Final = "what is logged, measured, traced or returned"
LOGITS: Final = "what happens to the logits; tokens are in the key"
TEXT: Final = "conversion between text and tokens; tokens are in the key"
FILES: Final = "where files come from; their content counts"
READ: Final = "how bytes are read from disk; the weights' fingerprint counts"
CONTENT: Final = "changes the tensors of an image, and these are digested"
ELSEWHERE: Final = "counts in another part of the identity or of the layout"


def listed(table: Mapping[str, str]) -> frozenset[str]:
    """Return the names in a table of reasons and names: ``{WHEN: "one another"}``.

    >>> sorted(listed({WHEN: "one another", SEEN: "third"}))
    ['another', 'one', 'third']
    """
    return frozenset(" ".join(table.values()).split())
