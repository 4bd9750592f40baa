"""Names of ways to keep entries in a bucket; :mod:`vua.format.compressed` is one of them."""

from __future__ import annotations

from typing import Final

from vua.errors import ConfigError

__all__ = ["AUTO", "CODEC", "OFF", "check_codec"]

OFF: Final = "off"
AUTO: Final = "auto"
CODEC: Final = "planes-zstd"
"""High bytes through zstd, the others as they are: the one codec so far."""


def check_codec(codec: object) -> None:
    """Refuse what is no setting. Raises ConfigError."""
    if codec not in (OFF, AUTO, CODEC):
        msg = f'codec must be "{OFF}", "{AUTO}" or "{CODEC}", found {codec!r:.60}'
        raise ConfigError(msg)
