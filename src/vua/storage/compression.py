"""Whether the entries of one place are compressed: by its setting, or by how fast its link is."""

from __future__ import annotations

import logging
import time
from typing import Final

from vua.errors import CorruptEntryError
from vua.format.codecs import AUTO
from vua.format.compressed import PACKAGE, Compressed, compress, decompressed, is_available

__all__ = ["Compression"]

log = logging.getLogger(__name__)

_LEAST_NBYTES: Final = 256 << 10
"""Shorter transfers say more of a server's latency than of its link."""
_NEWEST: Final = 0.2
"""Weight of the newest measurement in each mean."""
_LEAST_GAIN: Final = 0.9
"""Of the time of a plain read: what saves less is not worth the work."""


class Compression:
    """Compresses and decompresses the entries of one place, and measures both. Safe for threads.

    With `auto` an entry is compressed where a thread then reads it in less time: by the mean speed
    of what it has sent and received, and by what it takes to decompress. Nothing is compressed
    before something was sent or received.
    """

    _warned: Final[set[str]] = set()
    """Places of which this process has said that it cannot read all of them."""

    def __init__(self, codec: str, where: str) -> None:
        """Begin without measurements.

        Args:
            codec: `auto`, or the name of a codec: then everything is compressed that gains by it.
            where: names the place, for the log.
        """
        self._codec, self._where = codec, where
        self._link_s = self._work_s = self._share = 0.0
        self.found_first = is_available()
        """Whether what was read last was compressed: then that form is asked for first."""
        self._told = False

    @property
    def looks(self) -> bool:
        """Whether compressed entries are looked for: they can be read, or nobody was warned yet."""
        return is_available() or self._where not in self._warned

    def unreadable(self) -> None:
        """Warn, once, that there are compressed entries which cannot be read here."""
        if self._where not in self._warned:
            self._warned.add(self._where)
            log.warning(
                "%s holds compressed entries, which are misses here: pip install %s",
                *(self._where, PACKAGE),
            )

    def moved(self, nbytes: int, took_s: float) -> None:
        """Note how long one transfer of so many bytes took."""
        if nbytes >= _LEAST_NBYTES:
            self._link_s = _mean(self._link_s, took_s / nbytes)

    def packed(self, data: bytes | memoryview) -> bytes | None:
        """Return an entry's file in compressed form where it is to be sent so, else None."""
        if not is_available() or (self._codec == AUTO and not self._link_s):
            return None
        if self._share and not self._gains():
            return None
        try:
            stored = compress(data)
        except CorruptEntryError:  # readers judge it
            return None
        if stored is None:
            return None
        self._share = _mean(self._share, len(stored) / len(data))
        if not self._work_s:
            began_s = time.thread_time()
            decompressed(memoryview(stored))
            self._worked(len(data), began_s)
        return stored if self._gains() else None

    def expanded(
        self, found: Compressed, data: memoryview, offset: int, nbytes: int, into: memoryview
    ) -> memoryview:
        """Return a part of the plain file, see :meth:`Compressed.plain`."""
        began_s = time.thread_time()
        plain = found.plain(data, offset, nbytes, into)
        self._worked(nbytes, began_s)
        return plain

    def _worked(self, nbytes: int, began_s: float) -> None:
        """Note what it took to decompress; of the processor's time, for others may use it, too."""
        if nbytes:
            self._work_s = _mean(self._work_s, (time.thread_time() - began_s) / nbytes)

    def _gains(self) -> bool:
        """Whether compressed entries are worth their work on this link."""
        if self._codec != AUTO:
            return True
        gains = self._share * self._link_s + self._work_s < _LEAST_GAIN * self._link_s
        if gains and not self._told:
            self._told = True
            log.info(
                "%s: entries are compressed to %.0f %%: %.0f MB/s come over its link, %.0f MB/s "
                "are decompressed",
                *(self._where, 100 * self._share, 1e-6 / self._link_s),
                1e-6 / max(self._work_s, 1e-12),
            )
        return gains


def _mean(mean: float, newest: float) -> float:
    return mean + _NEWEST * (newest - mean) if mean else newest
