"""Storage situations that users of caches have met, on file systems of their own."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from e2e.damage import blank, flip, truncate
from faces import Library
from helpers import entries_below
from scorecard.attacks import PLANTS

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


MOST_NBYTES: Final = 1 << 20
"""What a bounded cache may hold; several prompts of each face fill it."""
_UID: Final = 4242
_GID: Final = 4343


class NotRunError(Exception):
    """This machine cannot make the situation."""


Situation = Callable[["Place"], Iterator[str | None]]
"""Yields the cache's path, None: the place's directory; then, where nothing can be stored for a
while, "during", and goes on when it is to end. When it has ended or returned the storage can be
used. In a process of its own.
"""
SITUATIONS: Final[dict[str, Situation]] = {}
_BOUNDED: Final = {"max_bytes": MOST_NBYTES}
_HALF: Final = {"max_bytes": MOST_NBYTES // 2, "min_free_bytes": 0}


def situation(text: str) -> Callable[[Situation], Situation]:
    def named(function: Situation) -> Situation:
        SITUATIONS[text] = function
        return function

    return named


def once(text: str, harm: Callable[[Place], object], *, look: bool = False, **limits: Any) -> None:
    """A situation in which something happens once; ``look``: what is written where is counted."""

    def happens(place: Place) -> Iterator[str | None]:
        place.limits = limits
        yield None
        if look:
            place.look()
        harm(place)

    SITUATIONS[text] = happens


class Place:
    """Where a cell has its files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / "kv"
        self.root.mkdir(mode=0o700)
        self.limits: dict[str, Any] = {}
        self.held: int | None = None
        self.stack = contextlib.ExitStack()

    def mount(self, kind: str, *options: str, mebibytes: int = 64) -> Path:
        """Mount a file system of one's own; in it is the cache's directory."""
        at = self.folder / "mount"
        at.mkdir(exist_ok=True)
        if kind == "tmpfs":
            self.command("mount", "-t", kind, "-o", ",".join(options), "t", at)
        else:
            with self.tried():
                image = formatted(self.folder / "image", kind, mebibytes << 20)
            self.command("mount", "-t", kind, "-o", ",".join(["loop", *options]), image, at)
        self.root = at / "kv"
        self.root.mkdir(mode=0o700)
        return at

    @contextlib.contextmanager
    def tried(self) -> Iterator[None]:
        """What this machine may not be able to do."""
        try:
            yield
        except (OSError, ImportError) as problem:
            raise NotRunError(str(problem)) from problem

    def command(self, *words: str | Path) -> None:
        with self.tried():
            command(*words)

    def fill(self, at: Path) -> list[Path]:
        found = []
        for number, piece in enumerate((1 << 20, 4096, 512, 1)):
            path = at / f"others{number}"
            found.append(path)
            with contextlib.suppress(OSError), path.open("wb", buffering=0) as stream:
                while True:
                    stream.write(b"x" * piece)
        return found

    def remove(self) -> None:
        """Delete the directory, also while somebody writes there."""
        for _ in range(3):  # who writes may make it anew meanwhile
            shutil.rmtree(self.root, ignore_errors=True)
            if not self.root.exists():
                break

    def replace(self, *, levels: int = 0) -> None:
        """Move it, or a directory above it, away; make it anew. What runs may make it first."""
        (self.root, *self.root.parents)[levels].rename(self.folder / "old")
        self.make()

    def make(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o700)

    def written(self, at: Path, prompts: range) -> None:
        writer = Library()
        writer.open(str(at))
        for prompt in prompts:
            writer.ask(prompt)
        writer.vua.close()

    def namespaces(self) -> list[Path]:
        return [path for path in self.root.iterdir() if len(path.name) == 64]

    def look(self) -> None:
        """Hold the directory as it is now, to see what is written there when it is gone."""
        self.held = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)

    @property
    def hidden_nbytes(self) -> int:
        """What lies in it by now."""
        if self.held is None:
            return 0
        walked = os.walk(f"/proc/self/fd/{self.held}/")
        return sum(Path(at, name).stat().st_size for at, _, names in walked for name in names)


def _full(kind: str, *options: str, mebibytes: int = 64) -> Situation:
    def happens(place: Place) -> Iterator[str | None]:
        at = place.mount(kind, *options, mebibytes=mebibytes)
        yield None
        others = place.fill(at)
        yield "during"
        for one in others:
            one.unlink(missing_ok=True)

    return happens


def _alone(*options: str) -> Situation:
    """Chunks alone use it up, without any limit: they are evicted."""

    def happens(place: Place) -> Iterator[str | None]:
        place.mount("tmpfs", *options)
        yield None

    return happens


