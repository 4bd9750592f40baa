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
_KEYS: Final = {
    "days": re.compile("[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    "parted": re.compile("[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9a-f]{64}"),
}
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


def _noted(
    root: Path, name: str, read: Callable[[Any], T], key_file: str | None
) -> Iterator[tuple[str, str, T]]:
    """Yield what all files have of this name, by day (UTC), and by namespace or "".

    What cannot be read or makes no sense is left out. Raises NoKeyError alone.
    """
    for found in _files(root / UPKEEP / FOLDER, key_file):
        with suppress(TypeError, ValueError, KeyError, AttributeError):
            noted = [(at[:10], at[11:], read(each)) for at, each in found[name].items()]
            for day, *_ in noted:
                time.strptime(day, "%Y-%m-%d")
            if all(map(_KEYS[name].fullmatch, found[name])):
                yield from noted


def saved_at(root: Path, key_file: str | None = None) -> dict[str, Totals]:
    """Return what all processes saved in a cache's directory, by day. Raises NoKeyError."""
    days: dict[str, Totals] = {}
    read = _noted(root, "days", lambda one: Totals._make(map(_number, one)), key_file)
    for day, _, each in read:
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
    days: dict[str, dict[str, Parted]] = {}
    for day, name, each in _noted(root, "parted", _ends, key_file):
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


def prefills_of(root: Path, kind: str, key_file: str | None = None) -> list[tuple[float, float]]:
    """Return (tokens before, seconds per token) of the latest engine of this kind."""
    for found in _files(root / UPKEEP / FOLDER, key_file) if kind else ():
        with suppress(TypeError, ValueError, KeyError):
            points = [(_number(x), _number(y)) for x, y in found["prefills"]]
            if found["kind"] == kind and points:
                return [(x, y) for x, y in points if x >= 0 and y > 0]
    return []


def tagging(key_file: str | None) -> Callable[[str, bytes], bytes]:
    """Return what makes the tag of a file from its name and text; b"" without a key.

    Raises NoKeyError.
    """
    if key_file is None:
        return lambda *_: b""
    from vua.security.keyring import read_key  # noqa: PLC0415 - `vua ls` is quicker without
    from vua.security.seal import derived  # noqa: PLC0415 - needs an optional package

    key = read_key(Path(key_file))

    def tag(name: str, text: bytes) -> bytes:
        return hmac.digest(derived(key, "vua.saved.v1", name), text, "sha256").hex().encode()

    return tag


def _files(folder: Path, key_file: str | None) -> Iterator[Any]:
    """Yield the content of the files, the latest first; with a key, of those made with it."""
    tag_of = tagging(key_file)
    try:
        with os.scandir(folder) as entries:
            names = [(each.stat(follow_symlinks=False).st_mtime, each.path) for each in entries]
    except OSError:
        return
    for _, path in nlargest(MOST_FILES, names):
        with suppress(OSError, ValueError, RecursionError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(fd, "rb") as stream:
                text, _, tag = (data := stream.read(_MOST_NBYTES + 1)).partition(b"\n")
            ours = hmac.compare_digest(tag_of(Path(path).name, text) or tag, tag)
            if ours and len(data) <= _MOST_NBYTES and isinstance(found := json.loads(text), dict):
                yield found
