"""`vua ls`: the content of a cache, from names and sizes alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress, groupby
from typing import Final

import click

from vua.capacity.upkeep import saved_today
from vua.catalog import open_catalog
from vua.catalog.contents import SHORT, Content
from vua.cli.command import command, option
from vua.cli.output import Lazy, Report, dated, line, print_strays, progress, table, when
from vua.errors import ConfigError
from vua.io.words import about, counted, size

SORTS: Final = ("name", "size", "newest")
_HEAD: Final = (
    *("namespace", "model", "engine", "dtype", " chunk", " chunks", " files", " size", "newest"),
)


def _describe(content: Content, *, long: bool) -> dict[str, object]:
    found = content.description
    report: dict[str, object] = {
        "namespace": found.name,
        "description": content.state,
        "engine": found.engine or None,
        "identity": found.identity and found.identity.describe(),
        "layout": found.layout and found.layout.describe(),
        "further_groups": [group.describe() for group in found.layouts[1:]],
        "chunks": content.chunks,
        "files": content.files,
        "nbytes": content.nbytes,
        "exact": content.exact,
        "counted_s": content.counted_s,
        "newest_s": content.newest_s,
    }
    if long:
        report["entries"] = Lazy(
            lambda: (
                {"path": one.path, "nbytes": one.nbytes, "modified_s": one.modified_s}
                for one in content.entries
            )
        )
    return report


def _row(content: Content) -> list[object]:
    layout = content.description.layout
    return [
        content.description.name[:SHORT],
        content.description.model if layout is not None else f"({content.state} description)",
        content.description.engine or "-",
        layout.dtype if layout is not None else "-",
        layout.chunk_tokens if layout is not None else "-",
        about(content.chunks, exact=content.exact),
        "-" if content.files is None else content.files,
        about(content.nbytes, size, exact=content.exact),
        when(content.newest_s) if content.newest_s is not None else "-",
    ]


def _show_chunks(content: Content) -> None:
    print()
    line("", f"{content.description.path}  {content.description.model}".rstrip())
    if not content.entries:
        print("no chunks")
    else:
        table(["chunk", "shards", " size", "newest"], lambda: _rows(content))


def _rows(content: Content) -> Iterator[Sequence[object]]:
    for chunk, entries in groupby(content.entries, lambda one: one.chunk):
        items = list(entries)
        yield (
            chunk,
            " ".join(str(one.shard and one.shard.name) for one in items),
            size(sum(one.nbytes for one in items)),
            when(max(one.modified_s for one in items)),
        )


@command("ls")
@option("-l --long", "list every chunk")
@option("--model TEXT", "only models whose name has this, or a namespace")
@option(
    "--sort",
    "the largest or newest first; default by name",
    type=click.Choice(SORTS),
    default="name",
)
@option("--exact", "count very many chunks now")
@option("--key-file FILE", "count the savings of engines with this key")
def ls(
    directory: str,
    *,
    long: bool = False,
    model: str | None = None,
    sort: str = "name",
    exact: bool = False,
    key_file: str | None = None,
) -> Report:
    """List the namespaces of a cache; ``sort`` is one of SORTS.

    Of a namespace of some 20,000 chunks or more in a directory it tells what was counted last,
    unless ``exact``.

    Raises ConfigError if a directory holds something else, or the key cannot be used; StorageError.
    """
    catalog = open_catalog(directory)
    with progress() as show, catalog.namespaces(show) as (found, others):
        if others and not found and catalog.is_foreign():
            raise ConfigError(
                f"{directory}: not a cache of VUA, {counted(len(others), 'other name')}; "
                "name a cache"
            )
        contents = [one.content(show, long=long, exact=exact) for one in found]
    if model is not None:
        named = [one.description for one in contents]
        meant = [model.lower() in one.model.lower() or one.name.startswith(model) for one in named]
        contents = [*compress(contents, meant)]
    inside = [f"{one.description.name}/{path}" for one in contents for path in one.strays]
    strays = [*others, *inside]
    if sort != "name":
        contents.sort(key=lambda one: one.nbytes if sort == "size" else one.newest_s or 0.0)
        contents.reverse()
    saved = saved_today(directory, key_file)

    def show_all() -> None:
        exact = all(one.exact for one in contents)
        if len(contents) > 1:
            chunks = counted(sum(one.chunks for one in contents), "chunk", exact=exact)
            nbytes = about(sum(one.nbytes for one in contents), size, exact=exact)
            line("", f"{directory}: {counted(len(contents), 'namespace')}, {chunks}, {nbytes}")
        if contents:
            table(_HEAD, [_row(one) for one in contents])
        else:
            which = "" if model is None else f" of {model!r}; without --model all are listed"
            print(f"{directory}: no namespaces{which}")
        if said := dated(contents):
            print(f"{said}; --exact counts all")
        if saved:
            print(f"today: {saved}")
        for one in contents if long else ():
            _show_chunks(one)
        print_strays(strays)

    return Report(
        show_all,
        directory=directory,
        namespaces=[_describe(one, long=long) for one in contents],
        strays=len(strays),
        saved_today=saved and saved.describe(),
    )
