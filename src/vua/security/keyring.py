"""Keys in files: the directory's own, and one per tenant.

A key file holds 64 hex digits and belongs to this process's user or to root. Only the owner may
write it; its group may read it (Kubernetes mounts Secrets like that for a pod's ``fsGroup``); all
other access is refused. ``key_file`` is the directory's own key. ``tenant_keys`` is a directory
with one file per cache salt, under a name derived from the salt (:func:`tenant_of`), so a salt
never becomes a path. Each use checks the file again: once it is deleted, everything sealed with it
is a miss at once, here and in every other process.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import secrets
import stat
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from vua.errors import ConfigError
from vua.format.keys import Naming
from vua.io.files import make_file
from vua.io.forks import new_lock
from vua.security.settings import Security, check_owner

if TYPE_CHECKING:
    from vua.security.seal import Seal

log = logging.getLogger(__name__)

SUFFIX: Final = ".key"
_KEY_NBYTES: Final = 32
_TENANT_TAG: Final = b"vua.tenant.v1"
_REMEDY: Final = "`vua key FILE` makes a new one"
_FORBIDDEN: Final = 0o037
"""Mode bits a key file must not have: any access for the world, write or run for the group."""
_FAULT_S: Final = 60.0
_FAULTS: Final = 10
"""Log lines per minute and kind of fault: clients may invent salts."""

Fault = Literal["missing", "gone", "unreadable", "wrong"]


class NoKeyError(ConfigError):
    """A key is missing or unusable: what it seals is neither read nor written."""

    fault: Fault = "wrong"
    """``missing``, ``gone`` (it existed earlier), ``unreadable`` or ``wrong``. ``unreadable``: the
    system refuses to read it. ``wrong``: other users may read or change it, or it does not hold a
    key."""
    key: str = ""
    """Path of its file."""

    @classmethod
    def of(cls, fault: Fault, path: Path, text: str) -> NoKeyError:
        error = cls(f"{path}{text}")
        error.fault, error.key = fault, str(path)
        return error


class KeyFaults:
    """Logs faults of keys: each key once a minute, and some keys a minute per kind of fault.

    A client that invents salts cannot silence other kinds of faults, nor its own kind for longer
    than a minute. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, new_lock()
        self._minute, self._told = -1, defaultdict[str, set[str]](set)

    def tell(self, problem: NoKeyError, what: str, to: logging.Logger = log) -> None:
        """Log that ``what`` (such as "not cached") follows from a key's fault."""
        minute = int(self._clock() // _FAULT_S)
        with self._lock:
            if minute != self._minute:
                self._minute = minute
                self._told.clear()
            told = self._told[problem.fault]
            if problem.key in told or len(told) >= _FAULTS:
                return
            told.add(problem.key)
        to.warning("%s: %s", what, problem)


def tenant_of(salt: bytes) -> str:
    """Return the file name, 32 hex digits, for a cache salt in a directory of keys.

    >>> tenant_of(b"customer 7")
    '732c2107f43cd5d6b0538627fe4d8fc3'
    """
    return hashlib.sha256(_TENANT_TAG + salt).hexdigest()[:32]


def write_key(path: Path) -> None:
    """Make a new random key file, mode 0600. Raises FileExistsError, OSError."""
    with open(make_file(path, os.O_EXCL), "w", encoding="ascii") as stream:  # noqa: PTH123
        if os.fstat(stream.fileno()).st_mode & _FORBIDDEN:
            path.unlink()
            text = "this file system lets others read each file: keep keys on another one"
            raise PermissionError(errno.EPERM, text, str(path))
        stream.write(secrets.token_hex(_KEY_NBYTES) + "\n")


def read_key(path: Path) -> bytes:
    """Return the 32 bytes of a key file. Raises NoKeyError with the reason."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:  # noqa: PTH123
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise NoKeyError.of("wrong", path, f" is not a regular file; {_REMEDY}")
            if status.st_mode & _FORBIDDEN or status.st_uid not in (os.geteuid(), 0):
                user = f"user {os.geteuid()}" + " or root" * bool(os.geteuid())
                text = (
                    f" belongs to user {status.st_uid} and has mode "
                    f"{stat.S_IMODE(status.st_mode):o}; expected: {user}, and mode 600 or 400 "
                    "(640 or 440 where its group may read it). A key that others may read or "
                    "change is not used: chown it to this process's user and chmod it to 600"
                )
                raise NoKeyError.of("wrong", path, text)
            text = stream.read(1024).decode("ascii", "replace").strip()
    except OSError as problem:
        raise _absent(path, problem) from problem
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != _KEY_NBYTES:
        raise NoKeyError.of("wrong", path, f" does not hold 64 hex digits; {_REMEDY}")
    return key


def _absent(path: Path, problem: OSError) -> NoKeyError:
    fault: Fault = "missing" if isinstance(problem, FileNotFoundError) else "unreadable"
    return NoKeyError.of(fault, path, f": {problem.strerror}; {_REMEDY}")


def _check_directory(directory: Path, security: Security) -> None:
    """Refuse a directory of keys in which other users could replace them.

    ``trusted_uids`` may own it; "any" applies to caches alone. Raises ConfigError, OSError.
    """
    uids = () if security.trusted_uids == "any" else security.trusted_uids
    check_owner(directory, Security(trusted_uids=uids), "directory of keys")


def check_keys(security: Security) -> None:
    """Refuse settings whose keys cannot be used, so that a mistake shows at once.

    Raises ConfigError (NoKeyError for the key file); a tenant's key may be missing.
    """
    if not isinstance(security, Security):
        msg = f"security must be a vua.security.settings.Security, found {security!r:.80}"
        raise ConfigError(msg)
    Keyring("", security).naming()
    if security.tenant_keys is not None:
        directory = Path(security.tenant_keys)
        if not directory.is_dir():
            msg = f"tenant_keys: {security.tenant_keys} is not a directory; `vua key DIR --salt S`"
            raise ConfigError(msg)
        _check_directory(directory, security)
        _seal(bytes(_KEY_NBYTES), "", encrypt=True)  # the package is there


class Keyring:
    """The keys of one namespace. Safe for threads."""

    def __init__(self, namespace: str, security: Security) -> None:
        self._namespace, self._security = namespace, security
        self._seals: dict[str, tuple[object, Seal]] = {}
        self._gone: set[Path] = set()
        self.faults = KeyFaults()

    def naming(self, salt: bytes = b"") -> Naming | None:
        """Return what makes chunk names of a request with this salt secret; None for plain names.

        Raises NoKeyError if its key is unavailable: such a request must not be cached.
        """
        tenant = tenant_of(salt) if salt and self._security.tenant_keys is not None else ""
        seal = self.seal(tenant)
        return None if seal is None else Naming(tenant, seal.naming)

    def seals(self, tenant: str = "") -> bool:
        return self._path(tenant) is not None

    def seal(self, tenant: str = "") -> Seal | None:
        """Return the seal of a tenant's files, or of the directory's own; None for plain files.

        Raises NoKeyError.
        """
        path = self._path(tenant)
        if path is None:
            return None
        try:
            status = path.stat()
            state: tuple[int, ...] = (
                *(status.st_dev, status.st_ino, status.st_mtime_ns),
                *(status.st_mode, status.st_uid),
            )
            if tenant:
                above = path.parent.stat()
                state = (*state, above.st_mode, above.st_uid)
        except OSError as problem:
            known = self._seals.pop(tenant, None)
            error = _absent(path, problem)
            if error.fault == "missing" and (known or path in self._gone):
                error.fault = "gone"
                self._gone = {path, *list(self._gone)[:_FAULTS]}
            raise error from problem
        known = self._seals.get(tenant)
        if known is None or known[0] != state:
            if tenant:
                try:
                    _check_directory(path.parent, self._security)
                except (ConfigError, OSError) as problem:
                    raise NoKeyError.of("wrong", path, f": {problem}") from problem
            encrypt = bool(tenant) or self._security.encrypt
            known = state, _seal(read_key(path), self._namespace, encrypt=encrypt)
            self._seals[tenant] = known
        return known[1]

    def _path(self, tenant: str) -> Path | None:
        directory, own = self._security.tenant_keys, self._security.key_file
        if tenant:
            if directory is None:
                raise NoKeyError("a tenant's chunk, and no tenant_keys")
            return Path(directory) / f"{tenant}{SUFFIX}"
        return None if own is None else Path(own)


class KnownKeys:
    """All keys that the settings name, by their ids, to find the key of a file. Immutable."""

    def __init__(self, security: Security) -> None:
        """Read the key file and every tenant's key now.

        Raises NoKeyError if one of them is unusable, ConfigError.
        """
        tenants: list[Path] = []
        if security.tenant_keys is not None:
            directory = Path(security.tenant_keys)
            try:
                tenants = sorted(one for one in directory.iterdir() if one.suffix == SUFFIX)
            except OSError as problem:
                msg = f"tenant_keys: {directory}: {problem.strerror}; `vua key DIR --salt S`"
                raise ConfigError(msg) from problem
            _check_directory(directory, security)
        self.tenants = len(tenants)
        own = [] if security.key_file is None else [Path(security.key_file)]
        keys = [read_key(path) for path in (*own, *tenants)]
        self._keys = {_seal(key, "", encrypt=False).key_id: key for key in keys}

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(self._keys)

    def seal(self, namespace: str, key_id: str, *, encrypt: bool) -> Seal | None:
        """Return the seal of files of that key and kind; None for an unknown key."""
        key = self._keys.get(key_id)
        return None if key is None else _seal(key, namespace, encrypt=encrypt)


def _seal(key: bytes, namespace: str, *, encrypt: bool) -> Seal:
    try:
        from vua.security.seal import Seal  # noqa: PLC0415 - needs the optional package
    except ImportError as problem:
        msg = f"keys need the package cryptography ({problem}): pip install cryptography"
        raise ConfigError(msg) from problem
    return Seal.of(key, namespace, encrypt=encrypt)
