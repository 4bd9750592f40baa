"""Keeps objects of a bucket young that are used, so that its lifecycle rule takes only the rest.

A bucket counts from the last write. Where the cache's ``bounds.json`` says how long an object lives
that nobody uses (``ttl_s``), a use renews what has passed half of that: it is copied at the server.
A process looks at a chunk at most four times in such a life, by one request; a renewal takes two
copies and a deletion per object. All of it happens on a thread of its own. What a look does not
find any more is told to whoever can send it again from a directory in front.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from vua.capacity.bucket import read_bucket_bounds
from vua.capacity.limits import Limits
from vua.capacity.touches import Recent, Touches
from vua.errors import ConfigError
from vua.storage.local import chunk_path
from vua.storage.names import entry_at

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from vua.format.keys import Keys
    from vua.storage.bucket_path import BucketPath

__all__ = ["Renewal"]

log = logging.getLogger(__name__)

_BOUNDS_S: Final = 600.0
"""How long it is believed what ``bounds.json`` said."""
_CLOSE_S: Final = 5.0
"""How long the end of a cache waits for what is queued."""


class Renewal:
    """Renews the chunks of one namespace. Safe for threads; each process looks by itself."""

    def __init__(
        self,
        place: BucketPath,
        bounds: Limits | None = None,
        seen: Callable[[str, Collection[str]], None] | None = None,
    ) -> None:
        """Renew objects of the namespace in ``place``; sends nothing.

        Of the ``ttl_s`` in ``bounds`` and in ``bounds.json`` the shorter one holds. ``seen`` is
        told, after each listing of a chunk, which of its entries are in the bucket.
        """
        self._place, self._bounds, self._seen = place, bounds or Limits(), seen
        self.counts: Counter[str] = Counter()
        """So far: looked (chunks), renewed (objects), failed."""
        self._touches: Touches[Sequence[str]] = Touches(self._renew)
        self._stop_s = math.inf
        self._life_s: float | None = None
        self._asked_s = -_BOUNDS_S
        self._recent = Recent(0.0)
        self._file = ""
        """How the entries of this namespace were last seen to be called in a chunk's folder."""

    def close(self) -> None:
        """Look at what is queued, for some seconds at most; a second call does nothing."""
        self._stop_s = min(self._stop_s, time.monotonic() + _CLOSE_S)
        self._touches.close()

    def used(self, keys: Keys, chunks: int) -> None:
        """Note that the first ``chunks`` chunks of ``keys`` were used; returns at once."""
        if chunks and self._stop_s == math.inf and self._touches.wants(keys[chunks - 1].name):
            self._touches.touch([keys[place].name for place in range(chunks)])

    def _renew(self, chunks: Sequence[str]) -> None:
        """Look at chunks that nobody here has looked at lately, and renew the old ones."""
        try:
            life_s = self._life()
            for chunk in chunks:
                if life_s is None or time.monotonic() > self._stop_s:
                    return
                if self._recent.passes(chunk):
                    self._look(chunk, time.time() - life_s / 2)
        except (OSError, ConfigError) as problem:  # what is left is looked at the next time
            self.counts["failed"] += 1
            log.debug("%s: not renewed: %s", self._place, problem)

    def _life(self) -> float | None:
        """Return how long an object lives that nobody uses. Raises StorageError, ConfigError."""
        now_s = time.monotonic()
        if now_s - self._asked_s >= _BOUNDS_S:
            said = (self._bounds, read_bucket_bounds(self._place.parent))
            life_s = min((one.ttl_s for one in said if one.ttl_s is not None), default=None)
            if life_s is not None and life_s != self._life_s:
                self._recent = Recent(life_s / 4)
            self._life_s, self._asked_s = life_s, now_s
        return self._life_s

    def _look(self, chunk: str, before_s: float) -> None:
        """Renew what was written before then of a chunk. Raises StorageError.

        This host's clock is good enough: a bucket refuses requests of one that is minutes off.
        """
        self.counts["looked"] += 1
        bucket, folder = self._place.bucket, self._place / chunk_path(chunk)
        if self._file:
            try:
                if bucket.head((folder / self._file).key).modified_s >= before_s:
                    return
            except FileNotFoundError:
                pass  # stored in other shards, or gone
        names = set()
        for one in list(bucket.walk(folder.key)):
            name = entry_at(one.key.removeprefix(f"{self._place.key}/"))
            if not name:
                continue
            names.add(name)
            self._file = one.key.rpartition("/")[2]
            if one.modified_s < before_s:
                bucket.renew(one.key)
                self.counts["renewed"] += 1
        if self._seen is not None:
            self._seen(chunk, names)
