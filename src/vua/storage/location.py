"""Where a cache is: a directory, a place in a bucket, or several of these, the nearest first.

Whether a cache's path is a URL. Whatever is behind one is imported only then.

Places in a bucket, as a cache's path may name them.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, TypeGuard

from vua.errors import StorageError

if TYPE_CHECKING:
    from vua.storage.bucket import Bucket

__all__ = ["BucketPath", "Location", "Tiers", "is_directory_name", "is_url", "names_of", "nearest"]


@dataclass(frozen=True, slots=True)
class Tiers:
    """A directory, and places behind it that hold more; with what paths of directories have."""

    near: Path
    far: tuple[Path | BucketPath, ...]
    """The nearest first."""

    @property
    def places(self) -> tuple[Path | BucketPath, ...]:
        """All of them, the nearest first."""
        return (self.near, *self.far)

    @property
    def name(self) -> str:
        """The last part, the same in all of them for a namespace."""
        return self.near.name

    @property
    def parent(self) -> Tiers:
        """The folder of each."""
        return Tiers(self.near.parent, tuple(place.parent for place in self.far))

    def __truediv__(self, name: str) -> Tiers:
        """Return the places ``name`` below each."""
        return Tiers(self.near / name, tuple(place / name for place in self.far))

    def __str__(self) -> str:
        """Return all of them."""
        return ", ".join(map(str, (self.near, *self.far)))


Location: TypeAlias = "Path | BucketPath | Tiers"


def nearest(place: Location) -> Path | None:
    """Return the directory that a place is, or has before others; None for a bucket."""
    near = getattr(place, "near", place)
    return near if isinstance(near, Path) else None


_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def is_url(path: object) -> TypeGuard[str]:
    """Whether a cache's path is a URL, of whatever kind, and no directory."""
    return isinstance(path, str) and _URL.match(path) is not None


def is_directory_name(root: object) -> TypeGuard[str | os.PathLike[str]]:
    """Whether a cache's path names a directory alone: no URL, and no list of places."""
    return isinstance(root, str | os.PathLike) and not is_url(root)


def names_of(root: str | os.PathLike[str] | Sequence[str]) -> Sequence[str | os.PathLike[str]]:
    """Return the places that a cache's path names, the nearest first; most name one."""
    return [root] if isinstance(root, str | os.PathLike) else root


@dataclass(frozen=True, slots=True)
class BucketPath:
    """A place in a bucket, with what paths of directories have; prints as a URL."""

    bucket: Bucket
    key: str = ""

    @property
    def places(self) -> tuple[BucketPath]:
        """This one, as of several."""
        return (self,)

    @property
    def name(self) -> str:
        """The last part."""
        return str(self).rpartition("/")[2]

    @property
    def parent(self) -> BucketPath:
        """The folder that it lies in; the bucket's own place has none."""
        return BucketPath(self.bucket, self.key.rpartition("/")[0])

    def __truediv__(self, name: str) -> BucketPath:
        """Return the place ``name`` below this one."""
        return BucketPath(self.bucket, f"{self.key}/{name}".lstrip("/"))

    def __str__(self) -> str:
        """Return the URL."""
        return f"{self.bucket.url}/{self.key}".rstrip("/")

    def exists(self) -> bool:
        """Whether there is such an object. Raises StorageError."""
        try:
            self.bucket.head(self.key)
        except FileNotFoundError:
            return False
        return True

    def read(self, limit_nbytes: int) -> bytes:
        """Return an object's bytes. Raises FileNotFoundError, StorageError for a larger one."""
        _, data = self.bucket.get(self.key, 0, limit_nbytes + 1)
        if len(data) > limit_nbytes:
            raise StorageError(errno.EFBIG, f"{self}: more than {limit_nbytes} bytes")
        return bytes(data)
