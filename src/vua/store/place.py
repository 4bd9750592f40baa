"""From a user's path to a namespace in use: a directory, a bucket, or several tiers.

:func:`prepare` checks a path before an engine starts: loading a model takes minutes, so a wrong
directory must show before that, in one line. A directory is opened here; everything else is opened
by :mod:`vua.store.far`, which is imported only when needed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vua.capacity.limits import Limits
from vua.capacity.usage import Usage, measure
from vua.errors import ConfigError, NotWritableError, StorageError, VUAError
from vua.format.identity import Identity
from vua.format.layout import KVLayout
from vua.security.settings import Security
from vua.storage.base import explained
from vua.storage.bucket_cost import requests
from vua.storage.local import TEMPORARY
from vua.storage.location import Location, is_directory_name, is_url, names_of
from vua.store.namespace import Namespace, check_root

__all__ = ["Place", "create_namespace", "locate", "look_at", "open_namespace", "prepare"]


def locate(
    root: str | os.PathLike[str] | Sequence[str],
    *,
    create: bool = True,
    security: Security | None = None,
) -> Location:
    """Return ``root`` as a usable location: a directory, a URL's prefix in a bucket, or tiers.

    A directory is checked by :func:`check_root`. A bucket is asked whether it exists and holds a
    cache; with ``create`` an empty prefix gets the mark. Slower tiers need not be reachable. Raises
    ConfigError, StorageError.
    """
    if is_directory_name(root):
        return check_root(root, create=create, security=security)
    from vua.store.far import locate_far  # noqa: PLC0415

    return locate_far(root, create=create, security=security)


def open_namespace(
    path: Location,
    *,
    security: Security | None = None,
    bounds: Limits | None = None,
    rules: object = None,
    layouts: Sequence[KVLayout] | None = None,
) -> Namespace | None:
    """Open the namespace at ``path``; None if its layouts are unknown.

    One described tier is enough; then the nearest is described, too. ``layouts`` are the reader's,
    for a directory: it is opened with these unless an entry says otherwise. Without ``rules``,
    compressed entries of a bucket are read, too. Other arguments as for :func:`create_namespace`.
    Raises OSError; StorageError if it belongs to an untrusted user.
    """
    if isinstance(path, Path):
        return Namespace.open(path, security=security, layouts=layouts)
    from vua.store.far import open_far  # noqa: PLC0415

    return open_far(path, security=security, bounds=bounds, rules=rules)


def create_namespace(
    root: Location,
    identity: Identity,
    layouts: Sequence[KVLayout],
    *,
    durable: bool = False,
    bounds: Limits | None = None,
    security: Security | None = None,
    rules: object = None,
) -> Namespace:
    """Open a namespace for reading and writing: :meth:`Namespace.create`, for any location.

    ``rules`` has the attributes of :class:`vua.store.tier_rules.TierRules`.
    """
    if isinstance(root, Path):
        return Namespace.create(
            *(root, identity, layouts), durable=durable, bounds=bounds, security=security
        )
    from vua.store.far import create_far  # noqa: PLC0415

    return create_far(
        *(root, identity, layouts),
        durable=durable,
        bounds=bounds,
        security=security,
        rules=rules,
    )


@dataclass(frozen=True, slots=True)
class Place:
    """A directory that can hold a cache."""

    path: Location
    """Absolute."""
    made: bool
    """Whether it was made just now."""
    usage: Usage | None
    """None for a bucket: counting costs requests."""

    def __str__(self) -> str:
        """Its path, and what is stored there.

        >>> str(Place(Path("/kv"), False, Usage(39 << 20, 1204, exact=False)))
        '/kv (about 39 MiB stored in 1,204 chunks)'
        """
        if self.usage is None:
            return str(self.path)
        if not self.usage.chunks:
            return f"{self.path} ({'made now, ' * self.made}empty)"
        about = "" if self.usage.exact else "about "
        mib = self.usage.nbytes / 2**20
        amount = f"{mib:.0f} MiB" if mib >= 10 else f"{mib:.2f} MiB"
        return f"{self.path} ({about}{amount} stored in {self.usage.chunks:,} chunks)"


def look_at(root: str | os.PathLike[str] | Sequence[str], *, made: bool = False) -> Place:
    """Return what is stored in a directory; takes about a tenth of a second. Raises OSError."""
    near = names_of(root)[0]
    if is_url(near):
        from vua.store import far  # noqa: PLC0415 - most caches are directories

        return Place(far.at(near), made, None)
    return Place(Path(os.path.abspath(near)), made, measure(near))  # noqa: PTH100 - keeps links


def prepare(
    root: str | os.PathLike[str] | Sequence[str], security: Security, *, writes: bool = True
) -> Place:
    """Return ``root`` as a directory that an engine can use; only its last part is created.

    Args:
        root: the directory.
        security: who may own it, and its mode, as in the engine's settings.
        writes: whether the engine stores, too.

    Raises:
        ConfigError: it is a file, its parent is missing (a mistyped path, a disk that is not
            mounted), or untrusted users could replace its files.
        StorageError: it cannot be made, searched or, with ``writes``, written to.
    """
    near = names_of(root)[0]
    prepare_one = _prepare_bucket if is_url(near) else _prepare_directory
    place = prepare_one(near, security, writes=writes)
    if near is not root:
        _in_a_child(lambda: locate(root, create=writes, security=security))
    return place


def _prepare_bucket(root: str | os.PathLike[str], security: Security, *, writes: bool) -> Place:
    del security
    _in_a_child(lambda: _try_bucket(root, writes=writes))
    return look_at(root)


def _prepare_directory(root: str | os.PathLike[str], security: Security, *, writes: bool) -> Place:
    path = Path(os.path.abspath(root))  # noqa: PTH100 - keeps symbolic links
    made = not os.path.lexists(path)
    check_root(path, create=writes or made, security=security)
    try:
        if writes:
            _try_to_write(path)
        return look_at(path, made=made)
    except OSError as problem:
        if isinstance(problem, StorageError):
            raise
        raise explained(problem, str(path)) from problem


def _in_a_child(work: Callable[[], object]) -> None:
    """Use a bucket in a forked child: engines fork from this process later.

    They could not use connections that this process has made. Raises what ``work`` raises.
    """
    if requests:
        work()
        return
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        answer = b""
        try:
            work()
        except VUAError as problem:
            letter = b"w" if isinstance(problem, NotWritableError) else b"s"
            letter = b"c" if isinstance(problem, ConfigError) else letter
            answer = letter + (getattr(problem, "strerror", None) or str(problem)).encode()
        except BaseException as problem:  # noqa: BLE001 - for the parent
            answer = b"s" + repr(problem).encode()
        finally:
            os.write(writing, answer[:4096])
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as stream:  # noqa: PTH123 - a descriptor
        said = stream.read().decode(errors="replace")
    os.waitpid(child, 0)
    if said:
        if said[0] == "c":
            raise ConfigError(said[1:])
        raise (NotWritableError if said[0] == "w" else StorageError)(errno.EIO, said[1:])


def _try_bucket(root: str | os.PathLike[str], *, writes: bool) -> None:
    """Check that a prefix is usable; write an object and delete it.

    Raises ConfigError, StorageError.
    """
    from vua.store import far  # noqa: PLC0415 - as above

    place = far.locate_bucket(root, create=writes)
    if not writes:
        return
    key = (place / f"{TEMPORARY}{secrets.token_hex(8)}").key
    place.bucket.put(key, b"")
    place.bucket.delete([key])


def _try_to_write(path: Path) -> None:
    """Make a file and delete it: modes alone do not tell what a file server allows."""
    probe = path / f"{TEMPORARY}{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    os.close(os.open(probe, flags, 0o600))
    with contextlib.suppress(FileNotFoundError):
        probe.unlink()
