"""The caches of one identity in a directory, opened: the one way in, for reading and for writing.

``<root>/<namespace>/namespace.json`` says in clear which identity and which layouts the chunks
beside it belong to (:mod:`vua.storage.description`). Whoever stores first writes it; no chunk needs
it to be verified, since the files say it themselves.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vua.capacity.bucket import BucketCapacity
from vua.capacity.limits import Limits
from vua.capacity.renewal import Renewal
from vua.capacity.reservation import Capacity
from vua.errors import ConfigError, LayoutError, StorageError
from vua.format.identity import Identity
from vua.format.keys import ChunkKey, KeyChain
from vua.format.layout import KVLayout
from vua.io.atomic import atomic_write
from vua.security.keyring import Keyring
from vua.security.settings import Security, check_owner, open_directory
from vua.storage.bucket_mark import describe_in_bucket
from vua.storage.bucket_path import BucketPath
from vua.storage.compression import AUTO
from vua.storage.description import DESCRIPTION, FORMAT, read_description
from vua.storage.local import LocalStorage
from vua.storage.location import Location, Tiers
from vua.storage.mark import MARK, claim
from vua.storage.object import ObjectStorage
from vua.storage.problems import explained
from vua.storage.tiered import TieredStorage
from vua.store.store import Store
from vua.store.tier_rules import TierRules
from vua.store.travel import Travel

__all__ = ["Namespace", "check_root"]

log = logging.getLogger(__name__)


class Namespace:
    """A namespace in use: its storage, capacity and keyring, and a store per group of layers.

    Safe for threads, processes, hosts and forks, like all that it consists of.
    """

    def __init__(
        self,
        storage: LocalStorage | ObjectStorage | TieredStorage,
        layouts: Sequence[KVLayout],
        security: Security,
        bounds: Limits | None = None,
        rules: TierRules | None = None,
    ) -> None:
        """Use an open storage; :meth:`open` and :meth:`create` call this."""
        path = storage.directory
        self.name = path.name
        """The identity's digest, 64 hex."""
        self.storage, self.layouts = storage, tuple(layouts)
        self.capacity: Capacity | BucketCapacity
        self.travel: Travel | None = None
        """What copies entries between the places of a tiered cache."""
        if isinstance(storage, ObjectStorage):
            self.capacity = BucketCapacity(storage.directory, bounds)
        elif isinstance(storage, LocalStorage):
            self.capacity = Capacity(storage.directory.parent, storage, bounds)
        else:
            near = storage.near
            self.capacity = Capacity(near.directory.parent, near, bounds)
            self.capacity.reclaiming.reclaim.spare_unsent()
            self.travel = storage.travels = Travel(
                *(near, storage.far, self.name, self.capacity),
                where=storage.where,
                rules=rules,
            )
        places = storage.far if isinstance(storage, TieredStorage) else (storage,)
        seen = None if self.travel is None else self.travel.seen_behind
        self.renewals = [
            Renewal(one.directory, bounds, seen) for one in places if isinstance(one, ObjectStorage)
        ]
        """What keeps objects young that are used, one for each bucket."""
        self.keyring = Keyring(self.name, security)
        self.stores = [
            Store(storage, self.name, layout, self.capacity, self.keyring, self.renewals)
            for layout in self.layouts
        ]
        """One per group of layers, in the order of the layouts."""

    @classmethod
    def open(
        cls,
        path: Location,
        *,
        security: Security | None = None,
        bounds: Limits | None = None,
        rules: TierRules | None = None,
    ) -> Namespace | None:
        """Open what is stored in ``path``, or return None when nothing describes it.

        Of several places it is enough that one of them describes it; then the nearest does, too.
        Without ``rules`` compressed entries of a bucket are read, too. The rest as for
        :meth:`create`. Raises OSError; StorageError where it belongs to a user who is not trusted.
        """
        rules = rules or TierRules(codec=AUTO)
        if isinstance(path, Tiers):
            described = map(read_description, (path.near, *path.far))
            found = next((one for one in described if one.identity is not None), None)
            if found is None or found.identity is None:
                return None
            return cls.create(
                *(path.parent, found.identity, found.layouts),
                bounds=bounds,
                security=security,
                rules=rules,
            )
        layouts = read_description(path).layouts
        if not layouts:
            return None
        storage: LocalStorage | ObjectStorage
        if isinstance(path, BucketPath):
            storage = ObjectStorage(path, codec=rules.codec)
        else:
            storage = LocalStorage(path, security=security)
        return cls(storage, layouts, security or Security())

    @classmethod
    def create(
        cls,
        root: Location,
        identity: Identity,
        layouts: Sequence[KVLayout],
        *,
        durable: bool = False,
        bounds: Limits | None = None,
        security: Security | None = None,
        rules: TierRules | None = None,
    ) -> Namespace:
        """Open the namespace of ``identity`` for reading and writing, made where it is missing.

        Args:
            root: directory of the cache, or its place in a bucket.
            identity: what the K/V depend on.
            layouts: one per group of the model's layers.
            durable: as for :class:`vua.storage.local.LocalStorage`.
            bounds: what this process says of the cache's size; ``bounds.json`` and the defaults of
                :mod:`vua.capacity.limits` hold, too.
            security: whose files are read, the modes of what is written, and the keys.
            rules: of several places, what is copied between them when; of buckets, the codec.

        Raises:
            LayoutError: the namespace holds other layouts; nothing stored is touched.
            NotWritableError, StorageFullError, StorageError: it cannot be created.
        """
        wanted, security = tuple(layouts), security or Security()
        first = root.near if isinstance(root, Tiers) else root
        path = first / identity.namespace
        make = functools.partial(_make, path, identity, wanted, security)
        found = read_description(path)
        try:
            if not found.layouts:
                make()
                found = read_description(path)
            storage: LocalStorage | ObjectStorage
            if isinstance(path, BucketPath):
                storage = ObjectStorage(path, make, (rules or TierRules()).codec)
            else:
                storage = LocalStorage(path, durable=durable, renew=make, security=security)
        except StorageError:
            raise
        except OSError as problem:
            raise explained(problem, str(path)) from problem
        if not found.layouts:
            storage.close()
            msg = f"{path / DESCRIPTION} could not be read back; is the storage healthy?"
            raise StorageError(5, msg)
        if found.layouts != wanted:
            storage.close()
            raise LayoutError(_difference(path, found.layouts, wanted))
        if isinstance(root, Tiers) and root.far and isinstance(storage, LocalStorage):
            far = _open_behind(root.far, identity, wanted, security, (rules or TierRules()).codec)
            where = ", ".join(str(one.directory.parent) for one in far)
            tiered = TieredStorage(storage, far, where)
            return cls(tiered, wanted, security, bounds, rules)
        return cls(storage, wanted, security, bounds)

    def share_reads(self) -> None:
        """Expect other processes of this host to read the same entries at the same time."""
        near = self.storage.near if isinstance(self.storage, TieredStorage) else self.storage
        if isinstance(near, LocalStorage):
            near.shares_reads = True

    def close(self) -> None:
        """Finish what the capacity still has to do; a second call does nothing.

        The directory stays open until nobody holds the storage: a thread may be reading there.
        """
        if self.travel is not None:
            self.travel.close()
        for one in self.renewals:
            one.close()
        self.capacity.close()

    def keys(
        self,
        ids: bytes,
        extras: Mapping[int, Sequence[tuple[str, bytes]]] | None = None,
        salt: bytes = b"",
    ) -> KeyChain:
        """Name a prompt's chunks, as everybody has to who wants to find them here.

        Args:
            ids: token ids as :func:`vua.format.keys.token_ids` returns them.
            extras: chunk index -> (tag, value) pairs that the K/V from that chunk on depend on.
            salt: the request's cache salt, which decides whose key makes the names secret. It is
                not an extra by itself.

        Raises NoKeyError where that key is not to be had: then the prompt is not to be cached.
        """
        naming = self.keyring.naming(salt)
        return KeyChain(ids, self.layouts[0].chunk_tokens, extras, naming)

    def pin(self, keys: Sequence[ChunkKey]) -> int:
        """Keep stored chunks, a prefix from the first one on, from eviction.

        Returns how many are held. Raises OSError only where this process has no more descriptors.
        """
        return self.capacity.pin_prefix([key.name for key in keys])

    def unpin(self, keys: Sequence[ChunkKey]) -> int:
        """Undo :meth:`pin` of these chunks and of prefixes of them; return how many it releases."""
        return self.capacity.unpin_prefix([key.name for key in keys])


