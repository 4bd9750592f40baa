"""Caches in a bucket, or in a directory with slower tiers: opened like a directory."""

from __future__ import annotations

import errno
import functools
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from vua.capacity.bucket import BucketCapacity, Renewal
from vua.capacity.limits import Limits
from vua.capacity.reservation import Capacity
from vua.errors import ConfigError, NotWritableError, StorageError, VUAError
from vua.format.identity import Identity
from vua.format.keys import Keys
from vua.format.layout import KVLayout
from vua.security.settings import Security
from vua.storage.bucket import Bucket
from vua.storage.bucket_cost import requests
from vua.storage.bucket_mark import (
    claim_bucket,
    describe_in_bucket,
    is_marked_bucket,
    read_bucket_description,
)
from vua.storage.description import Description
from vua.storage.local import LocalStorage
from vua.storage.location import BucketPath, Tiers, is_directory_name, is_url, names_of
from vua.storage.mark import check_root
from vua.storage.names import TEMPORARY
from vua.storage.object import ObjectStorage
from vua.store.evidence import settled
from vua.store.namespace import (
    Access,
    DirectoryKind,
    Namespace,
    Place,
    create_storage,
    described,
    description_text,
    is_kept,
)
from vua.store.tier_rules import TierRules
from vua.store.tiered import TieredStorage
from vua.store.travel import Travel

log = logging.getLogger(__name__)


class TieredCapacity(Capacity):
    """The capacity of a tiered directory: entries are uploaded, and stay young in buckets."""

    def __init__(
        self, storage: TieredStorage, name: str, bounds: Limits | None, rules: TierRules
    ) -> None:
        near = storage.near
        super().__init__(near.directory.parent, near, bounds)
        self.spare_unsent()
        where = storage.where
        self.travel = Travel(near, storage.far, name, self, where=where, rules=rules)
        storage.travels, seen = self.travel, self.travel.resend_missing
        self._buckets = [one for one in storage.far if isinstance(one, ObjectStorage)]
        self.renewals = [Renewal(one, bounds, seen) for one in self._buckets]
        """Renew used objects, one per bucket."""

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


def locate_bucket(root: str | os.PathLike[str], *, create: bool) -> BucketPath:
    """Return a URL's location after checking that it is a cache.

    Raises ConfigError, StorageError.
    """
    place = at(root)
    if create:
        claim_bucket(place)
    else:
        is_marked_bucket(place)  # raises for another version's
    return place


def _try_bucket(root: str | os.PathLike[str], *, writes: bool) -> None:
    """Check that a prefix is usable; write an object and delete it.

    Raises ConfigError, StorageError.
    """
    place = locate_bucket(root, create=writes)
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
    def kept(found: Description, anew: bool) -> bool:  # noqa: FBT001 - see describe_in_bucket
        return is_kept(found, layouts, anew=anew)

    text = description_text(identity, layouts, security)
    return functools.partial(describe_in_bucket, path, text, kept)


class BucketKind:
    """What is particular to a bucket; see :class:`vua.store.place.LocationKind`."""

    def locate(
        self, root: str | os.PathLike[str], *, create: bool, security: Security | None
    ) -> BucketPath:
        del security
        return locate_bucket(root, create=create)

    def at(self, root: str | os.PathLike[str]) -> BucketPath:
        return at(root)

    def reach(
        self, root: str | os.PathLike[str], *, create: bool, security: Security | None
    ) -> None:
        self.locate(root, create=create, security=security)

    def look_at(self, root: str | os.PathLike[str], *, namespace: str = "") -> Place:
        del namespace
        return Place(at(root), made=False, usage=None)

    def prepare(self, root: str | os.PathLike[str], security: Security, *, writes: bool) -> Place:
        del security
        _in_a_child(lambda: _try_bucket(root, writes=writes))
        return self.look_at(root)

    def description(self, path: BucketPath) -> Description:
        return read_bucket_description(path)

    def tier(
        self,
        path: BucketPath,
        identity: Identity,
        layouts: Sequence[KVLayout],
        security: Security,
    ) -> ObjectStorage:
        return ObjectStorage(path, _describing(path, identity, layouts, security))

    def open(self, path: BucketPath, access: Access, layouts: object) -> Namespace | None:
        del layouts
        found = settled(read_bucket_description(path))
        if not found.layouts:
            return None
        storage = ObjectStorage(path)
        capacity = BucketCapacity(storage, None)
        security = access.security or Security()
        return Namespace(path.name, storage, found.layouts, capacity, security)

    def create(
        self, root: BucketPath, identity: Identity, layouts: Sequence[KVLayout], access: Access
    ) -> Namespace:
        _, bounds, security, _ = access  # objects always are durable
        path = root / identity.namespace
        security = security or Security()
        make = _describing(path, identity, layouts, security)
        storage = described(
            lambda: read_bucket_description(path),
            layouts,
            make,
            lambda: ObjectStorage(path, make),
        )
        capacity = BucketCapacity(storage, bounds)
        return Namespace(identity.namespace, storage, layouts, capacity, security)


