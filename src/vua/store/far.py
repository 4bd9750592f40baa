"""Caches in a bucket, or in a directory with slower tiers: opened like a directory."""

from __future__ import annotations

import errno
import functools
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vua.capacity.bucket import BucketCapacity, Renewal
from vua.capacity.limits import Limits
from vua.capacity.reservation import Capacity
from vua.errors import ConfigError, NotWritableError, StorageError, VUAError
from vua.format.identity import Identity
from vua.format.keys import Keys
from vua.format.layout import KVLayout
from vua.security.settings import Security
from vua.storage.bucket import Bucket
from vua.storage.description import Description, read_description
from vua.storage.local import LocalStorage
from vua.storage.location import BucketPath, Tiers, is_directory_name, is_url, names_of, requests
from vua.storage.mark import (
    check_root,
    claim_bucket,
    describe_in_bucket,
    is_marked_bucket,
    read_bucket_description,
)
from vua.storage.names import TEMPORARY
from vua.storage.object import ObjectStorage
from vua.store.namespace import (
    Access,
    Namespace,
    Place,
    create_storage,
    described,
    description_text,
    make_namespace,
    measured,
    prepare_directory,
    settled,
)
from vua.store.tiered import TieredStorage, Travel

log = logging.getLogger(__name__)


class TieredCapacity(Capacity):
    """The capacity of a tiered directory: entries are uploaded, and stay young in buckets."""

    def __init__(self, storage: TieredStorage, name: str, bounds: Limits | None) -> None:
        near = storage.near
        super().__init__(near.directory.parent, near, bounds)
        self.reclaimer.spare_unsent()
        self.travel = Travel(near, storage.far, name, self, where=storage.where)
        storage.travels, seen = self.travel, self.travel.resend_missing
        self._buckets = [one for one in storage.far if isinstance(one, ObjectStorage)]
        self.renewals = [Renewal(one, bounds, seen) for one in self._buckets]

    def used(self, keys: Keys, chunks: int, *, wait: bool = False, storing: bool = False) -> None:
        """As in a directory; also renew old objects in buckets, in the background."""
        super().used(keys, chunks, wait=wait, storing=storing)
        for one in self.renewals:
            one.used(keys, chunks)

    def close(self) -> None:
        """Upload what waits, for some seconds at most, and finish pending work."""
        self.travel.close()
        for one in self.renewals:
            one.close()
        for storage in self._buckets:
            storage.close()
        super().close()


def at(url: str | os.PathLike[str]) -> BucketPath:
    """Return a URL's bucket and prefix. Raises ConfigError."""
    return BucketPath(Bucket.at(str(url)))


def locate(root: Any, *, create: bool, security: Security | None) -> BucketPath | Tiers:
    """Return a location that is not a single directory; see :func:`vua.store.place.locate`."""
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
        claim_bucket(place)
    else:
        is_marked_bucket(place)  # raises for another version's
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


def look_at(root: Any, namespace: str = "") -> Place:
    """Return what is stored in the first of several tiers; of a bucket nothing is told."""
    if is_url(root):
        return Place(at(root), made=False, usage=None)
    return measured(names_of(root)[0], namespace)


def prepare(root: Any, security: Security, *, writes: bool) -> Place:
    """Check a location as :func:`vua.store.place.prepare`."""
    if is_url(root):
        _in_a_child(lambda: _try_bucket(root, writes=writes))
        return look_at(root)
    place = prepare_directory(names_of(root)[0], security, writes=writes)
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
        text = stream.read().decode(errors="replace")
    os.waitpid(child, 0)
    if text:
        if text[0] == "c":
            raise ConfigError(text[1:])
        raise (NotWritableError if text[0] == "w" else StorageError)(errno.EIO, text[1:])


def _describing(
    path: BucketPath, identity: Identity, layouts: Sequence[KVLayout], security: Security
) -> Callable[..., None]:
    text = description_text(identity, layouts, security)
    return functools.partial(describe_in_bucket, path, text)


def description_at(path: Path | BucketPath) -> Description:
    """Read a namespace's description in a directory or bucket; never raises for its content."""
    return read_description(path) if isinstance(path, Path) else read_bucket_description(path)


def open_namespace(path: BucketPath | Tiers, access: Access) -> Namespace | None:
    """Open a namespace as :func:`vua.store.place.open_namespace`."""
    described = (settled(description_at(place)) for place in path.places)
    found = next((one for one in described if one.layouts), None)
    if found is None:
        return None
    if isinstance(path, BucketPath):
        storage = ObjectStorage(path)
        capacity = BucketCapacity(storage, None)
        return Namespace(
            *(path.name, storage, found.layouts), capacity, access.security or Security()
        )
    if found.identity is None:
        return None
    return create_namespace(path.parent, found.identity, found.layouts, access)


def create_namespace(
    root: BucketPath | Tiers, identity: Identity, layouts: Sequence[KVLayout], access: Access
) -> Namespace:
    """Open a namespace for reading and writing as :func:`vua.store.place.create_namespace`."""
    durable, bounds, given = access
    security, name = given or Security(), identity.namespace
    if isinstance(root, BucketPath):  # objects always are durable
        path = root / name
        make = _describing(path, identity, layouts, security)
        objects = described(
            lambda: read_bucket_description(path),
            layouts,
            make,
            lambda: ObjectStorage(path, make),
        )
        return Namespace(name, objects, layouts, BucketCapacity(objects, bounds), security)
    near = create_storage(root.near, identity, layouts, durable=durable, security=security)
    if not root.far:
        return Namespace(name, near, layouts, Capacity(root.near, near, bounds), security)
    far = _open_tiers(root.far, identity, layouts, security)
    where = ", ".join(str(one.directory.parent) for one in far)
    tiered = TieredStorage(near, far, where)
    capacity = TieredCapacity(tiered, name, bounds)
    namespace = Namespace(name, tiered, layouts, capacity, security)
    namespace.travel = capacity.travel
    return namespace


def _open_tiers(
    places: Sequence[Path | BucketPath],
    identity: Identity,
    layouts: Sequence[KVLayout],
    security: Security,
) -> list[LocalStorage | ObjectStorage]:
    found: list[LocalStorage | ObjectStorage] = []
    for root in places:
        path = root / identity.namespace
        try:
            if isinstance(path, BucketPath):
                make = _describing(path, identity, layouts, security)
                found.append(ObjectStorage(path, make))
                continue
            make = functools.partial(make_namespace, path, identity, layouts, security)
            make()
            found.append(LocalStorage(path, renew=make, security=security))
        except OSError as problem:
            log.warning("%s is left out: %s", root, problem)
    return found
