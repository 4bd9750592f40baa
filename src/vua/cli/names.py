"""Names that an operator gives: first digits of a chunk's or a namespace's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from vua.capacity.scan import Space, listed
from vua.cli.text import SHORT
from vua.errors import ConfigError

__all__ = ["Target", "only", "resolve", "wanted_name"]

T = TypeVar("T")

_TARGET = re.compile(r"[0-9a-f]{6,64}")


class Target(NamedTuple):
    """What an operator names: a namespace, or a chunk in one."""

    space: Space
    chunk: str = ""


def resolve(found: Sequence[Space], text: str) -> Target:
    """Find the one thing whose name begins so. Raises ConfigError for none or several."""
    wanted_name(text)
    hits = {(space.name, ""): Target(space) for space in found if space.name.startswith(text)}
    for space in found:
        with listed(space.fd, text[:2]) as entries:
            names = sorted(one.name for one in entries if one.name.startswith(text))
        hits.update({(space.name, one): Target(space, one) for one in names if len(one) == 64})
    return only(hits, text)


def wanted_name(text: str) -> None:
    """Raise ConfigError for what are no first digits of a name."""
    if not _TARGET.fullmatch(text):
        msg = f"{text!r} is no name; give 6 or more hex digits of a chunk's or a namespace's name"
        raise ConfigError(msg)


def only(hits: Mapping[tuple[str, str], T], text: str) -> T:
    """Return the one hit, by the names of namespace and chunk. Raises ConfigError otherwise."""
    if len(hits) != 1:
        some = ", ".join(f"{space[:SHORT]}/{chunk[:SHORT]}" for space, chunk in list(hits)[:5])
        what = f"stands for {len(hits)} things: {some}" if hits else "is not stored"
        msg = f"{text}: {what}; `vua ls --long` lists the names"
        raise ConfigError(msg)
    return next(iter(hits.values()))
