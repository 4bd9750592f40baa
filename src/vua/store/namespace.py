"""Opens the caches of one identity in a directory or bucket, for reading and for writing.

``<root>/<namespace>/namespace.json`` states the identity and the layouts of the chunks beside it
(:mod:`vua.storage.description`). The first writer writes it. Verification of a chunk does not need
it, and nothing protects the layouts in it: one flipped bit there must neither hide what is stored
nor prevent storing more. Every entry's header states its layout, and has a self-check. So a few
headers are read when a namespace is opened, and when its description and its user disagree.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import stat
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, cast

from vua.capacity.bucket import BucketCapacity
from vua.capacity.limits import Limits
from vua.capacity.reclaim import Capacity
from vua.errors import ConfigError, EntryError, LayoutError, StorageError, explaining
from vua.format.identity import Identity
from vua.format.keys import KeyChain
from vua.format.layout import KVLayout
from vua.format.parse import EntryInfo, parse_entry
from vua.io.files import atomic_write, make_folder, see_to_mode
from vua.io.posix import closing_fd
from vua.security.keyring import Keyring
from vua.security.settings import Security, check_owner, open_directory
from vua.storage.base import Storage
from vua.storage.description import DESCRIPTION, FORMAT, Description, read_description
from vua.storage.local import LocalStorage
from vua.storage.location import BucketPath, Location, Tiers
from vua.storage.mark import claim
from vua.storage.object import ObjectStorage
from vua.store.store import Store
from vua.store.tiered import TieredCapacity, TieredStorage, Travel

_HEADERS: Final = 8
"""Headers read per group, if each is one read of a file."""
_FAR_HEADERS: Final = 2
"""The same, if each is a request."""
_TRIES: Final = 4
"""Entries tried per header: some may be damaged."""

Stated: TypeAlias = Mapping[str, KVLayout]
"""By group of layers, the layout in most of its entries' headers."""


def stated_layouts(storage: Storage, namespace: str) -> Stated:
    """Return the layouts in some sound headers. Raises nothing for the storage's state."""
    most = _HEADERS if storage.capabilities.probes == 1 else _FAR_HEADERS
    votes: dict[str, Counter[KVLayout]] = {}
    found = 0
    for entry in islice(storage.list(), most * _TRIES):
        info = stored_header(storage, entry.name)
        if info is not None and info.namespace == namespace and entry.nbytes <= info.file_nbytes:
            votes.setdefault(info.layout.group, Counter())[info.layout] += 1
            found += 1
        if found == most:
            break
    return {group: some.most_common(1)[0][0] for group, some in votes.items()}


def stored_header(storage: Storage, name: str) -> EntryInfo | None:
    """Return an entry's header; None where none can be read. Untrusted files are not read."""
    head = getattr(storage, "head", None)
    if head is None:
        return None
    with contextlib.suppress(OSError, EntryError):
        return parse_entry(head(name))
    return None


def layouts_by(found: Description, stated: Stated) -> tuple[KVLayout, ...]:
    """Return a namespace's layouts: as described, unless headers say otherwise."""
    layouts = {layout.group: layout for layout in found.layouts}
    if not stated.keys() <= layouts.keys():  # what is described but not stored does not count
        layouts = {group: one for group, one in layouts.items() if group in stated}
        layouts |= {group: stated[group] for group in sorted(stated)}
    return tuple((layouts | dict(stated)).values())


def fits(stated: Stated, layouts: Sequence[KVLayout]) -> bool:
    """Whether no header contradicts these layouts."""
    wanted = {layout.group: layout for layout in layouts}
    return all(wanted.get(group) == layout for group, layout in stated.items())


def settled(found: Description) -> Description:
    """Return a namespace's description with the layouts that its entries' headers confirm.

    Raises nothing for the state of the storage.
    """
    return replace(found, layouts=layouts_by(found, stated_at(found)))


def stated_at(found: Description) -> Stated:
    """Return the layouts in some sound headers of a namespace, opened for that.

    Raises nothing for the state of the storage.
    """
    try:
        with contextlib.closing(_opened(found.path, Security(trusted_uids="any"))) as storage:
            return stated_layouts(storage, found.name)
    except OSError:
        return {}


def _opened(path: Path | BucketPath, security: Security | None) -> LocalStorage | ObjectStorage:
    if isinstance(path, BucketPath):
        return ObjectStorage(path)
    return LocalStorage(path, security=security)


