"""Where entries are kept: directories, buckets; names, marks and descriptions.

Also the process's requests to buckets, and their cost at list prices: other providers and contracts
differ. Readers of the counts need not import clients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

_DOLLARS: Final[Mapping[str, float]] = {
    "list": 5e-6,
    "head": 4e-7,
    "get": 4e-7,
    "put": 5e-6,
    "copy": 5e-6,
    "delete": 0.0,
}
"""Per request, see `PRICES`. A bulk deletion counts as one request."""
PRICES: Final = (
    "AWS S3 Standard, us-east-1 (https://aws.amazon.com/s3/pricing), as "
    "https://c3x.dev/blog/s3-request-fees-explained gives them, read on 2026-11-26"
)
"""Whose prices these are, and where and when they were read."""
KINDS: Final = tuple(_DOLLARS)


def cost_dollars(counts: Mapping[str, int]) -> float:
    """Return the cost of requests, given the number of each kind.

    >>> cost_dollars({"put": 1000, "get": 1000, "delete": 7, "failed": 3})
    0.0054
    """
    return round(sum(_DOLLARS[kind] * counts.get(kind, 0) for kind in KINDS), 9)


REQUESTS_AT_ONCE: Final = 16
"""Concurrent requests, over all buckets of this process."""

requests: Final[Counter[str]] = Counter()
"""Sum of :attr:`vua.storage.bucket.Bucket.counts` over all buckets of this process."""
