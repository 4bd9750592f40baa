"""What may be copied between the places of a tiered cache: the user's rules."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import stat
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from vua.capacity.lease import upkeep_directory
from vua.capacity.lru import server_now_ns
from vua.errors import ConfigError
from vua.format.codecs import OFF, check_codec
from vua.storage.mark import WRITTEN_BACK

__all__ = ["DailyBudget", "TierRules"]

_ALWAYS: Final = "always"
_SECOND_USE: Final = "second_use"
_DAY_NS: Final = 86400 * 10**9
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRules:
    """Settings of buckets, and of a directory with places behind it."""

    upload_mib_s: float | None = None
    """Bandwidth for what travels on, in MiB per second; None: what there is."""
    write_back: str = _ALWAYS
    """What is written back to the directory: ``"always"``: what was read from behind;
    ``"second_use"``: what the same process has read from behind before."""
    write_back_gib_per_day: float | None = None
    """GiB that all processes together write back to the directory per day; None: any number."""
    codec: str = OFF
    """Whether entries are compressed in buckets: "off", "auto" (where that makes reads faster), or
    the name of a codec; see :mod:`vua.storage.compression`."""

    def __post_init__(self) -> None:
        """Refuse what is no rule. Raises ConfigError."""
        if self.write_back not in (_ALWAYS, _SECOND_USE):
            msg = f'write_back must be "{_ALWAYS}" or "{_SECOND_USE}", found {self.write_back!r}'
            raise ConfigError(msg)
        check_codec(self.codec)
        for name in ("upload_mib_s", "write_back_gib_per_day"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value < math.inf):
                msg = f"{name} must be a positive number, found {value!r}"
                raise ConfigError(msg)

    @classmethod
    def of(cls, settings: object) -> TierRules:
        """Return the rules among other settings, by their names. Raises ConfigError."""
        return cls(**{one.name: getattr(settings, one.name) for one in fields(cls)})

    @property
    def at_second_use(self) -> bool:
        """Whether what is read from behind for the first time is not written back."""
        return self.write_back == _SECOND_USE


class DailyBudget:
    """Bytes per day that all processes together may write for one purpose, against wear of a disk.

    ``<root>/.upkeep/written-back`` holds the day and what was taken of it; a lock on that file
    makes the count exact. Days are of UTC, by the clock of the file system. Safe for threads and
    processes.
    """

    def __init__(self, root: Path, day_nbytes: int) -> None:
        """Give out ``day_nbytes`` a day for the cache in the directory ``root``."""
        self._root, self._day_nbytes = root, day_nbytes

    def take(self, nbytes: int) -> bool:
        """Whether ``nbytes`` are left of today; they are taken then. Raises OSError."""
        directory = upkeep_directory(self._root)
        try:
            today = server_now_ns(directory) // _DAY_NS
            fd = os.open(WRITTEN_BACK, _FLAGS, 0o600, dir_fd=directory)
        finally:
            os.close(directory)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                raise FileExistsError(errno.EEXIST, "something else has its name", WRITTEN_BACK)
            fcntl.flock(fd, fcntl.LOCK_EX)
            taken = _taken(os.pread(fd, 64, 0), today) + nbytes
            if taken > self._day_nbytes:
                return False
            os.pwrite(fd, f"{today:010d} {taken:020d}\n".encode(), 0)
        finally:
            os.close(fd)
        return True


def _taken(text: bytes, today: int) -> int:
    """Return how many bytes were taken today by what the file says."""
    day, _, nbytes = text.partition(b" ")
    is_today = day.isdigit() and int(day) == today and nbytes.strip().isdigit()
    return int(nbytes) if is_today else 0
