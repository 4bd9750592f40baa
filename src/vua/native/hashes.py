"""The xxh3-64 of blocks and of headers, in Python: for what C does not do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["Digest", "digests_of", "fill_check"]

_CHECK_DIGITS: Final = 16


class Digest(Protocol):
    """What the bytes of one block are fed to: a hash, or one block's seal."""

    def update(self, view: memoryview, /) -> object:
        """Take the next bytes."""
        ...

    def intdigest(self) -> int:
        """Return the result as a number."""
        ...


def digests_of(blocks: Iterable[Iterable[memoryview]]) -> list[int]:
    """Return the xxh3-64 of each block: the only place where Python hashes K and V."""
    digests = []
    for block in blocks:
        digest = xxhash.xxh3_64()
        for part in block:
            digest.update(part)
        digests.append(digest.intdigest())
    return digests


def fill_check(header: npt.NDArray[np.uint8], check_offset: int) -> None:
    """Complete a header by its check of itself: taken with zeros for the check's own digits."""
    check = header[check_offset : check_offset + _CHECK_DIGITS]
    check[:] = ord("0")
    digits = xxhash.xxh3_64_hexdigest(header.data).encode()
    check[:] = np.frombuffer(digits, dtype=np.uint8)
