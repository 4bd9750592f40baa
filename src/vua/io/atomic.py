"""Small files that are there as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable
from typing import Final

__all__ = ["atomic_write", "see_to_mode"]

_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def atomic_write(
    path: str | os.PathLike[str],
    data: bytes,
    *,
    dir_fd: int | None = None,
    mode: int = 0o600,
    keep: Callable[[], bool] | None = None,
) -> None:
    """Write a file under a temporary name beside ``path``, then give it its name.

    Whoever looks sees the old file or the new one, also after a crash of this process (nothing is
    synced: not after a power cut). Safe for any number of writers at once.

    Args:
        path: of the file.
        data: its bytes.
        dir_fd: a descriptor of the directory that ``path`` is relative to.
        mode: its permissions, whatever the umask.
        keep: asked when a file of that name may be there already; True leaves it. Without it the
            new file takes its place. Of several that write at once with ``keep`` the first one's
            file stays, where the file system has hard links.

    Raises OSError.
    """
    folder = os.path.dirname(path)  # noqa: PTH120
    temporary = os.path.join(folder, f".tmp-{secrets.token_hex(8)}")  # noqa: PTH118
    try:
        with open(os.open(temporary, _FLAGS, mode, dir_fd=dir_fd), "wb") as stream:  # noqa: PTH123
            see_to_mode(stream.fileno(), mode)
            stream.write(data)
        if keep is not None:
            with contextlib.suppress(OSError):  # it is there, or the file system has no hard links
                os.link(temporary, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
                return
            if keep():
                return
        os.replace(temporary, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=dir_fd)


def see_to_mode(
    place: str | os.PathLike[str] | int, mode: int, *, dir_fd: int | None = None
) -> None:
    """Give what was just made its mode, whatever the umask, where it has another one.

    Some mounts refuse every `chmod`, also to the mode that a file has. The set-group-id bit, which
    a directory takes over from the one above it, stays. Raises OSError.
    """
    if isinstance(place, int):
        status = os.fstat(place)
    else:
        status = os.stat(place, dir_fd=dir_fd, follow_symlinks=False)
    if stat.S_IMODE(status.st_mode) in (mode, mode | stat.S_ISGID):
        return
    if isinstance(place, int):
        os.fchmod(place, mode)
    else:
        os.chmod(place, mode, dir_fd=dir_fd)
