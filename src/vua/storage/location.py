"""Where a cache is: a directory, a place in a bucket, or several of these, the nearest first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from vua.storage.bucket_path import BucketPath


__all__ = ["Location", "Tiers", "nearest"]


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
