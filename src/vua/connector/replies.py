"""Whether later prompts begin with generated tokens, so that their chunks are worth storing."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from vua.connector.log import logger

log = logger("scheduler")

MOST_CHUNKS: Final = 256
MOST_REPLIES: Final = 16
"""So many chunks of more than so many replies are stored before the first hit, and again for each
hit. Where every fifth reply is continued, none of 16 is with a probability of 3 %. A single reply
of a model that thinks has hundreds of chunks and tells little."""
_CREDIT: Final = 64
"""At most so many hits count: what was continued long ago tells nothing of today."""
_REMEMBERED: Final = 4096
"""Replies whose first chunk is remembered, some 150 bytes each."""


class Replies:
    """Decides whether generated chunks are stored. Thread-safe; takes microseconds.

    A conversation's next prompt usually contains the last answer. But chat templates leave out what
    a model thought, and many callers ask once. For a face that stores generated tokens::

        replies.asked(prefix hashes of a new prompt)     # at each lookup
        if replies.wanted(first, chunks): ...            # before a reply's new chunks are stored

    Once :data:`MOST_CHUNKS` chunks brought no hit, `wanted` is false and one warning says so; it is
    true again after a prompt that begins with a reply, stored or not.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._firsts: OrderedDict[bytes, None] = OrderedDict()
        self._chunks = self._replies = 0
        """Noted, less what hits have earned."""
        self._told = False

    @property
    def paused(self) -> bool:
        return self._chunks >= MOST_CHUNKS and self._replies > MOST_REPLIES

    def asked(self, prefix_hashes: Iterable[bytes]) -> None:
        """Note a new prompt, by the prefix hashes of its chunks; not one that was preempted."""
        with self._lock:
            hits = [one for one in prefix_hashes if one in self._firsts] if self._firsts else []
            for first in hits:  # each reply counts once
                del self._firsts[first]
                self._chunks = max(self._chunks - MOST_CHUNKS, -_CREDIT * MOST_CHUNKS)
                self._replies = max(self._replies - MOST_REPLIES, -_CREDIT * MOST_REPLIES)

    def wanted(self, first: bytes, chunks: int) -> bool:
        """Note new chunks of a reply; return whether they are to be stored.

        Args:
            first: prefix hash of the reply's first chunk, which has its first generated token.
            chunks: how many chunks are new: with those of earlier calls all that it has by now.
        """
        with self._lock:
            if paused := self.paused:
                chunks = 0
            else:
                self._replies += first not in self._firsts
            self._chunks += chunks
            if self.paused and not self._told:
                self._told = True
                log.warning(
                    "VUA: no prompt began with one of the last %d generated chunks, so "
                    "save_generated stores no more until one does; where a chat template leaves "
                    "out what the model thought, leave out save_generated",
                    self._chunks,
                )
            self._firsts[first] = None
            if len(self._firsts) > _REMEMBERED:
                self._firsts.popitem(last=False)
            return not paused
