"""Caches in a bucket, or in a directory with slower tiers: opened like a directory."""

from __future__ import annotations

import errno
import functools
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from vua.capacity.bucket import BucketCapacity, Renewal
from vua.capacity.limits import Limits
from vua.capacity.reservation import Capacity
from vua.errors import StorageError
from vua.format.entry import AUTO
from vua.format.identity import Identity
from vua.format.keys import Keys
from vua.format.layout import KVLayout
from vua.security.settings import Security
from vua.storage.bucket import Bucket
from vua.storage.bucket_mark import (
    claim_bucket,
    describe_in_bucket,
    is_marked_bucket,
    read_bucket_description,
)
from vua.storage.description import Description, read_description
from vua.storage.local import LocalStorage
from vua.storage.location import BucketPath, Tiers, is_url, names_of
from vua.storage.mark import MARK
from vua.storage.object import ObjectStorage
from vua.storage.tiered import TieredStorage
from vua.store.evidence import settled
from vua.store.namespace import (
    Namespace,
    check_root,
    create_storage,
    described,
    description_text,
    is_kept,
    make_namespace,
)
from vua.store.tier_rules import TierRules
from vua.store.travel import Travel

__all__ = ["at", "create_far", "description_at", "locate_bucket", "locate_far", "open_far"]

log = logging.getLogger(__name__)


class RenewingCapacity(BucketCapacity):
    """The capacity of a bucket, whose objects are renewed while they are used."""

    def __init__(self, storage: ObjectStorage, bounds: Limits | None) -> None:
        super().__init__(storage.directory, bounds)
        self._storage = storage
        self.renewals = [Renewal(storage, bounds)]

    def used(self, keys: Keys, chunks: int, *, wait: bool = False, storing: bool = False) -> None:
        """Renew old objects among the first ``chunks``, in the background."""
        super().used(keys, chunks, wait=wait, storing=storing)
        for one in self.renewals:
            one.used(keys, chunks)

    def close(self) -> None:
        """Finish what is queued, for some seconds at most."""
        for one in self.renewals:
            one.close()
        self._storage.close()
        super().close()


class TieredCapacity(Capacity):
    """The capacity of a tiered directory: entries are uploaded, and stay young in buckets."""

    def __init__(
        self, storage: TieredStorage, name: str, bounds: Limits | None, rules: TierRules
    ) -> None:
        """Bound a namespace; entries that are not uploaded yet are not evicted."""
        near = storage.near
        super().__init__(near.directory.parent, near, bounds)
        self.spare_unsent()
        where = storage.where
        self.travel = Travel(near, storage.far, name, self, where=where, rules=rules)
        storage.travels, seen = self.travel, self.travel.seen_behind
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


def locate_far(
    root: str | os.PathLike[str] | Sequence[str], *, create: bool, security: Security | None
) -> BucketPath | Tiers:
    """Return the location of a URL or of tiers; see :func:`vua.store.place.locate`."""
    if is_url(root):
        return locate_bucket(root, create=create)
    near, *far = map(str, names_of(root))
    return Tiers(
        check_root(near, create=create, security=security),
        tuple(_locate_behind(place, create=create, security=security) for place in far),
    )


def _locate_behind(root: str, *, create: bool, security: Security | None) -> Path | BucketPath:
    """Return the location of a slower tier, reachable or not. Raises ConfigError."""
    place: Path | BucketPath
    try:
        if is_url(root):
            place = at(root)
            locate_bucket(root, create=create)
        else:
            place = Path(os.path.abspath(root))  # noqa: PTH100 - keeps links
            if not os.path.lexists(place.parent):
                raise StorageError(errno.ENOENT, f"{place.parent} is missing")  # noqa: TRY301
            check_root(place, create=create, security=security)
    except StorageError as problem:
        log.warning("%s does not answer; what is stored is sent later: %s", place, problem)
    return place


