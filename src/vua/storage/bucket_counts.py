"""What this process asks of buckets: here, so that who looks at it need not import them."""

from __future__ import annotations

from collections import Counter
from typing import Final

__all__ = ["REQUESTS_AT_ONCE", "requests"]

REQUESTS_AT_ONCE: Final = 16
"""Requests under way at a time, of all buckets of this process."""

requests: Final[Counter[str]] = Counter()
"""The sum of :attr:`vua.storage.bucket.Bucket.counts` over all buckets of this process; empty where
it has sent nothing."""