def make_namespace(
    path: Path | BucketPath,
    identity: Identity,
    layouts: Sequence[KVLayout],
    security: Security,
    *,
    anew: bool = False,
) -> None:
    """Make and describe a namespace if that is not done yet.

    With ``anew`` a sound description of other layouts is replaced, too. Raises OSError;
    StorageError if the parent holds something other than a cache.
    """
    root, text = path.parent, description_text(identity, layouts, security)
    if isinstance(root, Path):  # whose parent may be the mount point of an unmounted disk
        make_folder(root, security.directory_mode)
    try:
        claim(root, mode=security.file_mode)
    except ConfigError as problem:
        raise StorageError(errno.EPERM, str(problem)) from problem

    def stays() -> bool:
        return read_description(path).stays(layouts, anew=anew)

    if isinstance(path, BucketPath):
        key = (path / DESCRIPTION).key
        try:
            path.bucket.put(key, text, create=True)
        except FileExistsError:
            if not stays():
                path.bucket.put(key, text)
        return
    make_folder(path, security.directory_mode)
    # It may be a link, or belong to another user.
    with closing_fd(open_directory(path, security)) as fd:
        status, wanted = os.fstat(fd), security.directory_mode
        if stat.S_IMODE(status.st_mode) & wanted != wanted and status.st_uid == os.geteuid():
            see_to_mode(fd, wanted)
        atomic_write(
            DESCRIPTION, text, dir_fd=fd, mode=security.file_mode, keep=stays, durable=True
        )


def description_text(identity: Identity, layouts: Sequence[KVLayout], security: Security) -> bytes:
    """Return the content of ``namespace.json``; an encrypted cache does not tell what counted."""
    described: dict[str, Any] = {
        "format": FORMAT,
        "identity": identity.describe(),
        "layout": layouts[0].describe(),
    }
    if len(layouts) > 1:
        described["further_groups"] = [layout.describe() for layout in layouts[1:]]
    if identity.counted and not security.encrypts:
        described["counted"] = identity.counted  # the last one, see `vua.storage.description`
    return json.dumps(described, indent=1).encode() + b"\n"


def difference(found: Description, given: Sequence[KVLayout]) -> str:
    """Describe the difference between a namespace's layouts and its user's."""
    stored = found.layouts
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
        f"the KV cache does not fit what {found.path} holds: {', '.join(parts)}. Nothing was "
        "written; use another directory, or another VUAConfig.model for another model"
    )


log = logging.getLogger(__name__)


class Namespace:
    """A namespace in use: its storage, capacity and keyring, and a store per group of layers.

    Safe for threads, processes, hosts and forks, like all its parts.
    """

    travel: Travel | None = None

    def __init__(
        self,
        name: str,
        storage: Storage,
        layouts: Sequence[KVLayout],
        capacity: Capacity | BucketCapacity,
        security: Security,
    ) -> None:
        """Use an open storage; called by :meth:`open` and :meth:`create`."""
        self.name = name
        """The identity's digest, 64 hex."""
        self.storage, self.layouts, self.capacity = storage, tuple(layouts), capacity
        self.keyring = Keyring(name, security)
        self.stores = [
            Store(storage, name, layout, capacity, self.keyring) for layout in self.layouts
        ]
        """One per group of layers, in the order of the layouts."""

    @classmethod
    def open(
        cls,
        path: Location,
        *,
        security: Security | None = None,
        bounds: Limits | None = None,
        layouts: Sequence[KVLayout] | None = None,
    ) -> Namespace | None:
        """Open the namespace at ``path``; None if its layouts are unknown.

        Layouts come from entries' headers; for groups without entries from the description, or from
        the reader's ``layouts`` if no header contradicts them. It is enough if one of several tiers
        is described: then the nearest is described, too, and ``bounds`` count there.

        Raises OSError; StorageError if the directory belongs to an untrusted user.
        """
        if isinstance(path, Tiers):
            described = (settled(read_description(place)) for place in path.places)
            first = next((one for one in described if one.layouts), None)
            if first is None or first.identity is None:
                return None
            return cls.create(
                *(path.parent, first.identity, first.layouts), bounds=bounds, security=security
            )
        found = read_description(path)
        try:
            storage = _opened(path, security)
        except FileNotFoundError:
            return None
        stated = stated_layouts(storage, path.name)
        there = layouts_by(found, stated)
        if not there:
            storage.close()
            return None
        if layouts is None or not fits(stated, layouts):
            layouts = there
        capacity = _capacity(storage, None)
        return cls(path.name, storage, layouts, capacity, security or Security())

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
    ) -> Namespace:
        """Open the namespace of ``identity`` for reading and writing; it is made if missing.

        Args:
            durable: see :class:`vua.storage.local.LocalStorage`; objects always are.
            bounds: this process's limits on the cache's size; ``bounds.json`` and the defaults of
                :mod:`vua.capacity.limits` apply, too.

        Raises:
            LayoutError: the namespace holds other layouts; nothing stored is touched.
            NotWritableError, StorageFullError, StorageError: it cannot be created.
        """
        security = security or Security()
        near, far = (root.near, root.far) if isinstance(root, Tiers) else (root, ())
        storage = create_storage(near, identity, layouts, durable=durable, security=security)
        if not far:
            return cls(identity.namespace, storage, layouts, _capacity(storage, bounds), security)
        local, others = cast(LocalStorage, storage), _opened_tiers(far, identity, layouts, security)
        capacity = TieredCapacity(local, others, bounds)
        tiered = TieredStorage(local, others, capacity.travel)
        namespace = cls(identity.namespace, tiered, layouts, capacity, security)
        namespace.travel = capacity.travel
        return namespace

    def share_reads(self) -> None:
        """Expect other processes of this host to read the same entries at the same time."""
        if (files := self.stores[0].files) is not None:
            files.shares_reads = True

    def close(self) -> None:
        """Finish the capacity's pending work; a second call does nothing.

        The directory stays open while the storage is referenced: a thread may be reading.
        """
        self.capacity.close()

    def keys(
        self,
        ids: bytes,
        extras: Mapping[int, Sequence[tuple[str, bytes]]] | None = None,
        salt: bytes = b"",
    ) -> KeyChain:
        """Name a prompt's chunks, the same for all readers and writers.

        Args:
            extras: chunk index -> (tag, value) pairs that K/V depend on from that chunk on.
            salt: the request's cache salt, which chooses the key that makes the names secret. It is
                not itself an extra.

        Raises NoKeyError if that key is unavailable: then the prompt must not be cached.
        """
        naming = self.keyring.naming(salt)
        return KeyChain(ids, self.layouts[0].chunk_tokens, extras, naming)


