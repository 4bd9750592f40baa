"""How large a cache may grow: settings, who may set them, and their values in bytes.

Limits have three sources: a process (`VUAConfig`, the connector's settings), the operator
(``<root>/bounds.json``, which `vua gc --set` and `vua ttl` write) and the defaults. The stricter
limit of process and operator applies; a default applies only if neither sets one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

from vua.errors import ConfigError
from vua.io.files import atomic_write
from vua.storage.mark import LIMITS_FILE

FORMAT: Final = "vua.bounds.v1"

DEFAULT_MAX: Final = "80%"
"""Share of the file system that the cache may fill. The rest is for other users of the disk; ext4
and XFS are slow when nearly full."""
DEFAULT_MIN_FREE: Final = "5%"
"""Share of the file system that is left free, so that other programs can still write."""
DEFAULT_MIN_FREE_MOST: Final = 10 << 30
"""Upper limit of DEFAULT_MIN_FREE in bytes: 5 % of a large file system is more than needed."""
DEFAULT_MIN_FREE_INODES: Final = "2%"
"""Share of the file system's inodes that is left free. Each chunk takes two, and the last one is
needed to tell the time and to hold the lease. File systems that make inodes on demand (btrfs) count
none, and have no such limit."""

MAX_NBYTES: Final = (1 << 63) - 1
"""The largest size that file systems can express."""
MAX_TTL_S: Final = 10**10
"""Some 300 years."""

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(?:iB|B)?", re.IGNORECASE)
MAX_BOUNDS_NBYTES: Final = 1 << 16
"""A longer ``bounds.json`` is unusable."""
_LEAST_BARE: Final = 1 << 20
"""Text without a unit that gives fewer bytes has lost its unit: 80 for 80%."""
_SHARE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*%")


def nbytes_of(value: int | str, whole: int) -> int:
    """Return a size in bytes: a number, text like ``"500G"`` (of 1024), or a share of ``whole``.

    >>> nbytes_of("1.5 GiB", 0), nbytes_of("80%", 1000), nbytes_of(7, 0)
    (1610612736, 800, 7)

    Raises ConfigError for anything else, and for text without a unit below 1 MiB.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_NBYTES:
        return value
    text = value.strip() if isinstance(value, str) else ""
    if match := _SHARE.fullmatch(text):
        if float(match[1]) <= 100:
            return int(whole * float(match[1]) / 100)
    elif match := _SIZE.fullmatch(text):
        if not match[2] and text[-1:] not in "Bb" and 0 < float(match[1]) < _LEAST_BARE:
            raise ConfigError(
                f"{value!r} has no unit: give '{text}%' of the disk, '{text}G', "
                f"or '{text}B' for bytes"
            )
        nbytes = float(match[1]) * (1 << 10 * " KMGTP".index(match[2].upper() or " "))
        if nbytes <= MAX_NBYTES:
            return int(nbytes)
    known = "a number of bytes, '500G' or a share of the disk like '80%'"
    raise ConfigError(f"{value!r:.40} is not a size; give {known}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one source (a process, the operator). None: not set by it."""

    max_bytes: int | str | None = None
    """Bytes of all files of the cache, as a number, ``"500G"`` or a share of the file system."""
    min_free_bytes: int | str | None = None
    """Bytes of the file system that the cache leaves free, in the same forms."""
    ttl_s: float | None = None
    """Seconds without use after which a chunk is deleted."""
    max_bytes_per_salt: int | str | None = None
    """Bytes per cache salt (more exactly: per extras of a first chunk); applied by `vua gc`
    alone."""
    min_free_inodes: int | str | None = None
    """Inodes (files and directories) of the file system that the cache leaves free: a number, or a
    share like ``"2%"``."""

    def __post_init__(self) -> None:
        """Raise ConfigError for values that are not a size or a time."""
        for name in ("max_bytes", "min_free_bytes", "max_bytes_per_salt", "min_free_inodes"):
            value = getattr(self, name)
            if value is not None:
                try:
                    nbytes_of(value, 0)
                except ConfigError as problem:
                    raise ConfigError(f"{name}: {problem}") from problem
        ttl_s = self.ttl_s
        if ttl_s is not None and (
            isinstance(ttl_s, bool)
            or not isinstance(ttl_s, int | float)
            or not 0 < ttl_s < MAX_TTL_S
        ):
            msg = f"ttl_s must be a positive number of seconds below 10^10, found {ttl_s!r:.40}"
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True)
class ResolvedLimits:
    """The limits in force, from all sources, in bytes and seconds."""

    max_bytes: int
    min_free_bytes: int
    ttl_s: float | None
    max_bytes_per_salt: int | None
    min_free_inodes: int = 0

    @classmethod
    def of(
        cls,
        root: str | os.PathLike[str],
        *own: Limits,
        file: bool = True,
    ) -> ResolvedLimits:
        """Combine limits with ``bounds.json`` of ``root``, for its file system as it is now.

        Args:
            root: directory of the cache.
            own: the process's limits.
            file: whether ``bounds.json`` is read.

        Raises ConfigError (an unusable ``bounds.json``), OSError.
        """
        status = os.statvfs(root)
        whole = status.f_blocks * status.f_frsize
        everything = (*own, read_bounds(root)) if file else own

        def sizes(name: str, whole: int = whole) -> list[int]:
            values = (getattr(bounds, name) for bounds in everything)
            return [nbytes_of(value, whole) for value in values if value is not None]

        return cls(
            max_bytes=min(sizes("max_bytes") or [nbytes_of(DEFAULT_MAX, whole)]),
            min_free_bytes=max(
                sizes("min_free_bytes")
                or [min(nbytes_of(DEFAULT_MIN_FREE, whole), DEFAULT_MIN_FREE_MOST)]
            ),
            ttl_s=min((one.ttl_s for one in everything if one.ttl_s is not None), default=None),
            max_bytes_per_salt=min(sizes("max_bytes_per_salt"), default=None),
            min_free_inodes=max(
                sizes("min_free_inodes", status.f_files)
                or [nbytes_of(DEFAULT_MIN_FREE_INODES, status.f_files)]
            ),
        )


