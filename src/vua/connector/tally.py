"""How many of the chunks compared at random were wrong, and what follows for all that are loaded.

Each comparison is one byte, appended to a file of the user's own cache, ``~/.cache/vua/compared``,
one for each namespace: engines of several processes count together, and `vua doctor` reads it.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from vua.connector.proved import folder_of, name_of, replaced_by, trusted

__all__ = ["Sampled", "Tally", "upper_bound"]

_SAME, _DIFFERENT = b"=", b"x"
_MOST: Final = 1 << 17
"""Comparisons that are kept; at twice as many the older half goes."""


class Sampled(NamedTuple):
    """Chunks compared at random."""

    compared: int
    different: int

    @property
    def bound(self) -> float:
        """The share of wrong chunks among all, at most; right with a probability of 95 %."""
        return upper_bound(self.different, self.compared)


def upper_bound(different: int, compared: int, confidence: float = 0.95) -> float:
    """Return the largest share of wrong chunks that ``compared`` draws leave possible.

    The exact bound of Clopper and Pearson: with a larger share so few or fewer of the draws would
    differ in less than 1 - ``confidence`` of all cases.
    """
    if different >= compared:
        return 1.0
    ways = [
        math.lgamma(compared + 1) - math.lgamma(k + 1) - math.lgamma(compared - k + 1)
        for k in range(different + 1)
    ]
    low, high = different / compared, 1.0
    for _ in range(60):
        share = (low + high) / 2
        yes, no = math.log(share or 1e-300), math.log1p(-share) if share < 1 else -math.inf
        chance = sum(math.exp(way + k * yes + (compared - k) * no) for k, way in enumerate(ways))
        low, high = (share, high) if chance > 1 - confidence else (low, share)
    return high


class Tally:
    """The comparisons in one namespace. Never raises for the file system, which it touches."""

    def __init__(self, namespace: Path | None) -> None:
        """Count for a namespace's directory; None: for this process alone."""
        self._namespace, self._own = namespace, bytearray()

    def add(self, *, same: bool) -> None:
        """Count a comparison."""
        mark = _SAME if same else _DIFFERENT
        self._own += mark
        del self._own[:-_MOST]
        path = self._path()
        if path is None:
            return
        with suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, mark)
            finally:
                os.close(fd)
            if path.stat().st_size > 2 * _MOST:  # another process's byte may get lost now
                replaced_by(path, path.read_bytes()[-_MOST:])

    @property
    def counted(self) -> Sampled:
        """What was counted, by all engines of this user on this host where that can be told."""
        marks, path = bytes(self._own), self._path()
        if path is not None and trusted(path):
            with suppress(OSError):
                marks = path.read_bytes()[-_MOST:]
        different = marks.count(_DIFFERENT)
        return Sampled(different + marks.count(_SAME), different)

    def _path(self) -> Path | None:
        name = None if self._namespace is None else name_of(self._namespace, ())
        return None if name is None else folder_of("compared") / name
