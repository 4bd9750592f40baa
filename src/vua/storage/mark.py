"""The mark of a cache directory: ``vua.json``, made when VUA makes the directory.

Without it, nothing is written to a directory, and nothing in it deleted (by eviction, `vua gc`,
`vua rm` or repairs), so a mistyped path costs no file. A directory gets the mark automatically only
while it is empty. A cache that was copied without the mark has it again when its owner writes it.
See docs/decisions/0019-ours-or-not-touched.md.
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
from typing import Final

from vua.errors import ConfigError, explaining
from vua.io.files import atomic_write, make_folder
from vua.io.posix import close_quietly
from vua.security.settings import Security, check_owner

MARK: Final = "vua.json"
LIMITS_FILE: Final = "bounds.json"
UPKEEP: Final = ".upkeep"
"""The directory of the lease, see :mod:`vua.capacity.lease`."""
USES: Final = "uses"
"""A directory in :data:`UPKEEP`, see :mod:`vua.capacity.hit_density`."""

_FORMAT: Final = "vua.root.v1"
_FORMATS: Final = "vua.root."
_TEXT: Final = (
    "A cache of VUA. In a directory with this file, VUA deletes what it has written itself."
)
MAX_MARK_NBYTES: Final = 4096
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def is_marked(root: str | os.PathLike[str]) -> bool:
    """Whether ``root`` has the mark, or a file of its name that this user may not read.

    Raises OSError; ConfigError for the mark of another version of VUA.
    """
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


def claim(root: str | os.PathLike[str], *, mode: int = 0o600) -> None:
    """Check ``root``'s mark before the first write there; an empty directory gets it.

    Safe for any number of concurrent processes. Raises OSError, also if it is empty and this
    process may not write to it; ConfigError for a directory without the mark that holds something.
    """
    if not claimable(root):
        make_mark(root, mode)


def claimable(root: str | os.PathLike[str]) -> bool:
    """Return whether ``root`` has the mark; False: it is empty. Raises as :func:`claim`."""
    if is_marked(root):
        return True
    with os.scandir(root) as entries:
        others = [entry.name for entry in entries if not _is_furniture(root, entry.name)]
    if not others:
        return False
    if is_marked(root):  # made just now, by another process, before what was listed
        return True
    raise not_a_cache(Path(root).absolute(), others)


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


def make_mark(root: str | os.PathLike[str], mode: int = 0o600) -> None:
    """Write the mark, whole or not at all, synced; an existing one stays. Raises OSError."""
    path, text = Path(root) / MARK, mark_text()
    atomic_write(path, text, mode=mode, keep=lambda: is_marked(root), durable=True)


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
