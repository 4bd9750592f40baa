"""From a user's path to a namespace in use: a directory, a bucket, or several tiers.

:func:`prepare` checks a path before an engine starts: loading a model takes minutes, so a wrong
directory must show before that, in one line.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vua.capacity.usage import Usage, measure
from vua.errors import ConfigError, NotWritableError, StorageError, VUAError, explaining
from vua.format.identity import Identity
from vua.format.layout import KVLayout
from vua.io.files import make_file
from vua.io.forks import new_lock
from vua.io.words import counted
from vua.security.settings import Security
from vua.storage import requests
from vua.storage.bucket import Bucket
from vua.storage.location import BucketPath, Location, Tiers, is_directory_name, is_url, names_of
from vua.storage.mark import check_root, claim, is_marked
from vua.storage.names import TEMPORARY
from vua.store.namespace import Access, Namespace

log = logging.getLogger(__name__)


def at(url: str | os.PathLike[str]) -> BucketPath:
    """Return a URL's bucket and prefix. Raises ConfigError."""
    return BucketPath(Bucket.at(str(url)))


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
    if is_url(root):
        return _locate_bucket(root, create=create)
    near, *far = map(str, names_of(root))
    return Tiers(
        check_root(near, create=create, security=security),
        tuple(_locate_tier(place, create=create, security=security) for place in far),
    )


def _locate_bucket(root: str, *, create: bool) -> BucketPath:
    place = at(root)
    if create:
        claim(place)
    else:
        is_marked(place)  # raises for another version's
    return place


def _locate_tier(root: str, *, create: bool, security: Security | None) -> Path | BucketPath:
    place = Path(os.path.abspath(root)) if is_directory_name(root) else at(root)  # noqa: PTH100
    problem: object = None
    try:
        if isinstance(place, BucketPath):
            _locate_bucket(root, create=create)
        elif os.path.lexists(place.parent):
            check_root(place, create=create, security=security)
        else:
            problem = f"{place.parent} is missing"
    except StorageError as found:
        problem = found
    if problem is not None:
        log.warning("%s does not answer; what is stored is sent later: %s", place, problem)
    return place


class LazyNamespace:
    """An identity's namespace, opened when it is there, or made by the first write. Thread-safe."""

    def __init__(self, root: Location, identity: Identity, access: Access) -> None:
        self._root, self._identity, self._access = root, identity, access
        self._lock = new_lock()
        self.reading: Namespace | None = None
        self.writing: Namespace | None = None

    def to_read(self, layouts: Sequence[KVLayout] | None = None) -> Namespace | None:
        """Return it as :meth:`Namespace.open` does, opened anew if it was deleted."""
        with self._lock:
            if self.reading is None or self.reading.storage.gone:
                path = self._root / self._identity.namespace
                self.reading = self.writing or Namespace.open(
                    path,
                    security=self._access.security,
                    bounds=self._access.bounds,
                    layouts=layouts,
                )
            return self.reading

    def to_write(self, layouts: Sequence[KVLayout]) -> Namespace:
        """Return it with these layouts, as :meth:`Namespace.create`."""
        with self._lock:
            if self.writing is None or self.writing.layouts != tuple(layouts):
                self.writing = self.reading = Namespace.create(
                    *(self._root, self._identity, layouts), **self._access._asdict()
                )
            return self.writing

    def close(self) -> None:
        for namespace in filter(None, (self.reading, self.writing)):
            namespace.close()


@dataclass(frozen=True, slots=True)
class Place:
    """A directory that can hold a cache."""

    path: Location
    """Absolute."""
    made: bool
    usage: Usage | None
    """None for a bucket: counting costs requests."""

    def __str__(self) -> str:
        """Its path, and what is stored there.

        >>> str(Place(Path("/kv"), False, Usage(39 << 20, 1204, exact=False)))
        '/kv (about 39 MiB stored in 1,204 chunks)'
        """
        return f"{self.path} ({self.amount})" if self.amount else str(self.path)

    @property
    def amount(self) -> str:
        """What is stored there, in words; empty if unknown."""
        if self.usage is None:
            return ""
        if not self.usage.chunks:
            return f"{'made now, ' * self.made}empty"
        about = "" if self.usage.exact else "about "
        mib = self.usage.nbytes / 2**20
        amount = f"{mib:.0f} MiB" if mib >= 10 else f"{mib:.2f} MiB"
        chunks = counted(self.usage.chunks, "chunk")
        return f"{about}{amount} stored in {chunks}"


def look_at(root: str | os.PathLike[str] | Sequence[str], *, namespace: str = "") -> Place:
    """Return what is stored in a directory, the first of several tiers, or in a namespace of it.

    Of a bucket nothing is told. Takes about a tenth of a second. Raises OSError.
    """
    if is_url(root):
        return Place(at(root), made=False, usage=None)
    path = Path(os.path.abspath(names_of(root)[0]))  # noqa: PTH100 - keeps symbolic links
    return Place(path, made=False, usage=measure(path, only=[namespace] if namespace else None))


def prepare(
    root: str | os.PathLike[str] | Sequence[str], security: Security, *, writes: bool = True
) -> Place:
    """Return ``root`` as a directory that an engine can use; only its last part is created.

    Args:
        security: who may own it, and its mode, as in the engine's settings.

    Raises:
        ConfigError: it is a file, its parent is missing (a mistyped path, a disk that is not
            mounted), or untrusted users could replace its files.
        StorageError: it cannot be made, searched or, with ``writes``, written to.
    """
    if is_url(root):
        _in_a_child(lambda: _try_bucket(root, writes=writes))
        return look_at(root)
    path = Path(os.path.abspath(names_of(root)[0]))  # noqa: PTH100 - keeps symbolic links
    made = not os.path.lexists(path)
    check_root(path, create=writes or made, security=security)
    with explaining(str(path)):
        if writes:  # modes alone do not tell what a file server allows
            probe = path / f"{TEMPORARY}{secrets.token_hex(8)}"
            os.close(make_file(probe, os.O_EXCL))
            with contextlib.suppress(FileNotFoundError):
                probe.unlink()
        place = replace(look_at(path), made=made)
    if not is_directory_name(root):
        _in_a_child(lambda: locate(root, create=writes, security=security))
    return place


def _try_bucket(root: str, *, writes: bool) -> None:
    """Check that a prefix is usable; write an object and delete it.

    Raises ConfigError, StorageError.
    """
    place = _locate_bucket(root, create=writes)
    if not writes:
        return
    key = (place / f"{TEMPORARY}{secrets.token_hex(8)}").key
    place.bucket.put(key, b"")
    place.bucket.delete([key])


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
        answer = ""
        try:
            work()
        except VUAError as problem:
            answer = f"{type(problem).__name__}\n{getattr(problem, 'strerror', None) or problem}"
        except BaseException as problem:  # noqa: BLE001 - for the parent
            answer = f"{StorageError.__name__}\n{problem!r}"
        finally:
            os.write(writing, answer.encode()[:4096])
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as stream:  # noqa: PTH123 - a descriptor
        kind, _, text = stream.read().decode(errors="replace").partition("\n")
    os.waitpid(child, 0)
    if kind == ConfigError.__name__:
        raise ConfigError(text)
    if kind:
        known = {one.__name__: one for one in (NotWritableError, StorageError)}
        raise known.get(kind, StorageError)(errno.EIO, text)
