"""A cache's directory before an engine starts in it: whether it can be used, and what is there.

Loading a model takes minutes; a wrong directory is to be noticed before that, in one line.

From what a user names to a namespace in use: a directory, a bucket, or several places.

A directory alone is opened here; whatever else there is, :mod:`vua.store.far` knows, which is not
even imported before it is needed.
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
    """Return ``root`` as it can be used: a directory, the URL of a place in a bucket, or several.

    Of a directory as :func:`check_root` says. A bucket is asked whether it is there and holds a
    cache; with ``create`` an empty place gets the mark. Of several, of which the first is a
    directory, those behind it need not answer. Raises ConfigError, StorageError.
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
    """Open what is stored in ``path``, or return None when nothing says what it is.

    Of several places it is enough that one of them describes it; then the nearest does, too.
    ``layouts`` are the reader's, of a directory: it is opened with these where no entry says
    otherwise. Without ``rules`` compressed entries of a bucket are read, too. The rest as for
    :func:`create_namespace`. Raises OSError; StorageError where it belongs to a user who is not
    trusted.
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

    ``rules`` is whatever has the settings of :class:`vua.storage.tiered.TierRules`: of several
    places, what is copied between them when; of buckets, the codec.
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
    """A directory that a cache can be kept in."""

    path: Location
    """Absolute."""
    made: bool
    """Whether it was made just now."""
    usage: Usage | None
    """None of a bucket: counting costs requests."""

    def __str__(self) -> str:
        """Where it is, and what is stored there.

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
    """Return ``root`` as a directory that an engine can use, made where it alone is missing.

    Args:
        root: the directory.
        security: who may own it, and its mode, as an engine is told.
        writes: whether the engine stores, too.

    Raises:
        ConfigError: it is a file, what it lies in is missing (a mistyped path, a disk that is not
            mounted), or others than those whom ``security`` trusts could replace what lies in it.
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
    """Do something with a bucket in a forked child: engines fork from this process later.

    Those could use no connection that this process has made. Raises what ``work`` raises.
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
    """Look whether a place can be used; write an object and delete it.

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
    """Make a file and delete it: modes alone do not tell what a server lets whom do."""
    probe = path / f"{TEMPORARY}{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    os.close(os.open(probe, flags, 0o600))
    with contextlib.suppress(FileNotFoundError):
        probe.unlink()