def _open_behind(
    places: Sequence[Path | BucketPath],
    identity: Identity,
    layouts: Sequence[KVLayout],
    security: Security,
    codec: str,
) -> list[LocalStorage | ObjectStorage]:
    """Open the places behind a directory; one that is not there is left out, and said."""
    found: list[LocalStorage | ObjectStorage] = []
    for root in places:
        path = root / identity.namespace
        make = functools.partial(_make, path, identity, layouts, security)
        try:
            if isinstance(path, BucketPath):
                found.append(ObjectStorage(path, make, codec))
            else:
                make()
                found.append(LocalStorage(path, renew=make, security=security))
        except OSError as problem:
            log.warning("%s is left out: %s", root, problem)
    return found


def check_root(
    root: str | os.PathLike[str], *, create: bool = True, security: Security | None = None
) -> Path:
    """Return ``root`` as an existing directory, creating it (0700) if it is not there.

    Args:
        root: the directory.
        create: whether it is to be written to: it is created where it is missing, and gets the mark
            (see `vua.storage.mark`) where it is empty.
        security: who may own it, and its mode; by default it is not looked at.

    Raises:
        ConfigError: it is a file, or it is missing and ``create`` is False, or others than those
            whom ``security`` trusts could replace what lies in it; or it is to be written to and
            holds other things than a cache.
        StorageError: it cannot be created or searched.
    """
    path = Path(root)
    try:
        if create:
            absent = security is not None and security.group_read and not path.exists()
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if absent and security is not None:
                path.chmod(security.directory_mode)
        if not path.is_dir():
            found = "a file" if path.exists() else "nothing"
            msg = f"{path}: expected a directory, found {found}; name the directory of the cache"
            raise ConfigError(msg)
        if security is not None:
            check_owner(path, security)
        mode = (security or Security()).file_mode
        if create and not claim(path, mode=mode) and os.access(path, os.W_OK):
            log.warning(
                "%s was made by a version of VUA that left no %s: it is used, and nothing in it is "
                "ever deleted; `vua adopt %s` looks at it and makes one",
                *(path, MARK, path),
            )
    except FileExistsError as problem:
        msg = f"{path}: expected a directory, found a file; name the directory of the cache"
        raise ConfigError(msg) from problem
    except NotADirectoryError as problem:
        msg = f"{path}: something above it is a file; name a directory"
        raise ConfigError(msg) from problem
    except OSError as problem:
        raise explained(problem, str(path)) from problem
    return path


