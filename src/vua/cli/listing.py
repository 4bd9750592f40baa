"""`vua ls`: what a directory holds, from names and sizes alone."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from vua.cli.text import SHORT, SOUND, Write, plain, size, table, when
from vua.cli.walk import Found, described, open_root, walk
from vua.directory import Namespace

__all__ = ["ls"]


@dataclass(slots=True)
class _Content:
    """What a namespace holds."""

    namespace: Namespace
    chunks: dict[str, list[Found]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for found in walk(self.namespace.path):
            if found.kind == "entry" and found.regular:
                self.chunks[found.chunk].append(found)

    @property
    def files(self) -> list[Found]:
        return [file for files in self.chunks.values() for file in files]

    @property
    def model(self) -> str:
        identity = self.namespace.identity
        return "" if identity is None else identity.name or identity.model

    def describe(self, *, long: bool) -> dict[str, object]:
        identity, layout, files = self.namespace.identity, self.namespace.layout, self.files
        report: dict[str, object] = {
            "namespace": self.namespace.name,
            "description": described(self.namespace),
            "identity": identity and identity.describe(),
            "layout": layout and layout.describe(),
            "further_groups": [group.describe() for group in self.namespace.layouts[1:]],
            "chunks": len(self.chunks),
            "files": len(files),
            "nbytes": sum(file.nbytes for file in files),
            "newest_s": max((file.modified_s for file in files), default=None),
        }
        if long:
            report["entries"] = [
                {"path": file.path, "nbytes": file.nbytes, "modified_s": file.modified_s}
                for file in files
            ]
        return report

    def row(self) -> list[object]:
        layout, files = self.namespace.layout, self.files
        return [
            self.namespace.name[:SHORT],
            self.model if layout is not None else f"({described(self.namespace)} description)",
            layout.dtype if layout is not None else "-",
            layout.chunk_tokens if layout is not None else "-",
            len(self.chunks),
            len(files),
            size(sum(file.nbytes for file in files)),
            when(max(file.modified_s for file in files)) if files else "-",
        ]

    def show_chunks(self) -> None:
        print("\n" + plain(f"{self.namespace.path}  {self.model}".rstrip()))
        if not self.chunks:
            print("no chunks")
            return
        rows = [
            [
                chunk,
                " ".join(str(file.shard and file.shard.name) for file in files),
                size(sum(file.nbytes for file in files)),
                when(max(file.modified_s for file in files)),
            ]
            for chunk, files in self.chunks.items()
        ]
        table(["chunk", "shards", " size", "newest"], rows)


def ls(directory: str, *, long: bool, write: Write | None) -> int:
    """Print one row per namespace of ``directory``, and with ``long`` one per chunk."""
    found, _ = open_root(directory)
    contents = [_Content(namespace) for namespace in found]
    if write is not None:
        namespaces = [content.describe(long=long) for content in contents]
        write({"directory": directory, "namespaces": namespaces})
        return SOUND
    if not contents:
        print(f"{directory}: no namespaces")
        return SOUND
    head = ["namespace", "model", "dtype", " chunk", " chunks", " files", " size", "newest"]
    table(head, [content.row() for content in contents])
    if long:
        for content in contents:
            content.show_chunks()
    return SOUND