def read_bounds(root: str | os.PathLike[str]) -> Limits:
    """Return the limits in ``bounds.json``; empty without one.

    Raises ConfigError for an unusable file or value.
    """
    path = Path(root) / LIMITS_FILE
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(path, flags), "rb") as stream:
            data = stream.read(MAX_BOUNDS_NBYTES)
    except FileNotFoundError:
        return Limits()
    except OSError as problem:
        raise ConfigError(
            f"{path} cannot be read ({problem.strerror}), so its limits are not known; "
            f"let user {os.geteuid()} read it"
        ) from problem
    return parse_bounds(data, path)


def parse_bounds(data: bytes, path: object) -> Limits:
    """Parse the bytes of a ``bounds.json``; ``path`` names the file in errors.

    Raises ConfigError.
    """
    try:
        bounds = json.loads(data)
        if not isinstance(bounds, Mapping) or bounds.get("format") != FORMAT:
            raise ConfigError(f"expected an object of format {FORMAT!r}")
        known = {field.name for field in fields(Limits)}
        if unknown := bounds.keys() - known - {"format"}:
            raise ConfigError(f"unknown settings {sorted(unknown)}, known are {sorted(known)}")
        return Limits(**{name: bounds[name] for name in bounds.keys() & known})
    except (ValueError, TypeError, RecursionError) as problem:
        raise ConfigError(f"{path} is unusable: {problem}; mend or delete it") from problem


def bounds_text(bounds: Limits) -> bytes:
    """Return the bytes of a ``bounds.json`` with these limits."""
    values = {name: value for name, value in asdict(bounds).items() if value is not None}
    return json.dumps({"format": FORMAT, **values}, indent=1).encode() + b"\n"


def write_bounds(root: str | os.PathLike[str], bounds: Limits) -> None:
    """Replace ``bounds.json``, all or nothing. Raises OSError."""
    atomic_write(Path(root) / LIMITS_FILE, bounds_text(bounds), durable=True)