def _difference(
    path: Path | BucketPath, stored: Sequence[KVLayout], given: Sequence[KVLayout]
) -> str:
    if len(stored) == len(given):
        parts = [
            f"{name} {value} (stored: {old.describe().get(name, 'none')})"
            for old, new in zip(stored, given, strict=True)
            for name, value in new.describe().items()
            if value != old.describe().get(name)
        ]
    else:
        parts = [f"{len(given)} groups of layers (stored: {len(stored)})"]
    return (
        f"the KV cache does not fit what {path} holds: {', '.join(parts)}. Nothing was written; "
        "use another directory, or another VUAConfig.model for another model"
    )


def _make(
    path: Path | BucketPath, identity: Identity, layouts: Sequence[KVLayout], security: Security
) -> None:
    """Make a namespace's directory and describe it, where that is not done yet.

    Raises OSError; StorageError where its parent holds other things than a cache.
    """
    if isinstance(path, BucketPath):
        describe_in_bucket(path, _description(identity, layouts))
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        claim(path.parent, mode=security.file_mode)
    except ConfigError as problem:
        raise StorageError(errno.EPERM, str(problem)) from problem
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    fd = open_directory(path, security)  # it may be a link, or somebody else's
    try:
        status, wanted = os.fstat(fd), security.directory_mode
        if stat.S_IMODE(status.st_mode) & wanted != wanted and status.st_uid == os.geteuid():
            os.fchmod(fd, wanted)  # an unusual umask
        atomic_write(
            DESCRIPTION,
            _description(identity, layouts),
            dir_fd=fd,
            mode=security.file_mode,
            keep=lambda: bool(read_description(path).layouts),
        )
    finally:
        os.close(fd)


def _description(identity: Identity, layouts: Sequence[KVLayout]) -> bytes:
    described: dict[str, Any] = {
        "format": FORMAT,
        "identity": identity.describe(),
        "layout": layouts[0].describe(),
    }
    if len(layouts) > 1:
        described["further_groups"] = [layout.describe() for layout in layouts[1:]]
    return json.dumps(described, indent=1).encode() + b"\n"