SITUATIONS["others fill a tmpfs"] = _full("tmpfs", "size=8M")
SITUATIONS["others fill ext4"] = _full("ext4")
SITUATIONS["others fill XFS"] = _full("xfs", mebibytes=320)


@situation("no inode left (tmpfs)")
def no_inodes(place: Place) -> Iterator[str | None]:
    at = place.mount("tmpfs", "size=64M", "nr_inodes=900")
    yield None
    with contextlib.suppress(OSError):
        for number in range(1000):
            (at / f"others{number}").touch()
    yield "during"
    for one in at.glob("others*"):
        one.unlink()


SITUATIONS["caches fill all inodes (tmpfs)"] = _alone("size=64M", "nr_inodes=120")


@situation("quota (btrfs)")
def quota(place: Place) -> Iterator[str | None]:
    """The cache's subvolume may hold little more."""
    at = place.mount("btrfs", mebibytes=256)
    place.root.rmdir()
    place.command("btrfs", "quota", "enable", at)
    place.command("btrfs", "subvolume", "create", place.root)
    place.root.chmod(0o700)
    yield None
    command("btrfs", "qgroup", "limit", "300K", place.root)
    yield "during"
    for attempt in range(20):
        with contextlib.suppress(OSError):  # to lift it takes room, too
            command("btrfs", "qgroup", "limit", "none", place.root)
            break
        time.sleep(0.1 * attempt)


@situation("mounted over")
def mounted_over(place: Place) -> Iterator[str | None]:
    place.limits = _BOUNDED
    at = place.mount("tmpfs", "size=64M")
    yield None
    place.look()
    command("mount", "-t", "tmpfs", "-o", "size=64M", "two", at)
    place.make()


@situation("unmounted, mounted again")
def unmounted(place: Place) -> Iterator[str | None]:
    """As when a disk is exchanged."""
    place.limits = _BOUNDED
    at = place.mount("tmpfs", "size=64M")
    yield None
    place.look()
    command("umount", "-l", at)
    yield "during"
    command("mount", "-t", "tmpfs", "-o", "size=64M", "two", at)
    place.make()


def _removed_by_vua(place: Place) -> None:
    words = [sys.executable, "-m", "vua", "rm", str(place.root), "--all", "--yes"]
    subprocess.run(words, check=True, capture_output=True)


