"""File systems of a test's own, on loop devices; they vanish with the process that mounted them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_CLONE_NEWNS: Final = 0x00020000  # linux/sched.h
_MKFS: Final = {
    "ext4": ("mkfs.ext4", "-q", "-F"),
    "xfs": ("mkfs.xfs", "-q", "-f"),
    "btrfs": ("mkfs.btrfs", "-q", "-f"),
}


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def command(*words: str | Path) -> str:
    """Run a command of the system; return what it says. Raises OSError with that if it fails."""
    done = subprocess.run(
        [str(word) for word in words],
        env={**os.environ, "PATH": _path()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise OSError(f"{words[0]}: {(done.stderr or done.stdout).strip()[-200:]}")
    return done.stdout


def why_no_mounts(*kinds: str) -> str | None:
    """Return why file systems of these kinds cannot be made and mounted here, or None."""
    tools = ["mount", "umount", *(_MKFS[kind][0] for kind in kinds)]
    missing = [tool for tool in tools if shutil.which(tool, path=_path()) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    if os.geteuid() != 0:
        return "needs root, to mount"
    if not Path("/dev/loop-control").exists():
        return "needs loop devices"
    known = Path("/proc/filesystems").read_text(encoding="ascii").split()
    lacking = [kind for kind in kinds if kind not in known]
    return f"this kernel has no {', '.join(lacking)}" if lacking else None


def own_mounts() -> None:
    """Give this process mounts of its own: what it mounts from now on nobody else sees.

    They vanish, and loop devices with them, when the last process that has them ends. Raises
    OSError where that is not allowed.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "mounts of its own are not allowed")
    command("mount", "--make-rprivate", "/")


def formatted(image: Path, kind: str, nbytes: int) -> Path:
    """Make an image file with an empty file system of one kind; return ``image``."""
    image.unlink(missing_ok=True)
    with image.open("wb") as stream:
        stream.truncate(nbytes)
    command(*_MKFS[kind], image)
    return image


@contextlib.contextmanager
def mounted(image: Path, at: Path, kind: str, *options: str) -> Iterator[Path]:
    """Mount an image by a loop device at the directory ``at``, which is made; yields it."""
    at.mkdir(parents=True, exist_ok=True)
    command("mount", "-t", kind, "-o", ",".join(["loop", *options]), image, at)
    try:
        yield at
    finally:
        try:
            command("umount", at)
        except OSError:
            command("umount", "-l", at)  # gone when the last process lets go of it
