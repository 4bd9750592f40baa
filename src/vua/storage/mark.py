"""The mark of a cache directory: ``vua.json``, made when VUA makes the directory.

Without it, nothing is written to a directory, and nothing in it deleted (by eviction, `vua gc`,
`vua rm` or repairs), so a mistyped path costs no file. A directory gets the mark automatically only
while it is empty. A cache that was copied without the mark has it again when its owner writes it.
See docs/decisions/0019-ours-or-not-touched.md.

In a bucket the mark is the object ``vua.json``. An empty prefix gets it automatically, and so does
one where this process has seen it before: everything may have been deleted meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

from vua.errors import ConfigError, StorageError, explaining
from vua.io.files import atomic_write, make_folder
from vua.io.posix import close_quietly
from vua.security.settings import Security, check_owner
from vua.storage.description import Description, is_namespace_name, read_description
from vua.storage.location import BucketPath

Root: TypeAlias = "str | os.PathLike[str] | BucketPath"
"""A cache's directory, or its prefix in a bucket."""

MARK: Final = "vua.json"
LIMITS_FILE: Final = "bounds.json"
UPKEEP: Final = ".upkeep"
"""The directory of the lease, see :mod:`vua.capacity.upkeep`."""
USES: Final = "uses"
"""A directory in :data:`UPKEEP`, see :mod:`vua.capacity.hit_density`."""

_FORMAT: Final = "vua.root.v1"
_FORMATS: Final = "vua.root."
_TEXT: Final = (
    "A cache of VUA. In a directory with this file, VUA deletes what it has written itself."
)
MAX_MARK_NBYTES: Final = 4096
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def is_marked(root: Root) -> bool:
    """Whether ``root`` has the mark, or a file of its name that this user may not read.

    Raises OSError; ConfigError for the mark of another version of VUA.
    """
    if isinstance(root, BucketPath):
        try:
            found = judge_mark((root / MARK).read(MAX_MARK_NBYTES), str(root))
        except FileNotFoundError:
            return False
        if found:
            root.bucket.marked.add(root.key)
        return found
    try:
        fd = os.open(Path(root) / MARK, _FLAGS)
    except OSError as problem:
        if problem.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        if problem.errno in (errno.EACCES, errno.EPERM):
            return os.path.lexists(Path(root) / MARK)  # another user's, who shares the directory
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return False
        data = os.read(fd, MAX_MARK_NBYTES)
    finally:
        close_quietly(fd)
    return judge_mark(data, os.fspath(root))


