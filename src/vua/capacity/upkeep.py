"""What processes that use a cache directory tell each other, and people, in ``<root>/.upkeep``.

Each process evicts for what it writes, at the same time as others: of several that delete a chunk
one succeeds, so all of them together free what they need. No process waits for another one to
evict, which may hang. One at a time looks for victims, by agreement and not by lock:
``search`` is created exclusively, its time renewed by the holder, and taken over when it has not
been renewed for `LEASE_S` *by the server's clock*. It only saves work. There may be two holders at
once: a host that slept, an NFS client that created twice.

Sweeps for victims and `vua gc`, which look at every chunk anyway, write ``census``: how many chunks
and bytes the namespaces had. Tools, and a process that starts, answer from it where counting would
take long, and tools say its date. It may be old, damaged or absent, so what it says of a namespace
is compared with two of its parts, and nothing is deleted because of it.

In ``saved`` each process has one small file (`vua.connector.load_policy`) of what loads saved, and
how far prompts were found, for the last days (UTC). Tools add up all files. Engines with a
``key_file`` end their files with a tag made with it, and who reads with the key counts only these.
A user who may write there can change what all others read, and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import date
from heapq import nlargest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

from vua.io.files import atomic_write, make_directory, make_file, make_folder, see_to_mode
from vua.io.posix import close_quietly, closing_fd
from vua.io.words import counted
from vua.storage.location import directory_of
from vua.storage.mark import UPKEEP

if TYPE_CHECKING:
    from vua.capacity.spaces import Column, Space
    from vua.native import ChunkNames

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors that mean: nothing can be made here, and perhaps nothing be changed."""
LEASE_S: Final = 30.0
"""After so long without a renewal a holder counts as dead: it renews often while it searches."""
_TICK_MAX_S: Final = 0.05
"""Longest wait for the file system's clock."""
_TICK_STEP_S: Final = 0.002
"""Interval of reading it; each read takes the GIL."""


class Bare(int):
    """A descriptor of a directory in which nothing may be made."""


