"""`vua ls`: the content of a cache, from names and sizes alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import click

from vua.capacity.prefix_tree import PrefixTree
from vua.catalog.base import Content, Item
from vua.catalog.opening import open_catalog
from vua.cli.command import command
from vua.cli.output import SHORT, Report, line, print_strays, progress, size, table, when
from vua.errors import ConfigError

__all__ = ["SORTS", "Listing", "ls"]

SORTS: Final = ("name", "size", "newest", "prompt")


@dataclass(frozen=True, slots=True)
class Listing(Report):
    """The namespaces of a cache."""

    directory: str
    contents: Sequence[Content]
    strays: Sequence[str]
    """Names and paths of files that are not VUA's."""
    long: bool
    places: Mapping[str, int] | None = None
    """By chunk, how many chunks are before it in its prompt; in the order of prompts."""

    def describe(self) -> object:
        namespaces = [_describe(one, long=self.long) for one in self.contents]
        return {"directory": self.directory, "namespaces": namespaces, "strays": len(self.strays)}

    def show(self) -> None:
        """Print one row per namespace, and with ``long`` one per chunk."""
        if not self.contents:
            print(f"{self.directory}: no namespaces")
        if len(self.contents) > 1:
            chunks, nbytes = (
                sum(getattr(one, name) for one in self.contents) for name in ("chunks", "nbytes")
            )
            count = f"{len(self.contents)} namespaces, {chunks:,} chunks, {size(nbytes)}"
            line("", f"{self.directory}: {count}")
        if self.contents:
            head = ["namespace", "model", "dtype", " chunk", " chunks", " files", " size", "newest"]
            table(head, [_row(one) for one in self.contents])
        for one in self.contents if self.long else ():
            _show_chunks(one, self.places)
        print_strays(self.strays)


def _describe(content: Content, *, long: bool) -> dict[str, object]:
    found = content.description
    report: dict[str, object] = {
        "namespace": found.name,
        "description": content.state,
        "identity": found.identity and found.identity.describe(),
        "layout": found.layout and found.layout.describe(),
        "further_groups": [group.describe() for group in found.layouts[1:]],
        "chunks": content.chunks,
        "files": content.files,
        "nbytes": content.nbytes,
        "newest_s": content.newest_s,
    }
    if long:
        report["entries"] = [
            {"path": one.path, "nbytes": one.nbytes, "modified_s": one.modified_s}
            for one in content.entries
        ]
    return report


def _row(content: Content) -> list[object]:
    layout = content.description.layout
    return [
        content.description.name[:SHORT],
        content.model if layout is not None else f"({content.state} description)",
        layout.dtype if layout is not None else "-",
        layout.chunk_tokens if layout is not None else "-",
        content.chunks,
        content.files,
        size(content.nbytes),
        when(content.newest_s) if content.newest_s is not None else "-",
    ]


def _show_chunks(content: Content, places: Mapping[str, int] | None) -> None:
    print()
    line("", f"{content.description.path}  {content.model}".rstrip())
    if not content.entries:
        print("no chunks")
        return
    chunks: dict[str, list[Item]] = defaultdict(list)
    for item in content.entries:
        chunks[item.chunk].append(item)
    layout = content.description.layout
    if places is not None and layout is not None:
        order = {chunk: at for at, chunk in enumerate(places)}
        rows = [
            [(places[chunk] + 1) * layout.chunk_tokens if chunk in places else "-", chunk,
             size(sum(one.nbytes for one in chunks[chunk]))]
            for chunk in sorted(chunks, key=lambda one: order.get(one, len(order)))
        ]  # fmt: skip
        table([" tokens to", "chunk", " size"], rows)
        return
    rows = [
        [
            chunk,
            " ".join(str(one.shard and one.shard.name) for one in items),
            size(sum(one.nbytes for one in items)),
            when(max(one.modified_s for one in items)),
        ]
        for chunk, items in chunks.items()
    ]
    table(["chunk", "shards", " size", "newest"], rows)


@command("ls", "list what a cache holds")
@click.option("-l", "--long", is_flag=True, help="list every chunk")
@click.option("--model", metavar="TEXT", help="only models whose name has this, or a namespace")
@click.option(
    "--sort",
    type=click.Choice(SORTS),
    default="name",
    help="the largest or newest first; chunks in the order of prompts; default by name",
)
def ls(
    directory: str, *, long: bool = False, model: str | None = None, sort: str = "name"
) -> Listing:
    """List the namespaces of a cache; ``sort`` is one of SORTS, "prompt" lists chunks.

    Raises ConfigError if a directory holds something else, or names do not say the order.
    """
    long = long or sort == "prompt"
    catalog = open_catalog(directory)
    found, others = catalog.contents()
    if others and not found and catalog.is_foreign():
        raise ConfigError(
            f"{directory}: not a cache of VUA, {len(others)} other names; name a cache"
        )
    with progress() as show:
        contents = [catalog.content(one, show, long=long) for one in found]
    if model is not None:
        contents = [one for one in contents if _is_meant(one, model)]
    places: dict[str, int] | None = None
    if sort == "prompt":
        places = {}
        with progress() as show:
            for one in contents:
                if (tree := catalog.tree(one.description, show)) is None:
                    raise ConfigError(f"{directory}: names in a bucket do not say the prompt")
                places |= _places(tree)
    strays = others + [f"{one.description.name}/{path}" for one in contents for path in one.strays]
    if sort in ("size", "newest"):
        contents.sort(key=lambda one: one.nbytes if sort == "size" else one.newest_s or 0.0)
        contents.reverse()
    return Listing(directory, contents, strays, long, places)


def _is_meant(content: Content, text: str) -> bool:
    return text.lower() in content.model.lower() or content.description.name.startswith(text)


def _places(tree: PrefixTree) -> dict[str, int]:
    """Return how many chunks are before each one, in the order of prompts; orphans are left out."""
    after: dict[int, list[int]] = defaultdict(list)
    parents = tree.parent.tolist()
    first: list[int] = []
    for at, before in enumerate(parents):
        (first if before == at else after[before]).append(at)

    def by_name(chunks: list[int]) -> list[int]:
        return sorted(chunks, key=tree.name, reverse=True)

    waiting = [(at, 0) for at in by_name(first)]
    found = {}
    while waiting:
        at, place = waiting.pop()
        found[tree.name(at)] = place
        waiting += [(one, place + 1) for one in by_name(after[at])]
    return found