def judge_mark(data: bytes, where: str) -> bool:
    """Whether these bytes are the mark. Raises ConfigError for that of another version of VUA."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return False
    found = content.get("format") if isinstance(content, dict) else None
    if isinstance(found, str) and found.startswith(_FORMATS) and found != _FORMAT:
        raise ConfigError(
            f"{where} is a cache of another version of VUA ({MARK} says {found!r:.40}, expected "
            f"{_FORMAT!r}): nothing in it is changed. Use that version, or another directory"
        )
    return found == _FORMAT


def mark_text() -> bytes:
    return json.dumps({"format": _FORMAT, "about": _TEXT}, indent=1).encode() + b"\n"


_NO_CONTENT: Final = re.compile(
    r"lost\+found|\.snapshots?|\.zfs|\.nfs[0-9a-f]+"  # made by file systems
    r"|\.tmp-[0-9a-f]{16}|\.doctor-\w+"  # other VUA processes' temporary files and probes
)


def claim(root: Root, *, mode: int = 0o600, tool: bool = False) -> None:
    """Check ``root``'s mark before the first write there; an empty directory or prefix gets it.

    Safe for any number of concurrent processes. A prefix where this process has seen the mark gets
    it again: its own entries may already be there. A missing bucket counts as empty, but not for a
    ``tool``: some servers create it at the first write. Raises OSError, also if it is empty and
    this process may not write to it; ConfigError for one without the mark that holds something.
    """
    if not claimable(root, tool=tool):
        make_mark(root, mode)


def claimable(root: Root, *, tool: bool = False) -> bool:
    """Return whether ``root`` has the mark; False: it gets it. Raises as :func:`claim`."""
    if is_marked(root):
        return True
    others = _content(root, tool=tool)
    if not others:
        return False
    if is_marked(root):  # made just now, by another process, before what was listed
        return True
    raise not_a_cache(root if isinstance(root, BucketPath) else Path(root).absolute(), others)


def _content(root: Root, *, tool: bool) -> list[str]:
    if not isinstance(root, BucketPath):
        with os.scandir(root) as entries:
            return [entry.name for entry in entries if not _is_furniture(root, entry.name)]
    try:
        names, others = _listed(root)
    except StorageError as problem:
        if tool or problem.errno != errno.ENOENT:
            raise
        return []
    return others or ([] if root.key in root.bucket.marked and not tool else names)


def not_a_cache(where: object, names: Sequence[str]) -> ConfigError:
    """Return the error for a directory or prefix without the mark that holds ``names``."""
    shown = ", ".join(repr(name[:60]) for name in sorted(names)[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ConfigError(
        f"{where} is not a cache directory of VUA (no {MARK}) and not empty (it holds "
        f"{shown}{more}): nothing in it is changed. Use a place of its own, for example "
        f"{where}/vua-cache; if it is a cache that lost this file, {how_to_mark(where)}"
    )


def how_to_mark(where: object) -> str:
    return f'write {{"format": "{_FORMAT}"}} to {where}/{MARK}'


def make_mark(root: Root, mode: int = 0o600) -> None:
    """Write the mark, whole or not at all, synced; an existing one stays. Raises OSError."""
    if not isinstance(root, BucketPath):
        path, text = Path(root) / MARK, mark_text()
        atomic_write(path, text, mode=mode, keep=lambda: is_marked(root), durable=True)
        return
    key = (root / MARK).key
    try:
        root.bucket.put(key, mark_text(), create=True)
    except FileExistsError:  # another process was faster, or this server refuses conditions
        if not (root / MARK).exists():
            root.bucket.put(key, mark_text())
    root.bucket.marked.add(root.key)


def _is_furniture(root: str | os.PathLike[str], name: str) -> bool:
    if name == UPKEEP:
        with contextlib.suppress(OSError):
            ours = re.compile(f"lease|search|victims|census|done-|writers|clock|{USES}")
            return all(ours.match(one) for one in os.listdir(Path(root) / UPKEEP))
        return False
    return name in (MARK, LIMITS_FILE) or _NO_CONTENT.fullmatch(name) is not None


def check_root(
    root: str | os.PathLike[str], *, create: bool = True, security: Security | None = None
) -> Path:
    """Return ``root`` as an existing directory; only its last part is created (0700).

    Args:
        create: whether it will be written to. It is created if missing, but not its parent, which
            may be a disk that is not mounted. An empty one gets the mark (see `vua.storage.mark`).
        security: who may own it, and its mode; by default not checked.

    Raises:
        ConfigError: it is a file; or it is missing and ``create`` is False; or its parent is
            missing (a mistyped path, a disk that is not mounted); or untrusted users could replace
            its files; or it will be written to and holds something other than a cache.
        StorageError: it cannot be created or searched.

    The returned path is absolute, and keeps symbolic links.
    """
    wanted = security or Security()
    with explaining(str(root)):  # the working directory may be deleted
        path = Path(os.path.abspath(root))
    with explaining(str(path)):
        try:
            if create and not os.path.lexists(path):
                make_folder(path, wanted.directory_mode)
            if not path.is_dir():
                found = "a file" if path.exists() else "nothing"
                msg = (
                    f"{path}: expected a directory, found {found}; name the directory of the cache"
                )
                raise ConfigError(msg)
            if security is not None:
                check_owner(path, security)
            if create:
                _claim(path, wanted.file_mode)
        except FileNotFoundError as problem:  # more than the last part is missing
            raise ConfigError(_missing_above(path)) from problem
        except NotADirectoryError as problem:
            msg = f"{path}: something above it is a file; name a directory"
            raise ConfigError(msg) from problem
    return path


def _missing_above(path: Path) -> str:
    return (
        f"{path}: no such directory, and {path.parent} is missing too; correct the path, "
        "mount what belongs there, or make that directory"
    )


def _claim(root: Path, mode: int) -> None:
    try:
        claim(root, mode=mode)
    except OSError:
        if os.access(root, os.W_OK, effective_ids=True):
            raise


def bucket_contents(root: BucketPath) -> tuple[list[Description], list[str]]:
    """Return each namespace's description, and what else is in the cache's prefix.

    A folder with a namespace's name is described as one. Raises StorageError.
    """
    names, others = _listed(root)
    mark = (root / MARK).key
    return [read_description(root / name) for name in names], [one for one in others if one != mark]


def _listed(root: BucketPath) -> tuple[list[str], list[str]]:
    """Return the names of namespaces in a prefix, and the paths of what is not VUA's."""
    folders, objects = root.bucket.folders(root.key)
    names = {path: path.rpartition("/")[2] for path in (*folders, *(one.key for one in objects))}
    known = ("", LIMITS_FILE, UPKEEP)  # "" is the folder's own marker
    others = [
        path
        for path, name in names.items()
        if not (name in known or is_namespace_name(name) or _NO_CONTENT.fullmatch(name))
    ]
    spaces = sorted(filter(is_namespace_name, (names[path] for path in folders)))
    return spaces, sorted(others)
