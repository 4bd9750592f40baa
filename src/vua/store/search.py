"""Which chunks are stored, where an answer takes long: many questions at once, and a memory.

Bisection asks one question after the other. At 15 ms each that is 165 ms for a prompt of 131k
tokens; 16 questions at a time find its end in three rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from vua.format.keys import ChunkKey, Keys
from vua.format.layout import KVLayout, Shard, cover
from vua.storage.base import Storage, entry_name, parse_name

__all__ = ["Search"]

_PRESENT_S: Final = 600.0
"""How long an entry that was there counts as there; a load that misses it forgets it at once."""
_ABSENT_S: Final = 2.0
"""How long one that was not there counts as missing: the next turn of a conversation comes later,
and other processes store."""
_LISTED_S: Final = 10.0
"""How often it is looked at in which shards others have stored a chunk: listing is dear."""
_MOST: Final = 1 << 17
"""Names that are remembered."""


class Search:
    """Looks for the chunks of one store. Safe for threads; each process has its own memory."""

    def __init__(
        self, storage: Storage, layout: KVLayout, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Know nothing yet."""
        self._storage, self._layout, self._clock = storage, layout, clock
        self._known: dict[str, tuple[bool, float]] = {}
        """By name: whether it was there, and until when that counts."""
        self._covers: list[tuple[Shard, ...]] = []
        """Shards that others store chunks in."""
        self._listed_s = -_LISTED_S

    def longest(self, keys: Keys, wanted: Sequence[Shard]) -> int:
        """Return how many leading chunks are stored, in O(log n) rounds; see `Store.lookup`."""
        found = self._longest(keys, wanted)
        while found < len(keys) and self._discovers(keys[found], wanted):
            found = self._longest(keys, wanted)
        return found

    def holds(self, keys: Sequence[ChunkKey], wanted: Sequence[Shard]) -> list[bool]:
        """Whether each chunk is stored in ``wanted`` or in shards that others use: one round."""
        covers = [tuple(wanted), *(one for one in self._covers if one != tuple(wanted))]
        names = [[[entry_name(key.name, shard) for shard in one] for one in covers] for key in keys]
        now_s = self._clock()
        every = dict.fromkeys(name for each in names for one in each for name in one)
        unknown = [name for name in every if self._remembered(name, now_s) is None]
        if unknown:
            self._remember(unknown, self._storage.exists(unknown), now_s)
        return [
            any(all(self._remembered(name, now_s) for name in one) for one in each)
            for each in names
        ]

    @property
    def covers(self) -> tuple[tuple[Shard, ...], ...]:
        """Shards that others store chunks in, as lookups have come upon them."""
        return tuple(self._covers)

    def wrote(self, name: str) -> None:
        """Note that an entry is there now."""
        self._remember([name], [True], self._clock())

    def forget(self, name: str) -> None:
        """Note that an entry was not there after all."""
        self._known.pop(name, None)

    def _longest(self, keys: Keys, wanted: Sequence[Shard]) -> int:
        present, absent = 0, len(keys) + 1  # chunk counts: known good, known bad
        counts = sorted({1, len(keys), *self._between(0, absent, 2)}) if len(keys) else []
        while counts:
            held = self.holds([keys[count - 1] for count in counts], wanted)
            present = max([present, *(c for c, there in zip(counts, held, strict=True) if there)])
            later = [c for c, there in zip(counts, held, strict=True) if not there and c > present]
            absent = min([absent, *later])
            if counts[0] == 1 and not held[0]:
                return 0
            counts = self._between(present, absent)
        return present

    def _between(self, present: int, absent: int, less: int = 0) -> list[int]:
        """Return the chunk counts to ask for next, evenly between two that are known."""
        parts = self._storage.capabilities.probes - less + 1
        gap = absent - present
        picked = {present + gap * part // parts for part in range(1, parts)}
        return sorted(picked - {present, absent})

    def _discovers(self, key: ChunkKey, wanted: Sequence[Shard]) -> bool:
        """Whether a look at what lies there of a chunk shows shards that nobody asked for yet."""
        now_s = self._clock()
        if now_s - self._listed_s < _LISTED_S:
            return False
        self._listed_s = now_s
        listed = (parse_name(entry.name)[1] for entry in self._storage.list(f"{key.name}/"))
        found = cover(self._layout.full, [shard for shard in listed if shard is not None])
        shards = tuple(stored for stored, _ in found or ())
        if not shards or shards == tuple(wanted) or shards in self._covers:
            return False
        self._covers.append(shards)
        self._listed_s -= _LISTED_S  # there may be more kinds
        return True

    def _remembered(self, name: str, now_s: float) -> bool | None:
        there, until_s = self._known.get(name, (False, now_s))
        return there if now_s < until_s else None

    def _remember(self, names: Sequence[str], there: Sequence[bool], now_s: float) -> None:
        if len(self._known) + len(names) > _MOST:
            self._known = {}
        for name, one in zip(names, there, strict=True):
            self._known[name] = one, now_s + (_PRESENT_S if one else _ABSENT_S)
