"""What bounds a cache in a bucket: the bucket's own rules, and `vua gc`; not who writes.

A bucket has no times of use, and looking through it costs requests. So nothing is evicted here: the
bucket's lifecycle rule deletes what is old, see docs/object-stores.md. ``bounds.json`` lies there
as in a directory; its ``ttl_s`` is the life of an object that nobody uses.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from vua.capacity.limits import MAX_BOUNDS_NBYTES, Limits, bounds_text, parse_bounds
from vua.capacity.reservation import Unlimited
from vua.format.keys import ChunkKey, Keys
from vua.storage.bucket_path import BucketPath
from vua.storage.mark import LIMITS_FILE

__all__ = ["BucketCapacity", "read_bucket_bounds", "write_bucket_bounds"]

log = logging.getLogger(__name__)


class BucketCapacity:
    """What :class:`vua.capacity.reservation.Capacity` is for a directory. Safe for threads."""

    batch_bytes = 1 << 40

    def __init__(self, where: str, bounds: Limits | None = None) -> None:
        """Bound nothing of ``where``; says so where ``bounds`` ask for it."""
        self.counts: Counter[str] = Counter()
        if bounds is not None and bounds.max_bytes is not None:
            log.warning(
                "%s: max_bytes is kept by `vua gc` and by the bucket's lifecycle rule, not by who "
                "writes",
                where,
            )

    def close(self) -> None:
        """Do nothing."""

    def reserve(
        self, keys: Sequence[ChunkKey], nbytes: int, ttl_s: float | None = None
    ) -> Unlimited:
        """Return all the space there is."""
        del keys, nbytes, ttl_s
        return Unlimited()

    def used(self, keys: Keys, chunks: int, *, wait: bool = False) -> None:
        """Do nothing."""

    def pin(self, chunk: str) -> bool:
        """Hold nothing: no rule of a bucket knows pins."""
        del chunk
        return False

    def pin_prefix(self, chunks: Sequence[str]) -> int:
        """Hold nothing."""
        del chunks
        return 0

    def unpin_prefix(self, chunks: Sequence[str]) -> int:
        """Release nothing."""
        del chunks
        return 0

    def raise_ttls(self, chunk: str, ttl_s: float) -> None:
        """Do nothing."""

    def on_evicted(self, tell: Callable[[str], None]) -> None:
        """Do nothing: nothing is evicted here."""


def read_bucket_bounds(place: BucketPath) -> Limits:
    """Return what ``bounds.json`` of a cache says; nothing where there is none.

    Raises StorageError; ConfigError for one that is unusable.
    """
    try:
        data = (place / LIMITS_FILE).read(MAX_BOUNDS_NBYTES)
    except FileNotFoundError:
        return Limits()
    return parse_bounds(data, place / LIMITS_FILE)


def write_bucket_bounds(place: BucketPath, bounds: Limits) -> None:
    """Replace ``bounds.json`` of a cache. Raises StorageError."""
    place.bucket.put((place / LIMITS_FILE).key, bounds_text(bounds))
