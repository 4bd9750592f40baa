"""A namespace's description of itself, ``<root>/<namespace>/namespace.json``.

The file proves which identity the directory belongs to: the identity's digest is the directory's
name. Nothing protects the layouts in it: the headers of entries count more
(:mod:`vua.store.evidence`). A description that only a later version of VUA can have written is told
apart from a damaged one: it is left unchanged.

Its last member, ``counted``, tells people what the digest of the model's config counted. Nothing
depends on it: damage in it is ignored, and so is its lack.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vua.errors import ConfigError
from vua.format.identity import FIELDS, VERSION, Identity
from vua.format.layout import ITEMSIZE, KVLayout, Shard, is_group
from vua.storage.location import nearest

if TYPE_CHECKING:
    from vua.storage.location import BucketPath

log = logging.getLogger(__name__)

DESCRIPTION: Final = "namespace.json"
FORMAT: Final = "vua.namespace.v1"
_NAME: Final = re.compile(r"[0-9a-f]{64}")
MAX_DESCRIPTION_NBYTES: Final = 1 << 20
"""A longer file is not VUA's, and not read."""
_MAX_GROUPS: Final = 64
"""Most groups of layers in a description, which bounds the memory of lookups."""


def is_namespace_name(name: str) -> bool:
    """Whether a name can be a namespace's: 64 hex digits."""
    return _NAME.fullmatch(name) is not None


_MEMBERS: Final = frozenset({"format", "identity", "layout"})
_LAYOUT: Final = frozenset({"layers", "kv_heads", "k_dim", "v_dim", "dtype", "chunk_tokens"})
_VERSION: Final = re.compile(r"vua\.(?:namespace|identity)\.v[1-9]\d{0,3}")
_FLIPPED_NBYTES: Final = 4096
"""Longest unsound description that is tried with each of its bits flipped."""


class LaterDescriptionError(ConfigError):
    """A description contains something that only a later version of VUA can have written."""


@dataclass(frozen=True, slots=True)
class Description:
    """The content of a namespace's description."""

    path: Path | BucketPath
    identity: Identity | None
    """None if the description is missing, or its identity is not sound."""
    layouts: tuple[KVLayout, ...] = ()
    """One per group of layers; empty if unknown."""
    later: str = ""
    """What only a later version of VUA can have written; if not empty, nothing is written there."""
    flipped: tuple[tuple[KVLayout, ...], ...] = ()
    """For one that looks later: the layouts that it has with any one bit flipped."""

    def stands(self, layouts: tuple[KVLayout, ...]) -> bool:
        """Whether a writer of these layouts leaves it unchanged.

        It has just these layouts, or a later version of VUA wrote it. A version number one flipped
        bit away from ours stays, too.
        """
        if self.later:
            return self.later.startswith(("format ", "identity ")) or layouts not in self.flipped
        return self.layouts == layouts

    @property
    def counted(self) -> dict[str, object]:
        """What the digest of the model's config counted, by path: for people, never believed."""
        return dict(self.identity.counted) if self.identity else {}

    @property
    def directory(self) -> Path:
        """The directory's path. Raises ConfigError for a bucket."""
        directory = nearest(self.path)
        if directory is None:
            msg = f"{self.path} is a bucket: this needs a directory"
            raise ConfigError(msg)
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


def descriptions(root: str | os.PathLike[str]) -> Iterator[Description]:
    """Yield the description of each namespace below ``root``, in order of name."""
    for path in sorted(Path(root).iterdir()):
        if is_namespace_name(path.name) and path.is_dir() and not path.is_symlink():
            yield read_description(path)


def read_description(path: Path) -> Description:
    """Read a namespace's description; never raises for the file's content."""
    return judged(path, lambda: _read(os.fspath(path / DESCRIPTION)))


def judged(path: Path | BucketPath, read: Callable[[], bytes]) -> Description:
    """Return the description of the namespace at ``path`` from the bytes that ``read`` returns.

    ``read`` may raise OSError and ConfigError.
    """
    try:
        data = read()
    except FileNotFoundError:
        return Description(path, None)
    except (OSError, ConfigError) as problem:
        log.warning("%s is unusable and will be rewritten: %s", path / DESCRIPTION, problem)
        return Description(path, None)
    identity = _identity(data, path.name)
    try:
        described, layouts = parse_description(data)
    except LaterDescriptionError as problem:
        log.warning("%s is left unchanged: %s", path / DESCRIPTION, problem)
        return Description(path, identity, later=str(problem), flipped=_flipped(data, path.name))
    except ConfigError as problem:
        log.warning("%s is unusable and will be rewritten: %s", path / DESCRIPTION, problem)
        return Description(path, identity)
    if described.namespace != path.name:
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


