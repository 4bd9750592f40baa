"""Settings: whose files a process trusts, who may read what it stores, and its keys.

By default a cache is private (files 0600, directories 0700 with any umask), and only files that
this user or root wrote are read. `docs/threat-model.md` says what that defends against.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from vua.errors import ConfigError, StorageError
from vua.io.posix import close_quietly

_ROOT: Final = 0
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Settings; the defaults are the strict ones. Immutable.

    >>> Security(trusted_uids=[1000]).trusts(1000), Security().trusts(os.geteuid())
    (True, True)
    """

    trusted_uids: Sequence[int] | Literal["any"] = ()
    """User ids whose files are read, besides this process's own user and root. ``"any"`` believes
    every user who can write to the directory."""
    group_read: bool = False
    """Let the directory's group read the cache: files 0640, directories 2750. Readers of that group
    name the writer in their ``trusted_uids``."""
    key_file: str | None = None
    """A file with a secret (`vua key FILE` makes one). Only files written with it are read, and the
    names of chunks reveal nothing without it."""
    tenant_keys: str | None = None
    """A directory of keys, one per cache salt (`vua key DIR --salt S`). Requests with a salt are
    encrypted with its key. Without a key they are not cached. Deleting a key makes everything
    stored with it unreadable."""
    encrypt: bool = False
    """Also encrypt with the key of ``key_file``."""

    def __post_init__(self) -> None:
        """Refuse values of the wrong type, and encryption without a key. Raises ConfigError."""
        uids = self.trusted_uids
        if uids != "any" and (
            isinstance(uids, str | bytes)
            or not isinstance(uids, Sequence)
            or any(isinstance(uid, bool) or not isinstance(uid, int) or uid < 0 for uid in uids)
        ):
            raise ConfigError(f'trusted_uids must be a list of user ids or "any", found {uids!r}')
        object.__setattr__(self, "trusted_uids", uids if uids == "any" else tuple(uids))
        for name in ("group_read", "encrypt"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, found {getattr(self, name)!r}")
        for name in ("key_file", "tenant_keys"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value or "\0" in value):
                raise ConfigError(f"{name} must be a path, found {value!r}")
            if value is not None:  # keys are read again later, when os.chdir may have been called
                object.__setattr__(self, name, os.path.abspath(value))  # noqa: PTH100 - keeps links
        if self.encrypt and self.key_file is None:
            raise ConfigError("encrypt needs a key_file: `vua key FILE` makes one")

    @property
    def encrypts(self) -> bool:
        """Whether readers of the directory must not learn what the K and V are of."""
        return self.encrypt or self.tenant_keys is not None

    @property
    def uids(self) -> frozenset[int] | None:
        if self.trusted_uids == "any":
            return None
        return frozenset((os.geteuid(), _ROOT, *(int(uid) for uid in self.trusted_uids)))

    def trusts(self, uid: int) -> bool:
        uids = self.uids
        return uids is None or uid in uids

    @property
    def file_mode(self) -> int:
        return 0o640 if self.group_read else 0o600

    @property
    def directory_mode(self) -> int:
        return 0o2750 if self.group_read else 0o700


def check_owner(directory: Path, security: Security, what: str = "") -> None:
    """Refuse a directory in which an untrusted user could replace files.

    ``what`` names it if it is not a cache. Raises ConfigError (it belongs to an untrusted user, or
    is writable by all without a sticky bit), OSError.
    """
    if security.uids is None:
        return
    status = directory.stat()
    if not security.trusts(status.st_uid):
        raise ConfigError(
            f"{directory} belongs to user {status.st_uid}, this process runs as user "
            f"{os.geteuid()}: who owns the directory can replace what lies in it; chown it, or "
            "name that user in trusted_uids"
        )
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        mode = stat.S_IMODE(status.st_mode)
        if what:
            raise ConfigError(
                f"{directory}, a {what}, has mode {mode:o}: every user of this machine can "
                "replace what lies in it; expected: no write by all; chmod it to 700"
            )
        raise ConfigError(
            f"{directory} has mode {mode:o}: every user of this machine "
            f"can replace what lies in it; use a new directory inside it, which VUA makes private "
            f'(such as {directory / "vua"}); or chmod it to 700, or set trusted_uids to "any"'
        )


def open_directory(path: Path, security: Security) -> int:
    """Open a directory in which other users cannot replace things; a link is not followed.

    Raises OSError; StorageError if it belongs to an untrusted user.
    """
    fd = os.open(path, _DIRECTORY)
    uid = os.fstat(fd).st_uid
    if security.trusts(uid):
        return fd
    close_quietly(fd)
    msg = (
        f"{path} belongs to user {uid}, who could replace what lies in it; delete it, or set "
        "trusted_uids if that user is to be trusted"
    )
    raise StorageError(errno.EPERM, msg)