class TiersKind:
    """What is particular to several tiers; see :class:`vua.store.place.LocationKind`."""

    def locate(self, root: Sequence[str], *, create: bool, security: Security | None) -> Tiers:
        near, *far = map(str, names_of(root))
        return Tiers(
            check_root(near, create=create, security=security),
            tuple(_locate_tier(place, create=create, security=security) for place in far),
        )

    def look_at(self, root: Sequence[str], *, namespace: str = "") -> Place:
        near = names_of(root)[0]
        return _tier_kind(near).look_at(near, namespace=namespace)

    def prepare(self, root: Sequence[str], security: Security, *, writes: bool) -> Place:
        near = names_of(root)[0]
        place = _tier_kind(near).prepare(near, security, writes=writes)
        _in_a_child(lambda: self.locate(root, create=writes, security=security))
        return place

    def open(self, path: Tiers, access: Access, layouts: object) -> Namespace | None:
        del layouts
        described = (settled(description_at(place)) for place in path.places)
        found = next((one for one in described if one.layouts), None)
        if found is None or found.identity is None:
            return None
        return self.create(path.parent, found.identity, found.layouts, access)

    def create(
        self, root: Tiers, identity: Identity, layouts: Sequence[KVLayout], access: Access
    ) -> Namespace:
        if not root.far:
            return _DIRECTORY.create(root.near, identity, layouts, access)
        durable, bounds, security, given = access
        security = security or Security()
        rules = TierRules() if given is None else TierRules.of(given)
        near = create_storage(root.near, identity, layouts, durable=durable, security=security)
        far = _open_tiers(root.far, identity, layouts, security)
        where = ", ".join(str(one.directory.parent) for one in far)
        tiered = TieredStorage(near, far, where)
        bounded = TieredCapacity(tiered, identity.namespace, bounds, rules)
        namespace = Namespace(identity.namespace, tiered, layouts, bounded, security)
        namespace.travel = bounded.travel
        return namespace


_DIRECTORY: Final = DirectoryKind()
_BUCKET: Final = BucketKind()
_TIERS: Final = TiersKind()


def kind_of(root: object) -> BucketKind | TiersKind:
    """Return the kind of a location that is not a single directory."""
    return _BUCKET if isinstance(root, BucketPath) or is_url(root) else _TIERS


def _tier_kind(place: object) -> DirectoryKind | BucketKind:
    return _DIRECTORY if is_directory_name(place) else _BUCKET


def description_at(path: Any) -> Description:
    """Read a namespace's description in a directory or bucket; never raises for its content."""
    return _tier_kind(path).description(path)


def _locate_tier(root: str, *, create: bool, security: Security | None) -> Path | BucketPath:
    """Return the location of a slower tier, reachable or not. Raises ConfigError."""
    kind = _tier_kind(root)
    place = kind.at(root)
    try:
        kind.reach(root, create=create, security=security)
    except StorageError as problem:
        log.warning("%s does not answer; what is stored is sent later: %s", place, problem)
    return place


def _open_tiers(
    places: Sequence[Path | BucketPath],
    identity: Identity,
    layouts: Sequence[KVLayout],
    security: Security,
) -> list[LocalStorage | ObjectStorage]:
    """Open the slower tiers; an unreachable one is left out, with a warning."""
    found: list[LocalStorage | ObjectStorage] = []
    for root in places:
        path: Any = root / identity.namespace
        try:
            found.append(_tier_kind(root).tier(path, identity, layouts, security))
        except OSError as problem:
            log.warning("%s is left out: %s", root, problem)
    return found
