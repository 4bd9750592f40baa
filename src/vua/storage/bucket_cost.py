"""What requests to a bucket cost, at list prices: other providers, regions and contracts differ.

What this process asks of buckets: here, so that who looks at it need not import them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

__all__ = ["DOLLARS_PER_GB_MONTH", "KINDS", "REQUESTS_AT_ONCE", "cost_dollars", "requests"]

_DOLLARS: Final[Mapping[str, float]] = {
    "list": 5e-6,
    "head": 4e-7,
    "get": 4e-7,
    "put": 5e-6,
    "copy": 5e-6,
    "delete": 0.0,
}
"""Of one request to AWS S3 Standard in us-east-1. A request for many deletions counts once."""
KINDS: Final = tuple(_DOLLARS)
"""Kinds of requests, as :attr:`vua.storage.bucket.Bucket.counts` has them."""
DOLLARS_PER_GB_MONTH: Final = 0.023
"""Of what is stored there, per 10^9 bytes."""


def cost_dollars(counts: Mapping[str, int]) -> float:
    """Return what requests cost, by how many there were of each kind.

    >>> cost_dollars({"put": 1000, "get": 1000, "delete": 7, "failed": 3})
    0.0054
    """
    return round(sum(_DOLLARS[kind] * counts.get(kind, 0) for kind in KINDS), 9)


REQUESTS_AT_ONCE: Final = 16
"""Requests under way at a time, of all buckets of this process."""

requests: Final[Counter[str]] = Counter()
"""The sum of :attr:`vua.storage.bucket.Bucket.counts` over all buckets of this process; empty where
it has sent nothing."""
