"""Words and sizes that stand in headers, for those who write them and those who read them."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["AUTHENTIC", "ENCRYPTED", "FORMAT", "PLAIN", "SEALED", "SEALED_V1", "SealInfo"]

FORMAT: Final = "vua.entry.v1"
SEALED: Final = "vua.sealed.v2"
SEALED_V1: Final = "vua.sealed.v1"
"""Still read, and not written any more: a file's key is derived from its nonce alone."""
AUTHENTIC: Final = "gmac"
"""A kind of seal: whoever has the key can tell who wrote the file; K and V are in clear."""
ENCRYPTED: Final = "aes-256-gcm"
"""The other kind: and K and V are encrypted."""
TAG_NBYTES: Final = 16
NO_HASH: Final = "-" * 64
"""Stands for the parent of a chunk that has none."""
MAX_HEADER_NBYTES: Final = 1 << 20
"""Larger than any real header: 1 MiB of checksums are 131,072 blocks."""


class SealInfo(NamedTuple):
    """What a sealed file says about its seal; of a plain file both are empty."""

    key_id: str = ""
    """Which key, 16 hex; tells nothing about it."""
    nonce: str = ""
    """Of this file alone, 32 hex."""
    format: str = SEALED
    """Of a sealed file: :data:`SEALED` or :data:`SEALED_V1`."""


PLAIN: Final = SealInfo()
