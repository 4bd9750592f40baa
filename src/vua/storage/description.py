"""A namespace's description of itself, ``<root>/<namespace>/namespace.json``.

The file proves which identity the directory belongs to: the identity's digest is the directory's
name. Nothing protects the layouts in it: the headers of entries count more
(:mod:`vua.store.namespace`). The identity's version is part of the digest, so another version of
VUA has namespaces of other names. Tools leave these as they are.

Its last member, ``counted``, tells people what the digest of the model's config counted. Nothing
depends on it: damage in it is ignored, and so is its lack. :func:`nearest` tells people by it which
namespace is nearest to an identity, and in which field they differ.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from vua.errors import ConfigError
from vua.format.identity import FIELDS, Identity
from vua.format.layout import KVLayout, Shard
from vua.storage.location import BucketPath
from vua.storage.location import nearest as nearest_directory

log = logging.getLogger(__name__)

DESCRIPTION: Final = "namespace.json"
FORMAT: Final = "vua.namespace.v1"
_NAME: Final = re.compile(r"[0-9a-f]{64}")
_ENGINE: Final = re.compile(r"[a-z][\w.-]{0,31}")
_NUMBER: Final = re.compile(rb'"vua\.(?:namespace|identity)\.v([1-9]\d{0,3})"')
MAX_DESCRIPTION_NBYTES: Final = 1 << 20
"""A longer file is not VUA's, and not read."""
_MAX_GROUPS: Final = 64
"""Most groups of layers in a description, which bounds the memory of lookups."""


def is_namespace_name(name: str) -> bool:
    """Whether a name can be a namespace's: 64 hex digits."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Description:
    """The content of a namespace's description."""

    path: Path | BucketPath
    identity: Identity | None
    """None if the description is missing, or its identity is not sound."""
    layouts: tuple[KVLayout, ...] = ()
    """One per group of layers; empty if unknown."""
    is_unknown: bool = False
    """Whether another version of VUA described it: its identity has another form."""

    @property
    def counted(self) -> dict[str, object]:
        """What the digest of the model's config counted, by path: for people, never believed."""
        return dict(self.identity.counted) if self.identity else {}

    @property
    def engine(self) -> str:
        """Whose namespace it is, such as "vllm" or "transformers"; "" if unknown. For people."""
        given = self.counted.get("vua.engine") or self.counted.get("vua_stored_by")
        name = str(given[0] if isinstance(given, list) else given or "").partition(" ")[0]
        return name if _ENGINE.fullmatch(name) else ""

    @property
    def model(self) -> str:
        """The model's name, "" if unknown."""
        return "" if self.identity is None else self.identity.name or self.identity.model

    @property
    def directory(self) -> Path:
        """The directory's path. Raises ConfigError for a bucket."""
        directory = nearest_directory(self.path)
        if directory is None:
            raise ConfigError(f"{self.path} is a bucket: this needs a directory")
        return directory

    @property
    def layout(self) -> KVLayout | None:
        """The layout of the first group, the only one of most models."""
        return self.layouts[0] if self.layouts else None

    def layout_of(self, shard: Shard | None) -> KVLayout | None:
        """The layout of the group that ``shard`` belongs to, if known."""
        group = None if shard is None else shard.group
        return next((layout for layout in self.layouts if layout.group == group), None)

    @property
    def name(self) -> str:
        return self.path.name

    def stays(self, layouts: Sequence[KVLayout], *, anew: bool) -> bool:
        """Whether a writer of ``layouts`` leaves it: with ``anew`` only one that says the same."""
        return self.layouts == tuple(layouts) or (not anew and bool(self.layouts))


def descriptions(root: str | os.PathLike[str]) -> Iterator[Description]:
    """Yield the description of each namespace below ``root``, in order of name."""
    for path in sorted(Path(root).iterdir()):
        if is_namespace_name(path.name) and path.is_dir() and not path.is_symlink():
            yield read_description(path)


def read_description(path: Path | BucketPath) -> Description:
    """Read a namespace's description; never raises for its content."""
    try:
        if isinstance(path, BucketPath):
            data = (path / DESCRIPTION).read(MAX_DESCRIPTION_NBYTES)
        else:
            data = _read(os.fspath(path / DESCRIPTION))
    except FileNotFoundError:
        return Description(path, None)
    except (OSError, ConfigError) as problem:
        log.warning("%s is unusable and will be rewritten: %s", path / DESCRIPTION, problem)
        return Description(path, None)
    if _is_of_other_version(data, path.name):
        log.debug("%s is of another version of VUA", path / DESCRIPTION)
        return Description(path, None, is_unknown=True)
    try:
        identity, layouts = parse_description(data)
    except ConfigError as problem:
        log.warning("%s is unusable and will be rewritten: %s", path / DESCRIPTION, problem)
        return Description(path, _identity(data, path.name))
    if identity.namespace != path.name:
        log.warning("%s describes another namespace, ignored", path / DESCRIPTION)
        return Description(path, None)
    return Description(path, identity, layouts)


def _identity(data: bytes, name: str) -> Identity | None:
    """The identity of a description whose other parts may be damaged; None if it is not sound."""
    try:
        described = _loaded(data)
        found = Identity.from_description(described["identity"], described.get("counted"))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return found if found.namespace == name else None


