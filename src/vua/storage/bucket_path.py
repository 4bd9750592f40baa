"""Places in a bucket, as a cache's path may name them."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vua.errors import StorageError

if TYPE_CHECKING:
    from vua.storage.bucket import Bucket

__all__ = ["BucketPath"]


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
