"""`vua ls`: what a directory holds, from names and sizes alone."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

from vua.capacity.scan import Show, Space, fans_of
from vua.cli.bucket_chunks import print_strays
from vua.cli.spread import over_fans
from vua.cli.text import (
    SHORT,
    SOUND,
    Write,
    line,
    progress,
    size,
    table,
    when,
)
from vua.cli.walk import Found, described, open_root, walk, walk_bucket
from vua.errors import ConfigError
from vua.io.posix import close_quietly
from vua.storage.bucket_path import BucketPath
from vua.storage.description import Description
from vua.storage.mark import is_marked
from vua.storage.urls import is_url

__all__ = ["SORTS", "Content", "content_of", "ls"]

SORTS: Final = ("name", "size", "newest")


_Counted: TypeAlias = tuple[int, int, int, float | None, list[Found]]
"""Chunks, files, bytes, the newest file's time, and the files where they are to be listed."""


@dataclass(slots=True)
class Content:
    """What a namespace holds."""

    namespace: Description
    chunks: int = 0
    files: int = 0
    nbytes: int = 0
    newest_s: float | None = None
    entries: list[Found] = field(default_factory=list)
    """Each file, where they are to be listed."""
    strays: list[str] = field(default_factory=list)
    """In a bucket: paths of what is not of VUA."""

    def add(
        self, chunks: int, files: int, nbytes: int, newest_s: float | None, entries: list[Found]
    ) -> None:
        """Add a part of the namespace."""
        self.chunks += chunks
        self.files += files
        self.nbytes += nbytes
        self.newest_s = max(filter(None, (self.newest_s, newest_s)), default=None)
        self.entries += entries

    @property
    def model(self) -> str:
        """The model's name, empty where it is not known."""
        identity = self.namespace.identity
        return "" if identity is None else identity.name or identity.model

    def describe(self, *, long: bool) -> dict[str, object]:
        """Return plain values for programs."""
        identity, layout = self.namespace.identity, self.namespace.layout
        report: dict[str, object] = {
            "namespace": self.namespace.name,
            "description": described(self.namespace),
            "identity": identity and identity.describe(),
            "layout": layout and layout.describe(),
            "further_groups": [group.describe() for group in self.namespace.layouts[1:]],
            "chunks": self.chunks,
            "files": self.files,
            "nbytes": self.nbytes,
            "newest_s": self.newest_s,
        }
        if long:
            report["entries"] = [
                {"path": file.path, "nbytes": file.nbytes, "modified_s": file.modified_s}
                for file in self.entries
            ]
        return report

    def row(self) -> list[object]:
        """Return a row of the table."""
        layout = self.namespace.layout
        return [
            self.namespace.name[:SHORT],
            self.model if layout is not None else f"({described(self.namespace)} description)",
            layout.dtype if layout is not None else "-",
            layout.chunk_tokens if layout is not None else "-",
            self.chunks,
            self.files,
            size(self.nbytes),
            when(self.newest_s) if self.newest_s is not None else "-",
        ]

    def show_chunks(self) -> None:
        """Print a row for each chunk."""
        print()
        line("", f"{self.namespace.path}  {self.model}".rstrip())
        if not self.entries:
            print("no chunks")
            return
        chunks: dict[str, list[Found]] = defaultdict(list)
        for file in self.entries:
            chunks[file.chunk].append(file)
        rows = [
            [
                chunk,
                " ".join(str(file.shard and file.shard.name) for file in files),
                size(sum(file.nbytes for file in files)),
                when(max(file.modified_s for file in files)),
            ]
            for chunk, files in chunks.items()
        ]
        table(["chunk", "shards", " size", "newest"], rows)


def content_of(namespace: Description, show: Show, *, long: bool = False) -> Content:
    """Count what lies in a namespace, in a directory or a bucket. Raises OSError, StorageError."""
    content = Content(namespace)
    if isinstance(namespace.path, BucketPath):
        every = list(walk_bucket(namespace))
        content.strays = [one.path for one in every if one.kind == "stray"]
        content.add(*_counted([one for one in every if one.kind == "entry"], long=long))
        return content
    fd = os.open(namespace.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        space = Space(namespace.name, fd)
        names = fans_of(space)
        parts = over_fans(partial(_part, space, long=long), space, names)
        for number, part in enumerate(parts, 1):
            content.add(*part)
            show(space.name[:SHORT], number, len(names), amount=content.chunks, unit="chunks")
    finally:
        close_quietly(fd)
    return content


def _part(space: Space, fan: str, *, long: bool) -> _Counted:
    """Count one fan-out directory."""
    files = [one for one in walk(space, fan) if one.kind == "entry" and one.regular]
    return _counted(files, long=long)


def _counted(files: list[Found], *, long: bool) -> _Counted:
    newest_s = max((file.modified_s for file in files), default=None)
    nbytes = sum(file.nbytes for file in files)
    chunks = len({file.chunk for file in files})
    return chunks, len(files), nbytes, newest_s, files if long else []


def ls(directory: str, *, long: bool, sort: str = "name", write: Write | None) -> int:
    """Print one row per namespace of ``directory``, and with ``long`` one per chunk.

    ``sort`` is one of SORTS. Raises ConfigError for a directory of something else.
    """
    found, others = open_root(directory)
    if others and not found and not is_url(directory) and not is_marked(directory):
        msg = f"{directory}: no cache of VUA, {len(others)} other names; name a cache"
        raise ConfigError(msg)
    with progress() as show:
        contents = [content_of(namespace, show, long=long) for namespace in found]
    strays = others + [
        f"{content.namespace.name}/{path}" for content in contents for path in content.strays
    ]
    if sort != "name":
        contents.sort(key=lambda one: one.nbytes if sort == "size" else one.newest_s or 0.0)
        contents.reverse()
    if write is not None:
        namespaces = [content.describe(long=long) for content in contents]
        counted = {"strays": len(strays)} if is_url(directory) else {}
        write({"directory": directory, "namespaces": namespaces, **counted})
        return SOUND
    if not contents:
        print(f"{directory}: no namespaces")
        print_strays(strays if is_url(directory) else [])
        return SOUND
    if len(contents) > 1:
        chunks, nbytes = (
            sum(getattr(one, name) for one in contents) for name in ("chunks", "nbytes")
        )
        line("", f"{directory}: {len(contents)} namespaces, {chunks:,} chunks, {size(nbytes)}")
    head = ["namespace", "model", "dtype", " chunk", " chunks", " files", " size", "newest"]
    table(head, [content.row() for content in contents])
    if long:
        for content in contents:
            content.show_chunks()
    print_strays(strays if is_url(directory) else [])
    return SOUND