once("moved, another in its place", Place.replace, look=True, **_BOUNDED)
once("removed", Place.remove)
once("removed at its limit", Place.remove, max_bytes=MOST_NBYTES // 4, min_free_bytes=0)
once("vua rm --all", _removed_by_vua)


@situation("read-only")
def read_only(place: Place) -> Iterator[str | None]:
    at = place.mount("ext4")
    yield None
    command("mount", "-o", "remount,ro", at)
    yield "during"
    command("mount", "-o", "remount,rw", at)


@situation("lower layer of an overlay")
def overlay(place: Place) -> Iterator[str | None]:
    """What an image brought cannot be renamed there (EXDEV), only covered."""
    lower = place.mount("tmpfs", "size=64M")
    for name in ("upper", "work"):
        (lower / name).mkdir(mode=0o700)
    place.root = place.folder / "merged"
    place.make()
    place.limits = _HALF
    place.written(lower / "kv", range(100, 106))
    layers = f"lowerdir={lower}/kv,upperdir={lower}/upper,workdir={lower}/work"
    place.command("mount", "-t", "overlay", "-o", layers, "overlay", place.root)
    yield None


@situation("immovable (chattr +i)")
def immovable(place: Place) -> Iterator[str | None]:
    """A chunk can be neither moved nor deleted."""
    at = place.mount("ext4")
    place.limits = _HALF
    yield None
    for path in sorted(at.glob("kv/*/*/*")):  # some may be evicted meanwhile
        try:
            command("chattr", "+i", path)
        except OSError as problem:
            if path.exists():
                raise NotRunError(str(problem)) from problem
        else:
            break


def _each_file(harm: Callable[[Path], object]) -> Callable[[Place], None]:
    def harmed(place: Place) -> None:
        for path in entries_below(place.root):
            with contextlib.suppress(FileNotFoundError):  # put aside by now
                harm(path)

    return harmed


once("files of another user", _each_file(lambda path: os.chown(path, _UID, _GID)))


@situation("relative path, chdir")
def chdir(place: Place) -> Iterator[str | None]:
    """The process goes elsewhere."""
    (place.folder / "elsewhere").mkdir()
    os.chdir(place.folder)
    yield "kv"
    os.chdir(place.folder / "elsewhere")


def _behind_link(place: Place) -> None:
    """`mv kv new; ln -s new kv`: the same files."""
    place.root.rename(place.folder / "new")
    place.root.symlink_to("new")


once("hard links (cp -al)", lambda at: command("cp", "-al", at.root, at.folder / "snapshot"))
once("moved, a link in its place", _behind_link, **_BOUNDED)


@situation("the directory above moved, another in its place")
def parent_moved(place: Place) -> Iterator[str | None]:
    """Two levels up."""
    place.limits = _BOUNDED
    place.root = place.folder / "a" / "b" / "kv"
    place.make()
    yield None
    place.look()
    place.replace(levels=2)


@situation("exchanged with another cache")
def exchanged(place: Place) -> Iterator[str | None]:
    """By one call of the kernel; then the first one is written by nobody."""
    place.limits = _BOUNDED
    other = place.folder / "other"
    other.mkdir(mode=0o700)
    place.written(other, range(100, 104))
    yield None
    place.look()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(-100, os.fsencode(place.root), -100, os.fsencode(other), 2):
        raise NotRunError(os.strerror(ctypes.get_errno()))


def _rolled_back(place: Place) -> None:
    """`cp -a kv snap; rm -rf kv; mv snap kv`: equal files, none of them the same."""
    command("cp", "-a", place.root, place.folder / "snap")
    place.remove()
    shutil.rmtree(place.root, ignore_errors=True)
    (place.folder / "snap").rename(place.root)


def _namespace_replaced(place: Place) -> None:
    for path in place.namespaces():
        command("cp", "-a", path, place.folder / "copy")
        path.rename(place.folder / path.name)
        (place.folder / "copy").rename(path)


def _namespace_mounted_over(place: Place) -> None:
    """Its directory is empty then."""
    for path in place.namespaces():
        command("mount", "-t", "tmpfs", "-o", "size=64M,mode=700", "over", path)


once("rolled back to a snapshot", _rolled_back)
once("a copy of the namespace in its place", _namespace_replaced)
once("mounted over the namespace alone", _namespace_mounted_over)


@situation("a file in its place for a while")
def file_in_its_place(place: Place) -> Iterator[str | None]:
    """As a restore that went wrong leaves."""
    yield None
    place.root.rename(place.folder / "old")
    place.root.write_text("not a directory")
    yield "during"
    place.root.unlink()
    (place.folder / "old").rename(place.root)


def _chunks_removed(place: Place) -> None:
    """`rm -rf kv/*/??`."""
    for path in place.root.glob("*/??"):
        shutil.rmtree(path, ignore_errors=True)


def _upkeep_replaced(place: Place) -> None:
    """`.upkeep` is gone, and cannot be made."""
    (place.root / ".upkeep").rename(place.folder / "upkeep")
    with contextlib.suppress(OSError):  # made anew by now
        (place.root / ".upkeep").write_text("x")


once("all folders of chunks removed", _chunks_removed)
once("a file where VUA keeps its own", _upkeep_replaced, **_HALF)
SITUATIONS["caches fill a tmpfs"] = _alone("size=1536k")


def _limited(kind: int, most: Callable[[], int]) -> Situation:
    """The process may have no more of something for a while."""

    def happens(place: Place) -> Iterator[str | None]:
        yield None
        before = resource.getrlimit(kind)
        resource.setrlimit(kind, (most(), before[1]))
        yield "during"
        resource.setrlimit(kind, before)

    return happens


def _open_descriptors() -> int:
    lowest = os.dup(0)
    os.close(lowest)
    return lowest


# every write fails in its middle
SITUATIONS["files of at most 4 KiB (ulimit -f)"] = _limited(resource.RLIMIT_FSIZE, lambda: 4096)
SITUATIONS["no descriptor left"] = _limited(resource.RLIMIT_NOFILE, _open_descriptors)


@situation("the disk fails (XFS shuts down), mounted again")
def shut_down(place: Place) -> Iterator[str | None]:
    """Every call says EIO until somebody mounts it again."""
    at = place.mount("xfs", mebibytes=320)
    yield None
    place.command("xfs_io", "-x", "-c", "shutdown -f", at)
    yield "during"
    command("umount", "-l", at)
    copy = place.folder / "repaired"  # the old one is in use for as long as it is held
    command("cp", "--sparse=always", place.folder / "image", copy)
    command("mount", "-t", "xfs", "-o", "loop,nouuid", copy, at)


def _planted(name: str) -> Callable[[Place], None]:
    def plant(path: Path) -> None:
        victim = path.with_name("victim")
        path.rename(victim)
        PLANTS[name](path, victim)

    return _each_file(plant)


def _swapped(place: Place) -> None:
    """Sound files, each under the next one's name."""
    paths = entries_below(place.root)
    content = [path.read_bytes() for path in paths]
    for path, other in zip(paths, [*content[1:], *content[:1]], strict=True):
        path.write_bytes(other)


once("a bit flipped in each file", _each_file(flip))
once("zeros in each file", _each_file(blank))
once("each file cut", _each_file(truncate))
once("each file a FIFO", _planted("fifo"))
once("each file a link", _planted("symlink"))
once("each file a directory", _planted("full directory"))
once("files in each other's place", _swapped)


@situation("symlinked root")
def symlink(place: Place) -> Iterator[str | None]:
    """The path is a link, which then leads elsewhere."""
    place.root.rename(place.folder / "one")
    (place.folder / "two").mkdir(mode=0o700)
    place.root.symlink_to(place.folder / "one")
    place.limits = _BOUNDED
    yield None
    place.look()
    place.root.unlink()
    place.root.symlink_to(place.folder / "two")


def bucket(text: str) -> Callable[[Callable[[Any, Any], Iterator[str] | None]], None]:
    """Name a situation of a bucket, behind a proxy that passes everything on at first."""

    def named(harm: Callable[[Any, Any], Iterator[str] | None]) -> None:
        def happens(place: Place) -> Iterator[str | None]:
            with place.tried():
                from buckets import moto, speaking_to
                from proxy import FaultyProxy
                from vua.storage.bucket import Bucket

                proxy = FaultyProxy(moto())
            place.stack.enter_context(speaking_to(proxy.endpoint))
            url = f"s3://vua/{place.folder.name.lower()}"
            yield url
            yield from harm(Bucket.at(url), proxy) or ()

        SITUATIONS[text] = happens

    return named


def _put(bucket: Any, key: str, data: bytes = b"1") -> None:
    with contextlib.suppress(Exception):  # what the server or the client does not take
        bucket.put(key, data)


@bucket("a bucket with odd keys and a clone of it")
def odd_keys(bucket: Any, _proxy: Any) -> None:
    """Keys that are no paths, folders' marks, others' objects, a copy of all of it below itself."""
    there = [one.key for one in bucket.walk()]
    space = next(key.split("/")[0] for key in there if len(key.split("/")[0]) == 64)
    for key in (f"{space}/", f"{space}/%2F", f"{space}/ /x", f"{space}/a\x01b", "photograph.jpg"):
        _put(bucket, key)
    for key in there:
        bucket.put(f"clone/{key}", bucket.get(key)[1])
        bucket.put(f"{space}/clone/{key}", bucket.get(key)[1])


@bucket("a bucket with odd keys in each chunk's folder")
def odd_chunks(bucket: Any, _proxy: Any) -> None:
    """Long, empty, doubled, encoded and invisible names beside every entry."""
    folders = {one.key.rpartition("/")[0] for one in bucket.walk() if one.key.count("/") > 1}
    odd = ("", "x", "a\\b", "n" * 700, "%2e%2e", "\u202e", "~tmp", "..x", " ")
    for folder in sorted(folders):
        for name in (*odd, "l0-2.h0-2.safetensors "):
            _put(bucket, f"{folder}/{name}")


@bucket("a bucket emptied")
def emptied_bucket(bucket: Any, _proxy: Any) -> None:
    """By a rule of its lifecycle, or another tool."""
    bucket.delete([one.key for one in bucket.walk()])


@bucket("a bucket's server away for a while")
def server_away(_bucket: Any, proxy: Any) -> Iterator[str]:
    """It ends every connection."""
    proxy.plan = lambda *_: "reset"
    yield "during"
    proxy.plan = lambda *_: ""


@bucket("a bucket deleted, and made again")
def bucket_made_again(bucket: Any, proxy: Any) -> Iterator[str]:
    """Nothing of before is there."""
    proxy.plan = lambda *_: "no bucket"
    yield "during"
    proxy.plan = lambda *_: ""
    bucket.delete([one.key for one in bucket.walk()])


@bucket("a bucket that refuses conditions and bulk deletion")
def refusing_bucket(_bucket: Any, proxy: Any) -> None:
    kinds = itertools.cycle(("bad conditions", "no bulk"))
    proxy.plan = lambda *_: next(kinds)


@bucket("a bucket with object lock")
def locked_bucket(_bucket: Any, proxy: Any) -> None:
    proxy.plan = lambda *_: "locked"
