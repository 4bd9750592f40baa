"""The layouts of a namespace by the headers of its entries: stronger evidence than its description.

Nothing protects the layouts in ``namespace.json``. One flipped bit there must neither hide what is
stored nor prevent storing more. Every entry's header states its layout, and has a self-check. So a
few headers are read when a namespace is opened, and when its description and its user disagree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from vua.errors import EntryError
from vua.format.layout import KVLayout
from vua.format.parse import EntryInfo, parse_entry
from vua.security.settings import Security
from vua.storage.base import Storage
from vua.storage.description import Description
from vua.storage.local import LocalStorage

if TYPE_CHECKING:
    from vua.storage.object import ObjectStorage

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
    with suppress(OSError, EntryError):
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
        with closing(_opened(found)) as storage:
            return stated_layouts(storage, found.name)
    except OSError:
        return {}


def _opened(found: Description) -> LocalStorage | ObjectStorage:
    if isinstance(found.path, Path):
        return LocalStorage(found.path, security=Security(trusted_uids="any"))
    from vua.storage.object import ObjectStorage  # noqa: PLC0415 - most caches are directories

    return ObjectStorage(found.path)