def is_described(directory: int, name: str) -> bool:
    """Whether the namespace ``name`` is soundly described in ``directory`` (a descriptor)."""
    try:
        identity, _ = parse_description(_read(DESCRIPTION, directory))
    except (OSError, ConfigError):
        return False
    return identity.namespace == name


def is_unknown(directory: int, name: str) -> bool:
    """Whether another version of VUA described ``name`` in ``directory`` (a descriptor)."""
    try:
        data = _read(DESCRIPTION, directory)
    except (OSError, ConfigError):
        return False
    return _is_of_other_version(data, name)


def _is_of_other_version(data: bytes, name: str) -> bool:
    others = any(number != b"1" for number in _NUMBER.findall(data))
    return others and _identity(data, name) is None


def _read(path: str, directory: int | None = None) -> bytes:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO cannot hang it
    with open(os.open(path, flags, dir_fd=directory), "rb") as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_DESCRIPTION_NBYTES:
            raise ConfigError(f"expected a file of at most {MAX_DESCRIPTION_NBYTES} bytes")
        return stream.read(MAX_DESCRIPTION_NBYTES)


def parse_description(data: bytes) -> tuple[Identity, tuple[KVLayout, ...]]:
    """Return the identity and the layouts, one per group of layers, of a ``namespace.json``.

    Other members are ignored. Raises ConfigError for anything else.
    """
    try:
        described = _loaded(data)
        found = described["format"]
        identity = Identity.from_description(described["identity"], described.get("counted"))
        groups = [described["layout"], *described.get("further_groups", ())]
        if len(groups) > _MAX_GROUPS:
            raise ConfigError(f"{len(groups)} groups of layers, expected at most {_MAX_GROUPS}")
        layouts = tuple(KVLayout.from_description(group) for group in groups)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise ConfigError(f"not a description of a namespace: {problem!r:.200}") from problem
    if found != FORMAT:
        raise ConfigError(f"format {found!r:.40}, expected {FORMAT!r}")
    return identity, layouts


_COUNTED: Final = b',\n "counted": '


def _loaded(data: bytes) -> Any:
    """Parse a description, without what was counted if it is JSON only without that."""
    try:
        return json.loads(data.decode())  # of bytes, json guesses at UTF-16 and marks
    except (ValueError, RecursionError):
        head, mark, _ = data.partition(_COUNTED)
        if not mark:
            raise
        return json.loads(head.decode() + "}")


ABSENT: Final = "absent"
"""Shown for a field that one of two configs lacks."""
_SHOWN: Final = 40


class FieldDifference(NamedTuple):
    """A field in which another identity differs from ours."""

    field: str
    """A member of an identity, or the path of a config's field that ``model`` is a digest of."""
    ours: object
    theirs: object

    def __str__(self) -> str:
        """In words.

        >>> str(FieldDifference("rope_parameters.rope_theta", 10000, 500000))
        'rope_parameters.rope_theta is 10000 here and 500000 there'
        """
        return f"{self.field} is {_shown(self.ours)} here and {_shown(self.theirs)} there"


class Near(NamedTuple):
    """A namespace, and how far it is from an identity."""

    found: Description
    differences: list[FieldDifference]
    """Those of the identity's own fields first."""

    @property
    def is_of_others(self) -> bool:
        """Whether its weights are other ones."""
        return any(one.field == "weights" for one in self.differences)


def differences(
    ours: Identity, theirs: Identity, *, complete: bool = True
) -> list[FieldDifference]:
    """Return the fields in which two identities differ, the weights first; none if they are equal.

    In place of the digest ``model`` the fields that it counted, by path, as far as both are known.
    Engines complete a config: unless ours is ``complete``, fields that one side lacks are left out,
    and so is what a model's files do not tell.
    """
    unknown = {"name", "model"}
    if not complete:
        unknown |= {"epoch", "chunk_tokens"}
        unknown |= {name for name in ("weights", "kv_dtype") if not getattr(ours, name)}
    names = [name for name in FIELDS if name not in unknown]
    names.sort(key=lambda name: name != "weights")
    found = [FieldDifference(name, getattr(ours, name), getattr(theirs, name)) for name in names]
    if ours.model != theirs.model:
        here, there = ours.counted, theirs.counted
        paths = sorted(here.keys() | there.keys() if complete else here.keys() & there.keys())
        paths = paths if here and there else []
        counted = [FieldDifference(p, here.get(p, ABSENT), there.get(p, ABSENT)) for p in paths]
        counted = [one for one in counted if one.ours != one.theirs]
        found += counted or [FieldDifference("model", ours.model, theirs.model)]
    return [one for one in found if one.ours != one.theirs]


def nearest(ours: Identity, found: Iterable[Description], *, complete: bool = True) -> list[Near]:
    """Return the described namespaces, the nearest first, compared as by :func:`differences`.

    Equal weights count most, then the number of fields that differ, then an equal name.
    """
    near = [
        Near(one, differences(ours, one.identity, complete=complete))
        for one in found
        if one.identity is not None
    ]

    def distance(one: Near) -> tuple[bool, int, bool, str]:
        theirs = one.found.identity
        other_name = theirs is None or theirs.name != ours.name
        return one.is_of_others, len(one.differences), other_name, one.found.name

    return sorted(near, key=distance)


def _shown(value: object) -> str:
    text = json.dumps(value) if value is not ABSENT else ABSENT
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
