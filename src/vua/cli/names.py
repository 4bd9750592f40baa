"""Names that an operator gives: first digits of a chunk's or a namespace's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from vua.capacity.scan import Space, listed
from vua.cli.text import SHORT
from vua.errors import ConfigError

__all__ = ["Target", "resolve"]

_TARGET = re.compile(r"[0-9a-f]{6,64}")


class Target(NamedTuple):
    """What an operator names: a namespace, or a chunk in one."""

    space: Space
    chunk: str = ""


def resolve(found: Sequence[Space], text: str) -> Target:
    """Find the one thing whose name begins so. Raises ConfigError for none or several."""
    if not _TARGET.fullmatch(text):
        msg = f"{text!r} is no name; give 6 or more hex digits of a chunk's or a namespace's name"
        raise ConfigError(msg)
    hits = [Target(space) for space in found if space.name.startswith(text)]
    for space in found:
        with listed(space.fd, text[:2]) as entries:
            names = sorted(one.name for one in entries if one.name.startswith(text))
        hits += [Target(space, name) for name in names if len(name) == 64]
    if len(hits) != 1:
        some = ", ".join(f"{hit.space.name[:SHORT]}/{hit.chunk[:SHORT]}" for hit in hits[:5])
        what = f"stands for {len(hits)} things: {some}" if hits else "is not stored"
        msg = f"{text}: {what}; `vua ls --long` lists the names"
        raise ConfigError(msg)
    return hits[0]