def upkeep_directory(root: str | os.PathLike[str]) -> int:
    """Open (and make) the directory of the lease; the caller closes it. Raises OSError.

    The same users may write to it as to ``root``, and no other user has access: it gets the same
    group, and that group's rights if these allow writing. If a full file system has no space for
    it, or if something else has its name, ``root`` itself is returned, as a :class:`Bare` one.
    """
    path, above = Path(root) / UPKEEP, os.stat(root)
    shared = above.st_mode & 0o2070 if above.st_mode & stat.S_IWGRP else 0
    try:
        if make_folder(path):
            with suppress(OSError):  # another's group
                os.chown(path, -1, above.st_gid)
            see_to_mode(path, 0o700 | shared)
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as problem:
        if problem.errno not in (*FULL, errno.ENOTDIR, errno.ELOOP):
            raise
        return Bare(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


@contextlib.contextmanager
def upkeep_folder(root: str | os.PathLike[str], name: str) -> Iterator[int]:
    """Open (and make) a directory of ``.upkeep``. Raises OSError: it has no space, too."""
    with closing_fd(upkeep_directory(root)) as above:
        if isinstance(above, Bare):
            raise OSError(f"{root} has no directory {UPKEEP}")
        folder = make_directory(above, name, stat.S_IMODE(os.fstat(above).st_mode))
    with closing_fd(folder):
        yield folder


def server_now_ns(directory: int) -> int:
    """Return the file system's own time, ns since 1970, which ``directory`` then has as its mtime.

    Needs no space, so a full file system tells it, too. Raises OSError if ``directory`` (a
    descriptor) cannot be written to.
    """
    os.utime(directory)
    return os.fstat(directory).st_mtime_ns


def next_tick_ns(directory: int) -> int:
    """Wait until the file system's clock advances, and return its time: see :func:`server_now_ns`.

    Changes before the call have an older mtime and ctime then, changes after it do not. Linux's own
    file systems use a clock that advances every 1 to 10 ms. Waits 50 ms at most: some file systems
    keep whole seconds, and then the order is unknown.
    """
    began_s, began_ns = time.monotonic(), server_now_ns(directory)
    now_ns = began_ns
    while now_ns == began_ns and time.monotonic() - began_s < _TICK_MAX_S:
        time.sleep(_TICK_STEP_S)
        now_ns = server_now_ns(directory)
    return now_ns if now_ns != began_ns else began_ns + 1


class Lease:
    """A lease that is held."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def renew(self) -> None:
        """Renew it, if there is a file."""
        if self._fd is not None:
            with suppress(OSError):
                os.utime(self._fd)


@contextlib.contextmanager
def lease(directory: int, name: str = "search", *, stays_s: float = 0.0) -> Iterator[Lease | None]:
    """Hold a lease in ``directory`` (a descriptor); None while another process does.

    ``stays_s``: for so many seconds after its end no process gets it. On a full file system, which
    has no room for the file, several processes may hold it. Raises OSError if nothing can be
    created there.
    """
    try:
        fd = None if isinstance(directory, Bare) else _made(directory, name, stays_s or LEASE_S)
        is_free = fd is not None or isinstance(directory, Bare)
    except OSError as problem:
        if problem.errno not in FULL:
            raise
        fd, is_free = None, True
    try:
        yield Lease(fd) if is_free else None
    finally:
        if fd is not None and stays_s:
            close_quietly(fd)
        elif fd is not None:
            with suppress(OSError):
                ours = os.fstat(fd)
                there = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino):
                    os.unlink(name, dir_fd=directory)
            close_quietly(fd)


def _made(directory: int, name: str, expiry_s: float) -> int | None:
    """Make the lease, in the place of one that has expired; None while a process holds it."""
    fd = _create(directory, name)
    if fd is None and _expired(directory, name, expiry_s):
        with suppress(OSError):  # another process was faster
            os.unlink(name, dir_fd=directory)
        fd = _create(directory, name)
    return fd


def _create(directory: int, name: str) -> int | None:
    try:
        return make_file(name, os.O_EXCL, dir_fd=directory)
    except FileExistsError:
        return None


def _expired(directory: int, name: str, expiry_s: float) -> bool:
    """Whether the holder is dead.

    A time from the future is not a renewal: the clock was set back since, and a living holder
    renews again.
    """
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return True
    if not stat.S_ISREG(found.st_mode) or found.st_size:
        return False  # not created by VUA
    return abs(server_now_ns(directory) - found.st_mtime_ns) > expiry_s * 1e9


# -- the census ---------------------------------------------------------------------------------

_CENSUS: Final = "census"
_CENSUS_FORMAT: Final = "vua.census.v1"
_CENSUS_NBYTES: Final = 16 << 20
"""A longer file is not read: some ten thousand namespaces."""
_SIZED: Final = 4
"""Chunks of each part whose files are measured for the mean size."""
_NEAR: Final = 1 / 4
"""A count further than this share from what two parts of the namespace say is too old."""


class Counted(NamedTuple):
    """What a namespace had."""

    chunks: int
    nbytes: int
    """Bytes of entries: the mean of some chunks for all."""
    at_s: float
    """When that was, in seconds since 1970 by the host that counted."""
    oldest_ns: int
    """When the chunk unused for longest was used, and then the last used one; by the server."""
    newest_ns: int

    def fits(self, about: int) -> bool:
        """Whether a namespace can still be so, of about so many chunks."""
        return abs(self.chunks - about) <= about * _NEAR


def read_census(root: str | os.PathLike[str]) -> dict[str, Counted]:
    """Return the counts of each namespace; none if the census is missing or damaged."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with closing_fd(os.open(Path(root) / UPKEEP / _CENSUS, flags)) as fd:
            found = json.loads(os.read(fd, _CENSUS_NBYTES))
        if found["format"] != _CENSUS_FORMAT:
            return {}
        at_s, rows = float(found["at_s"]), dict[str, Counted]()
        for name, (chunks, nbytes, oldest_ns, newest_ns) in found["namespaces"].items():
            rows[name] = Counted(int(chunks), int(nbytes), at_s, int(oldest_ns), int(newest_ns))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
    return rows if all(min(row) >= 0 for row in rows.values()) else {}


class Tally:
    """Counts namespaces part by part."""

    def __init__(self) -> None:
        self._rows: dict[str, list[int]] = {}
        """Chunks, measured chunks and their bytes, oldest and newest use in ns."""

    def add(self, space: Space, names: ChunkNames, mtimes_ns: Column) -> None:
        """Count some chunks, and measure a few."""
        from vua.native import chunk_sizes  # noqa: PLC0415 - what only reads goes without

        if not len(names):
            return
        row = self._rows.setdefault(space.name, [0, 0, 0, int(mtimes_ns[0]), 0])
        sizes = chunk_sizes(space.fd, names[:_SIZED])
        row[0] += len(names)
        row[1] += int((sizes >= 0).sum())
        row[2] += int(sizes[sizes >= 0].sum())
        row[3] = min(row[3], int(mtimes_ns.min()))
        row[4] = max(row[4], int(mtimes_ns.max()))

    def write(self, upkeep: int) -> None:
        """Replace the census below ``upkeep``, a descriptor; what fails leaves the old one."""
        rows = {
            name: (chunks, nbytes * chunks // max(1, sized), max(0, oldest), max(0, newest))
            for name, (chunks, sized, nbytes, oldest, newest) in self._rows.items()
        }
        text = json.dumps({"format": _CENSUS_FORMAT, "at_s": time.time(), "namespaces": rows})
        if isinstance(upkeep, Bare):  # a full disk
            return
        with suppress(OSError):
            mode = 0o600 | (os.fstat(upkeep).st_mode & 0o040)  # as the directory's group
            atomic_write(_CENSUS, text.encode(), dir_fd=upkeep, mode=mode)


# -- what loads saved ---------------------------------------------------------------------------

T = TypeVar("T")

FOLDER: Final = "saved"
DAYS: Final = 8
"""Days in a file, and days that it is kept."""
MOST_FILES: Final = 1024
"""That are read and kept: the latest."""
_SAVED_NBYTES: Final = 1 << 14
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
                text, _, tag = (data := stream.read(_SAVED_NBYTES + 1)).partition(b"\n")
            ours = hmac.compare_digest(tag_of(key_file, Path(path).name, text) or tag, tag)
            if ours and len(data) <= _SAVED_NBYTES:
                yield read(json.loads(text))
