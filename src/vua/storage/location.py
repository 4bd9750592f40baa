"""Where a cache is: a directory, a prefix in a bucket, or several tiers, the nearest first.

Code for URLs is imported only when a URL is used.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeGuard

from vua.errors import StorageError

if TYPE_CHECKING:
    from vua.storage.bucket import Bucket


@dataclass(frozen=True, slots=True)
class Tiers:
    """A directory, and slower tiers that hold more; has the methods of a path."""

    near: Path
    far: tuple[Path | BucketPath, ...]

    @property
    def places(self) -> tuple[Path | BucketPath, ...]:
        return (self.near, *self.far)

    @property
    def name(self) -> str:
        """The last part, the same in all of them for a namespace."""
        return self.near.name

    @property
    def parent(self) -> Tiers:
        return Tiers(self.near.parent, tuple(place.parent for place in self.far))

    def __truediv__(self, name: str) -> Tiers:
        return Tiers(self.near / name, tuple(place / name for place in self.far))

    def __str__(self) -> str:
        return ", ".join(map(str, (self.near, *self.far)))


Location: TypeAlias = "Path | BucketPath | Tiers"


def nearest(place: Location) -> Path | None:
    """Return the directory of a location; None for a bucket."""
    path: Any = place  # a directory is its own nearest one
    near: Path | None = getattr(path, "near", path)
    return near


_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def scheme_of(path: str) -> str:
    """Return a URL's scheme; "" for a directory."""
    found = _URL.match(path)
    return found[0].removesuffix("://") if found else ""


def is_url(path: object) -> TypeGuard[str]:
    """Whether a cache's path is a URL of any kind, not a directory."""
    return isinstance(path, str) and _URL.match(path) is not None


def is_directory_name(root: object) -> TypeGuard[str | os.PathLike[str]]:
    """Whether a cache's path names a single directory: not a URL, not a list of tiers."""
    return isinstance(root, str | os.PathLike) and not is_url(root)


def directory_of(root: object) -> Path | None:
    """Return the single directory that a cache's path names; None for a URL or a list of tiers."""
    return Path(root) if is_directory_name(root) else None


def names_of(root: str | os.PathLike[str] | Sequence[str]) -> Sequence[str | os.PathLike[str]]:
    """Return the locations that a cache's path names, the nearest first; mostly one."""
    return [root] if isinstance(root, str | os.PathLike) else root


@dataclass(frozen=True, slots=True)
class BucketPath:
    """A prefix in a bucket, with the methods of a path; prints as a URL."""

    bucket: Bucket
    key: str = ""

    @property
    def near(self) -> None:
        """There is no directory."""

    @property
    def places(self) -> tuple[BucketPath]:
        return (self,)

    @property
    def name(self) -> str:
        return str(self).rpartition("/")[2]

    @property
    def parent(self) -> BucketPath:
        """The enclosing folder; the bucket's root has none."""
        return BucketPath(self.bucket, self.key.rpartition("/")[0])

    def __truediv__(self, name: str) -> BucketPath:
        return BucketPath(self.bucket, f"{self.key}/{name}".lstrip("/"))

    def __str__(self) -> str:
        return f"{self.bucket.url}/{self.key}".rstrip("/")

    def exists(self) -> bool:
        """Whether the object exists. Raises StorageError."""
        try:
            self.bucket.head(self.key)
        except FileNotFoundError:
            return False
        return True

    def read(self, limit_nbytes: int) -> bytes:
        """Return an object's bytes. Raises FileNotFoundError; StorageError for a larger one."""
        _, data = self.bucket.get(self.key, 0, limit_nbytes + 1)
        if len(data) > limit_nbytes:
            raise StorageError(errno.EFBIG, f"{self}: more than {limit_nbytes} bytes")
        return bytes(data)
