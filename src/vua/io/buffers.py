"""Host memory for reads, reused once nothing references it.

A load into fresh memory runs at the speed of page faults, a fraction of the load's own speed (C1 of
`dev.py bench`, case *answers*). So the memory of answers is kept for later ones, up to a bound.
"""

from __future__ import annotations

import weakref
from typing import Final

import numpy as np
import numpy.typing as npt

from vua.io.forks import new_lock

_LEAST_NBYTES: Final = 1 << 20
"""Smaller buffers are left to the allocator, which keeps them itself."""
_STEPS: Final = 8
"""Sizes per power of two: at most an eighth of a buffer stays unused."""


class BufferPool:
    """Lends memory as arrays. Thread-safe; forked processes have a pool each.

    A buffer returns when nothing references the array, and not earlier: `torch.from_numpy` and
    `memoryview` of it reference it, and so do their views. A slice of the array itself does not.
    """

    def __init__(self, limit_nbytes: int) -> None:
        self._limit = limit_nbytes
        self._idle: list[npt.NDArray[np.uint8]] = []
        self._lock = new_lock()

    @property
    def idle_nbytes(self) -> int:
        """Bytes of unused memory."""
        return sum(buffer.nbytes for buffer in self._idle)

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        if nbytes < _LEAST_NBYTES or self._limit <= 0:
            return np.empty(nbytes, dtype=np.uint8)
        buffer = self._kept(nbytes)
        if buffer is None:
            step = (1 << (nbytes - 1).bit_length()) // (2 * _STEPS)
            buffer = np.empty(-(-nbytes // step) * step, dtype=np.uint8)
        lent = buffer[:nbytes]
        weakref.finalize(lent, self._give_back, buffer).atexit = False
        return lent

    def _kept(self, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """Take the smallest that fits without wasting more than half.

        Of equals the one used last: it may still be in the processor's cache.
        """
        with self._lock:
            fitting = [b for b in reversed(self._idle) if nbytes <= b.nbytes <= 2 * nbytes]
            if not fitting:
                return None
            best = min(fitting, key=lambda buffer: buffer.nbytes)
            self._idle = [buffer for buffer in self._idle if buffer is not best]
            return best

    def _give_back(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Keep a buffer, instead of older ones. Called by the garbage collector.

        That may happen anywhere, even inside :meth:`take`: so it never waits.
        """
        if buffer.nbytes > self._limit or not self._lock.acquire(blocking=False):
            return
        try:
            self._idle.append(buffer)
            while self.idle_nbytes > self._limit:
                del self._idle[0]
        finally:
            self._lock.release()