@functools.lru_cache(maxsize=64)
def _flipped(data: bytes, name: str) -> tuple[tuple[KVLayout, ...], ...]:
    """The layouts of each sound description that is one flipped bit away from this one."""
    found, changed = [], bytearray(data)
    for bit in range(8 * len(data) if len(data) <= _FLIPPED_NBYTES else 0):
        changed[bit // 8] ^= 1 << bit % 8
        try:
            identity, layouts = parse_description(bytes(changed))
        except ConfigError:
            pass
        else:
            found += [layouts] if identity.namespace == name else []
        changed[bit // 8] ^= 1 << bit % 8
    return tuple(found)


def is_described(directory: int, name: str) -> bool:
    """Whether the namespace ``name`` is soundly described in ``directory`` (a descriptor)."""
    try:
        identity, _ = parse_description(_read(DESCRIPTION, directory))
    except (OSError, ConfigError):
        return False
    return identity.namespace == name


def is_later(directory: int) -> bool:
    """Whether a later version of VUA wrote the description in ``directory`` (a descriptor)."""
    try:
        data = _read(DESCRIPTION, directory)
    except (OSError, ConfigError):
        return False
    return _is_later(data)


def is_surely_later(directory: int, name: str) -> bool:
    """As :func:`is_later`, and no flipped bit explains it. ``name``: of the namespace."""
    try:
        data = _read(DESCRIPTION, directory)
    except (OSError, ConfigError):
        return False
    return _is_later(data) and not _flipped(data, name)


def _is_later(data: bytes) -> bool:
    try:
        parse_description(data)
    except LaterDescriptionError:
        return True
    except ConfigError:
        pass
    return False


def _read(path: str, directory: int | None = None) -> bytes:
    """Return a description's bytes. Raises OSError; ConfigError for a file that cannot be one."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO cannot hang it
    with open(os.open(path, flags, dir_fd=directory), "rb") as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_DESCRIPTION_NBYTES:
            msg = f"expected a file of at most {MAX_DESCRIPTION_NBYTES} bytes"
            raise ConfigError(msg)
        return stream.read(MAX_DESCRIPTION_NBYTES)


def parse_description(data: bytes) -> tuple[Identity, tuple[KVLayout, ...]]:
    """Return the identity and the layouts, one per group of layers, of a ``namespace.json``.

    Raises LaterDescriptionError if a later version of VUA has written it, ConfigError for anything
    else.
    """
    try:
        described = _loaded(data)
        _check_known(described)
        found = described["format"]
        identity = Identity.from_description(described["identity"], described.get("counted"))
        groups = [described["layout"], *described.get("further_groups", ())]
        if len(groups) > _MAX_GROUPS:
            msg = f"{len(groups)} groups of layers, expected at most {_MAX_GROUPS}"
            raise ConfigError(msg)
        layouts = tuple(KVLayout.from_description(group) for group in groups)
    except LaterDescriptionError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        msg = f"not a description of a namespace: {problem!r:.200}"
        raise ConfigError(msg) from problem
    if found != FORMAT:
        msg = f"format {found!r:.40}, expected {FORMAT!r}"
        raise ConfigError(msg)
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


def _check_known(described: Any) -> None:
    """Raise LaterDescriptionError if a description has an unknown part."""
    unknown = _unknown(described) if isinstance(described, dict) else ""
    if unknown:
        msg = f"{unknown}; a later version of VUA may know it"
        raise LaterDescriptionError(msg)


def _unknown(described: Mapping[str, Any]) -> str:
    """Name what in a description is not of this version; "" if it lacks something else."""
    found, identity = described.get("format"), described.get("identity")
    if found != FORMAT:
        later = isinstance(found, str) and _VERSION.fullmatch(found)
        return f"format {found}, known is {FORMAT}" if later else ""
    if not described.keys() >= _MEMBERS or not isinstance(identity, dict):
        return ""
    if extra := described.keys() - _MEMBERS - {"further_groups", "counted"}:
        return f"members {sorted(extra)!r:.80}"
    further = described.get("further_groups", [])
    groups = [described["layout"], *(further if isinstance(further, list) else [])]
    parts = [_unknown_identity(identity), *map(_unknown_layout, groups[: _MAX_GROUPS + 1])]
    return next(filter(None, parts), "")


def _unknown_identity(identity: Mapping[str, Any]) -> str:
    known = {"version", "namespace", *FIELDS}
    if not known <= identity.keys():
        return ""
    version = identity["version"]
    if isinstance(version, str) and _VERSION.fullmatch(version) and version != VERSION:
        return f"identity {version}, known is {VERSION}"
    extra = identity.keys() - known
    return f"members {sorted(extra)!r:.80} of the identity" if extra else ""


def _unknown_layout(layout: object) -> str:
    if not isinstance(layout, dict) or not layout.keys() >= _LAYOUT:
        return ""
    if extra := layout.keys() - _LAYOUT - {"group"}:
        return f"members {sorted(extra)!r:.80} of a layout"
    dtype, group = layout["dtype"], layout.get("group", "")
    if isinstance(dtype, str) and dtype not in ITEMSIZE:
        return f"dtype {dtype!r:.40}"
    if isinstance(group, str) and not is_group(group):
        return f"group {group!r:.40}"
    return ""