def open_names(
    ids: bytes, chunk_tokens: int, extras: Mapping[int, Sequence[tuple[str, bytes]]]
) -> KeyChain:
    """As `Namespace.keys`, where no key makes names secret: they depend on no namespace."""
    return KeyChain(ids, chunk_tokens, extras)


def _capacity(
    storage: LocalStorage | ObjectStorage, bounds: Limits | None
) -> Capacity | BucketCapacity:
    if isinstance(storage, ObjectStorage):
        return BucketCapacity(storage, bounds)
    return Capacity(storage.directory.parent, storage, bounds)


def _opened_tiers(
    places: Sequence[Path | BucketPath],
    identity: Identity,
    layouts: Sequence[KVLayout],
    security: Security,
) -> list[LocalStorage | ObjectStorage]:
    found: list[LocalStorage | ObjectStorage] = []
    for root in places:
        path = root / identity.namespace
        make = functools.partial(make_namespace, path, identity, layouts, security)
        try:
            if isinstance(path, BucketPath):  # described by the first write
                found.append(ObjectStorage(path, make))
                continue
            make()
            found.append(LocalStorage(path, renew=make, security=security))
        except OSError as problem:
            log.warning("%s is left out: %s", root, problem)
    return found


def _passes(root: Path, security: Security) -> bool:
    """Whether a directory, if it exists, belongs to a trusted user. Raises StorageError."""
    with explaining(str(root)):
        try:
            check_owner(root, security)
        except ConfigError:
            return False
        except FileNotFoundError:
            return True
    return True


def create_storage(
    root: Path | BucketPath,
    identity: Identity,
    layouts: Sequence[KVLayout],
    *,
    durable: bool,
    security: Security,
) -> LocalStorage | ObjectStorage:
    """Open the storage of a namespace; arguments and errors are :meth:`Namespace.create`'s.

    An undescribed namespace is described first. If the description disagrees with ``layouts``, the
    headers of entries decide: it is rewritten unless one of them disagrees, too.
    """
    path, wanted = root / identity.namespace, tuple(layouts)
    # else opened with settings that do not ask for that
    judged = root if isinstance(root, Path) and _passes(root, security) else None

    def check() -> None:
        if judged is not None:
            check_owner(judged, security)
        found = read_description(path)
        if found.layouts and found.layouts != wanted:
            stated = stated_at(found)
            if not (stated and fits(stated, wanted)):
                raise LayoutError(difference(found, layouts))

    def make(*, anew: bool = False) -> None:
        if judged is not None and judged.exists():
            check_owner(judged, security)
        make_namespace(path, identity, layouts, security, anew=anew)

    found = read_description(path)
    with explaining(str(path)), contextlib.ExitStack() as stack:
        if not found.layouts:
            make()
        storage = (
            ObjectStorage(path, make)
            if isinstance(path, BucketPath)
            else LocalStorage(path, durable=durable, renew=make, security=security, check=check)
        )
        stack.callback(storage.close)
        if found.layouts != wanted:
            _settle(storage, found, wanted, make)
        stack.pop_all()
    return storage


def _settle(
    storage: LocalStorage | ObjectStorage,
    found: Description,
    wanted: tuple[KVLayout, ...],
    make: Callable[..., None],
) -> None:
    """Make a description that says other layouts than those that are ``wanted`` say these."""
    path, stated = found.path, stated_layouts(storage, found.name)
    if not fits(stated, wanted):
        raise LayoutError(difference(replace(found, layouts=layouts_by(found, stated)), wanted))
    if read_description(path).layouts == wanted:
        return
    text = "%s says other layouts than the entries' headers: it is rewritten"
    log.warning(text, path / DESCRIPTION)
    make(anew=True)
    if read_description(path).layouts != wanted:
        msg = f"{path / DESCRIPTION} could not be read back"
        raise StorageError(errno.EIO, f"{msg}; is the storage healthy?")


class Access(NamedTuple):
    """How a process uses a cache; see :meth:`Namespace.create`."""

    durable: bool = False
    bounds: Limits | None = None
    security: Security | None = None