def locate_bucket(root: str | os.PathLike[str], *, create: bool) -> BucketPath:
    """Return a URL's location after checking that it is a cache.

    Raises ConfigError, StorageError.
    """
    place = at(root)
    marked = claim_bucket(place) if create else is_marked_bucket(place)
    if create and not marked:
        log.warning("%s has no %s: it is used, and nothing in it is ever deleted", place, MARK)
    return place


def description_at(path: Path | BucketPath) -> Description:
    """Read a namespace's description from any location; never raises for its content."""
    return read_bucket_description(path) if isinstance(path, BucketPath) else read_description(path)


def open_far(
    path: BucketPath | Tiers, *, security: Security | None, bounds: Limits | None, rules: object
) -> Namespace | None:
    """Open a namespace in a bucket or in tiers, if it is described in one of them."""
    rules = TierRules(codec=AUTO) if rules is None else rules
    described = (settled(description_at(place)) for place in path.places)
    found = next((one for one in described if one.layouts), None)
    if found is None:
        return None
    if isinstance(path, BucketPath):
        storage = ObjectStorage(path, codec=TierRules.of(rules).codec)
        capacity = RenewingCapacity(storage, None)
        return Namespace(path.name, storage, found.layouts, capacity, security or Security())
    if found.identity is None:
        return None
    return create_far(
        *(path.parent, found.identity, found.layouts),
        bounds=bounds,
        security=security,
        rules=rules,
    )


def create_far(
    root: BucketPath | Tiers,
    identity: Identity,
    layouts: Sequence[KVLayout],
    *,
    durable: bool = False,
    bounds: Limits | None = None,
    security: Security | None = None,
    rules: object = None,
) -> Namespace:
    """Open a namespace; see :func:`vua.store.place.create_namespace`."""
    security, rules = security or Security(), TierRules() if rules is None else TierRules.of(rules)
    if isinstance(root, BucketPath):
        storage = _in_bucket(root / identity.namespace, identity, layouts, rules)
        capacity = RenewingCapacity(storage, bounds)
        return Namespace(identity.namespace, storage, layouts, capacity, security)
    if not root.far:
        return Namespace.create(
            *(root.near, identity, layouts), durable=durable, bounds=bounds, security=security
        )
    near = create_storage(root.near, identity, layouts, durable=durable, security=security)
    far = _open_behind(root.far, identity, layouts, security, rules)
    where = ", ".join(str(one.directory.parent) for one in far)
    tiered = TieredStorage(near, far, where)
    bounded = TieredCapacity(tiered, identity.namespace, bounds, rules)
    namespace = Namespace(identity.namespace, tiered, layouts, bounded, security)
    namespace.travel = bounded.travel
    return namespace


def _in_bucket(
    path: BucketPath, identity: Identity, layouts: Sequence[KVLayout], rules: TierRules
) -> ObjectStorage:
    make = _describing(path, identity, layouts)
    return described(
        lambda: read_bucket_description(path),
        layouts,
        make,
        lambda: ObjectStorage(path, make, rules.codec),
    )


def _describing(
    path: BucketPath, identity: Identity, layouts: Sequence[KVLayout]
) -> Callable[..., None]:
    """Return a function that describes a namespace in a bucket."""

    def kept(found: Description, anew: bool) -> bool:  # noqa: FBT001 - see describe_in_bucket
        return is_kept(found, layouts, anew=anew)

    return functools.partial(describe_in_bucket, path, description_text(identity, layouts), kept)


def _open_behind(
    places: Sequence[Path | BucketPath],
    identity: Identity,
    layouts: Sequence[KVLayout],
    security: Security,
    rules: TierRules,
) -> list[LocalStorage | ObjectStorage]:
    """Open the slower tiers; an unreachable one is left out, with a warning."""
    found: list[LocalStorage | ObjectStorage] = []
    for root in places:
        path = root / identity.namespace
        try:
            if isinstance(path, BucketPath):
                make = _describing(path, identity, layouts)
                found.append(ObjectStorage(path, make, rules.codec))
            else:
                make = functools.partial(make_namespace, path, identity, layouts, security)
                make()
                found.append(LocalStorage(path, renew=make, security=security))
        except OSError as problem:
            log.warning("%s is left out: %s", root, problem)
    return found
