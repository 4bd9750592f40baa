"""What loads saved, and how far prompts were found, as engines note it in a directory: for people.

Each process has one small file in ``.upkeep/saved`` (`vua.connector.savings`), for the last days
(UTC). Tools add up all files. Engines with a ``key_file`` end their files with a tag made with it,
and who reads with the key counts only these. A user who may write there can change what all others
read, and nothing else.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import date
from heapq import nlargest
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from vua.io.words import counted
from vua.storage.location import directory_of
from vua.storage.mark import UPKEEP

T = TypeVar("T")

FOLDER: Final = "saved"
DAYS: Final = 8
"""Days in a file, and days that it is kept."""
MOST_FILES: Final = 1024
"""That are read and kept: the latest."""
_MOST_NBYTES: Final = 1 << 14
_SANE: Final = 1e15
_CLASS: Final = re.compile("short|whole|[1-9][0-9]{0,11}")
_FEW: Final = 8
"""Nothing is concluded from fewer prompts."""
_EARLY: Final = 256
"""Tokens within which a date, a name or a salt is the usual reason."""

Parted: TypeAlias = Counter[str]
"""Prompts by where what is stored of them ends: ``short`` of a chunk, ``whole``, or within so many
tokens: those of a chunk, or the next power of two."""


class Totals(NamedTuple):
    """How much prompts found, and how much their loads saved."""

    asked_chunks: int = 0
    found_chunks: int = 0
    loaded_tokens: int = 0
    priced_tokens: int = 0
    """Loaded tokens for which it is known how long computing takes."""
    saved_s: float = 0.0
    """Seconds of computing them minus seconds of loading them."""

    def describe(self) -> dict[str, float | None]:
        """Return the fields; ``saved_s`` is None where it is unknown."""
        known = self.priced_tokens or not self.loaded_tokens
        return self._asdict() | {"saved_s": round(self.saved_s, 3) if known else None}

    def __str__(self) -> str:
        found = f"{self.found_chunks:,} of {self.asked_chunks:,} chunks found"
        if not self.loaded_tokens:
            return f"nothing loaded, {found}"
        time_saved = "unknown time saved (its engine has not measured three prefills)"
        if self.priced_tokens:
            time_saved = f"{self.saved_s:,.1f} s saved"
        some = 0 < self.priced_tokens < self.loaded_tokens  # others are of faces without a price
        time_saved += f" by {self.priced_tokens:,} of" if some else ","
        return f"{time_saved} {self.loaded_tokens:,} tokens loaded, {found}"


def saved_at(root: Path, key_file: str | None = None) -> dict[str, Totals]:
    """Return what all processes saved in a cache's directory, by day. Raises NoKeyError."""

    def read(found: Any) -> dict[str, Totals]:
        return {_day(at): Totals._make(map(_number, each)) for at, each in found["days"].items()}

    days: dict[str, Totals] = {}
    for noted in _files(root, read, key_file):
        for day, each in noted.items():
            days[day] = add_up((days.get(day, Totals()), each))
    return dict(sorted(days.items())[-DAYS:])


def saved_today(where: str, key_file: str | None = None) -> Totals | None:
    """Return what all processes have saved since midnight, UTC; None: nothing is known."""
    if (root := directory_of(where)) is None:
        return None
    return saved_at(root, key_file).get(time.strftime("%Y-%m-%d", time.gmtime()))


def ends_of(parted: Parted) -> str:
    """Return the numbers in words, the shortest beginnings first."""
    names = sorted(parted, key=lambda name: (name.isalpha(), len(name), name))
    return ", ".join(f"{'within ' * name.isdecimal()}{name}: {parted[name]:,}" for name in names)


def advice(parted: Parted) -> str:
    """Say in one sentence what becomes of most prompts; "" if there are too few to tell."""
    of = f"of {counted(total := parted.total(), 'prompt')}"
    if total < _FEW:
        return ""
    if parted["whole"] * 2 >= total:
        return f"{parted['whole']:,} {of} were found whole"
    if parted["short"] * 2 >= total:
        return f"{parted['short']:,} {of} are shorter than a chunk: a smaller chunk_tokens?"
    ends = {int(name): number for name, number in parted.items() if name.isdecimal()}
    most = max(ends, key=lambda end: (ends[end], -end))
    within = sum(number for end, number in ends.items() if end <= most)
    why = "a date, a name or a salt" if most <= _EARLY else "another order, or a cut history"
    return f"{within:,} {of} part within their first {most:,} tokens: {why}?"


def parted_at(root: Path, key_file: str | None = None) -> dict[str, dict[str, Parted]]:
    """Return where prompts of all processes parted, by day and namespace. Raises NoKeyError."""

    def read(found: Any) -> list[tuple[str, str, Parted]]:
        return [(_day(at[:10]), at[11:], _ends(each)) for at, each in found["parted"].items()]

    days: dict[str, dict[str, Parted]] = {}
    for noted in _files(root, read, key_file):
        for day, name, each in noted:
            spaces = days.setdefault(day, {})
            spaces[name] = spaces.get(name, Parted()) + each
    return dict(sorted(days.items())[-DAYS:])


def _ends(found: Any) -> Parted:
    numbers = {name: int(_number(number)) for name, number in found.items()}
    if min(numbers.values()) < 0 or not all(map(_CLASS.fullmatch, numbers)):
        raise ValueError(found)
    return Parted(numbers)


def add_up(several: Iterable[Totals]) -> Totals:
    """Return the sums of the fields."""
    return Totals(*map(sum, zip(*several, strict=True))) if (several := [*several]) else Totals()


def _number(value: object) -> float:
    if not isinstance(value, int | float) or not abs(value) < _SANE:
        raise ValueError(value)
    return value


def _day(text: str) -> str:
    return str(date.fromisoformat(text))


def prefills_of(root: Path, kind: str, key_file: str | None = None) -> list[tuple[float, float]]:
    """Return (tokens before, seconds per token) of the latest engine of this kind, if it has any.

    Raises NoKeyError.
    """

    def read(found: Any) -> list[tuple[float, float]]:
        points = [(_number(x), _number(y)) for x, y in found["prefills"]]
        return [(x, y) for x, y in points if found["kind"] == kind and x >= 0 and y > 0]

    return next(filter(None, _files(root, read, key_file)), []) if kind else []


def tag_of(key_file: str | None, name: str, text: bytes) -> bytes:
    """Return the tag of a file of this name and text; b"" without a key. Raises NoKeyError."""
    if key_file is None:
        return b""
    from vua.security.keyring import read_key  # noqa: PLC0415 - `vua ls` is quicker without
    from vua.security.seal import derived  # noqa: PLC0415 - needs an optional package

    key = derived(read_key(Path(key_file)), "vua.saved.v1", name)
    return hmac.digest(key, text, "sha256").hex().encode()


def _files(root: Path, read: Callable[[Any], T], key_file: str | None) -> Iterator[T]:
    """Yield what ``read`` makes of the files, the latest first; with a key, of those made with it.

    Those that cannot be read or make no sense are left out. Raises NoKeyError.
    """
    tag_of(key_file, "", b"")  # raises for a key that cannot be used
    try:
        with os.scandir(root / UPKEEP / FOLDER) as entries:
            names = [(each.stat(follow_symlinks=False).st_mtime, each.path) for each in entries]
    except OSError:
        return
    for _, path in nlargest(MOST_FILES, names):
        with suppress(OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(fd, "rb") as stream:
                text, _, tag = (data := stream.read(_MOST_NBYTES + 1)).partition(b"\n")
            ours = hmac.compare_digest(tag_of(key_file, Path(path).name, text) or tag, tag)
            if ours and len(data) <= _MOST_NBYTES:
                yield read(json.loads(text))
