"""`vua du`, `top`, `gc`, `ttl`, `rm`, `pin`: a cache's size and use, its limits, and deletion."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from vua.capacity.limits import Limits
from vua.capacity.removal import Collection
from vua.capacity.upkeep import Totals, saved_today
from vua.catalog import open_catalog
from vua.catalog.base import Catalog, Look, Use, resolve
from vua.catalog.collect import collect, remove
from vua.catalog.contents import SHORT, Content
from vua.cli.command import argument, asking, command, duration_s, lifetime_s, option, undoing
from vua.cli.output import (
    DAMAGED,
    SOUND,
    Output,
    Report,
    clear_screen,
    cost,
    dated,
    plain,
    print_strays,
    progress,
    requests_of,
    table,
    when,
)
from vua.errors import ConfigError, explaining
from vua.io.words import about, counted, size
from vua.storage.location import is_url

_LEFT: Final = ("within", "chunks", "nbytes", "exact", "free_nbytes")
_COUNTED: Final = ("exact", "counted_s", "pinned", "quarantine", "leftovers")
"""What `vua du --json` says of each namespace as it is in a :class:`Content`."""
_dry_run = option("--dry-run", "only show what would be deleted")
_yes = option("--yes", "do not ask (it asks on a terminal only)")


# -- du -------------------------------------------------------------------------------------------


def _show_use(directory: str, use: Use, counts: Mapping[str, int]) -> None:
    if use.namespaces:
        head = ["namespace", " chunks", " size", " pinned", " quarantine", " leftovers"]
        rows = [
            [
                *(one.description.name[:SHORT], about(one.chunks, exact=one.exact)),
                about(one.occupied_nbytes, size, exact=one.exact),
                "-" if one.pinned is None else one.pinned,
                *(size(one.quarantine), size(one.leftovers)),
                *(when(at / 1e9) for at in one.times_ns),
                *("-" for _ in range(2 - len(one.times_ns))),
            ]
            for one in use.namespaces
        ]
        table([*head, "least recently used", "last used"], rows)
    most = use.limits["max_bytes"]
    text = f"{directory}: {counted(use.chunks, 'chunk', exact=use.exact)}, "
    text += about(use.nbytes, size, exact=use.exact)
    text += "" if most is None else f" of at most {size(most)}"
    text += "" if use.free_nbytes is None else f"; {size(use.free_nbytes)} of the disk free"
    text += "" if use.exact else f"; {dated(use.namespaces)}; --exact counts all"
    print(plain(text + cost(counts)))
    print_strays(use.strays)


@command("du", as_owner_of=True)
@option("--exact", "count very many chunks now")
def du(directory: str, *, exact: bool = False) -> Report:
    """Report the space that a cache takes, by namespace.

    Of a namespace of some 20,000 chunks or more in a directory it is what was counted last, unless
    ``exact``. Raises ConfigError, StorageError.
    """
    catalog = open_catalog(directory)
    with progress() as show:
        use = catalog.use(show, exact=exact)
    counts = dict(catalog.counts)
    return Report(
        partial(_show_use, directory, use, counts),
        directory=directory,
        **{name: getattr(use, name) for name in ("nbytes", "chunks", "exact")},
        bounds=asdict(use.bounds),
        limits=dict(use.limits),
        free_nbytes=use.free_nbytes,
        strays=len(use.strays),
        **requests_of(counts),
        namespaces=[_describe(one) for one in use.namespaces],
    )


def _describe(content: Content) -> dict[str, object]:
    oldest_ns, newest_ns = content.times_ns or (None, None)
    return {
        "namespace": content.description.name,
        "chunks": content.chunks,
        "nbytes": content.occupied_nbytes,
        **{name: getattr(content, name) for name in _COUNTED},
        "oldest_ns": oldest_ns,
        "newest_ns": newest_ns,
        "oldest_s": oldest_ns and oldest_ns / 1e9,
        "newest_s": newest_ns and newest_ns / 1e9,
    }


# -- top ------------------------------------------------------------------------------------------
#
# Repeated looks at what is there, new, used and gone, by names and times alone: a chunk with a
# younger mtime than at the previous look was used (or is new), a missing one was evicted. A process
# updates a prefix's mtime at most once a minute, so `used` counts chunks in use, not requests. At a
# million chunks a look takes seconds: the interval runs from its end to the start of the next one.
# A bucket is listed: its times are those of the last write or renewal, and a request names 1,000
# objects. So it is looked at once a minute by default, and `top` shows the cost.

_INTERVAL_S: Final = 2.0
_FIRST_S: Final = 0.3
"""Between the first two looks at a directory, so that there is something to see at once."""
_WINDOWS_S: Final = (60, 3600, 86_400)


def _show_look(
    of: Mapping[str, Any], counts: Mapping[str, int], saved: Totals | None, said: str
) -> None:
    text = f"{of['directory']}: {counted(of['chunks'], 'chunk', exact=of['exact'])}, "
    text += about(of["nbytes"], size, exact=of["exact"])
    text += "" if of["max_bytes"] is None else f" of at most {size(of['max_bytes'])}"
    text += "" if of["free_nbytes"] is None else f"; {size(of['free_nbytes'])} of the disk free"
    print(f"{text}{cost(counts)}; over {of['seconds']:.3f} s")
    if said:
        print(said)
    if saved:
        print(f"today: {saved}")
    head = ["namespace", "model", " chunks", " size", " new/s", " used/s", " gone/s"]
    head += [f" used in {text}" for text in ("1 min", "1 h", "1 day")] + ["salts"]
    table(head, [_look_row(one) for one in of["namespaces"]])


def _look_row(one: Mapping[str, Any]) -> list[object]:
    salts = [f"{salt}:{count}" for salt, count in one["salts"].items() if salt != "-"]
    number = partial(about, exact=one["exact"])
    head = [one["namespace"][:SHORT], one["model"], number(one["chunks"])]
    head.append(number(one["nbytes"], size))
    rates = [one["new_per_s"], one["used_per_s"], one["gone_per_s"]]
    return [*head, *rates, *map(number, one["used_within"].values()), " ".join(salts) or "-"]


@command("top")
@option(
    "--interval TIME",
    "between looks; default 2s, the first 0.3s; of a bucket 60s",
    name="interval_s",
    type=duration_s,
)
@option("--once", "look once, over one interval")
def top(
    directory: str, interval_s: float | None = None, *, once: bool = False, output: Output
) -> int:
    """Show repeatedly what is stored, used, new and gone; ``once``: over one interval.

    Raises ConfigError, StorageError.
    """
    catalog = open_catalog(directory)
    rest_s = interval_s or catalog.look_s or _FIRST_S
    with explaining(directory):
        before, began_s = _looks(catalog, {}), time.monotonic()
        while True:
            time.sleep(rest_s)
            now, now_s = _looks(catalog, before), time.monotonic()
            report = _compared(catalog, now, now_s - began_s)
            if not output.is_json and not once:
                clear_screen()
            output.show(report)
            if once:
                return SOUND
            before, began_s, rest_s = now, now_s, interval_s or catalog.look_s or _INTERVAL_S


def _looks(catalog: Catalog, past: Mapping[str, Look]) -> dict[str, Look]:
    with progress() as show, catalog.namespaces(show) as (found, _):
        ours = [space for space in found if space.is_ours]
        return {space.name: space.look(show, past.get(space.name)) for space in ours}


def _compared(catalog: Catalog, now: dict[str, Look], took_s: float) -> Report:
    newest = (one.chunks.totals().newest_ns or 0 for one in now.values())
    now_ns = max([time.time_ns(), *newest])  # mtimes are by the server's clock, which may be ahead
    rows = [_compare(one, now_ns, took_s) for _, one in sorted(now.items())]
    saved, counts = saved_today(catalog.where), dict(catalog.counts)
    values: dict[str, Any] = {
        "directory": catalog.where,
        "nbytes": sum(one["nbytes"] for one in rows),
        "max_bytes": catalog.limits(catalog.bounds())["max_bytes"],
        "free_nbytes": catalog.free_nbytes(),
        **requests_of(counts),
        "chunks": sum(one["chunks"] for one in rows),
        "exact": all(one["exact"] for one in rows),
        "seconds": round(took_s, 3),
        "namespaces": rows,
        "saved_today": saved and saved.describe(),
    }
    said = dated([one.whole for one in now.values() if one.whole])
    return Report(partial(_show_look, values, counts, saved, said), **values)


def _compare(now: Look, now_ns: int, took_s: float) -> dict[str, Any]:
    total, per_s, exact = now.chunks.totals(), now.scale / took_s, now.whole is None
    chunks, nbytes = total.chunks, total.nbytes
    if now.whole is not None:
        chunks, nbytes = now.whole.chunks, now.whole.nbytes
    return {
        "namespace": now.name,
        "model": now.model,
        "chunks": chunks,
        "nbytes": nbytes,
        "exact": exact,
        "counted_s": now.whole and now.whole.counted_s,
        "new_per_s": round(now.new * per_s, 3),
        "new_nbytes_per_s": round(now.new * per_s * nbytes / max(1, chunks)),
        "used_per_s": round(now.used * per_s, 3),
        "gone_per_s": round(now.gone * per_s, 3),
        "used_within": {
            str(window): round(now.chunks.used_since(now_ns - window * 10**9) * now.scale)
            for window in _WINDOWS_S
        },
        "salts": dict(sorted(now.salts.items(), key=lambda one: -one[1])[:10]),
    }


# -- gc -------------------------------------------------------------------------------------------


def _show_collected(
    directory: str, done: Collection, counts: Mapping[str, int], *, dry_run: bool
) -> None:
    limits = done.limits
    rows = [
        (name.replace("_", " "), freed.chunks, size(freed.nbytes))
        for name, freed in done.deleted.items()
    ]
    table(["would be deleted" if dry_run else "deleted", " chunks", " size"], rows)
    left = "would be left" if dry_run else "left"
    text = f"{directory}: {counted(done.chunks, 'chunk')}, {size(done.nbytes)} {left}, "
    text += f"{'within' if done.within else 'BEYOND'} its bounds"
    most, least = limits["max_bytes"], limits["min_free_bytes"]
    text += "" if most is None else f" of {size(most)}"
    if least is not None and done.free_nbytes is not None:
        text += f" with {size(least)} of the disk left free ({size(done.free_nbytes)} are)"
    print(plain(f"{text}; {done.seconds:.1f} s{cost(counts)}"))
    inodes = limits["min_free_inodes"]
    if done.free_inodes is not None and inodes is not None and done.free_inodes < inodes:
        print(
            f"free inodes of the file system: {done.free_inodes}, to be left: {inodes} "
            "(min_free_inodes)"
        )
    if done.emptied:
        print(f"{counted(done.emptied, 'empty namespace')} deleted")
    for problem in done.problems:
        print(problem)
    print_strays(done.strays)


@command("gc", as_owner_of=True)
@option("--max-bytes SIZE", "of the whole cache: bytes, 500G or a share of the disk like 80%")
@option("--min-free SIZE", "free space to leave on the disk", name="min_free_bytes")
@option("--max-per-salt SIZE", "most bytes of each cache salt's chunks", name="max_bytes_per_salt")
@option("--min-free-inodes N", "free inodes to leave, or a share like 2%")
@option("--ttl TIME", "delete chunks unused for this long: 1d, 12h", name="ttl_s", type=lifetime_s)
@_dry_run
@_yes
@option("--set", "write these limits to bounds.json, for all processes", name="keep")
@option("--quick", "do not look for unfinished files, and at salts")
def gc(
    directory: str,
    *,
    keep: bool = False,
    quick: bool = False,
    dry_run: bool = False,
    yes: bool = False,
    min_free_inodes: str | None = None,
    **limits: Any,
) -> Report:
    """Bring a cache within its limits and sweep it; exit status 1 if it stays beyond them.

    The limits are :class:`Limits`'s fields. ``keep`` writes them to ``bounds.json``; ``dry_run``
    changes nothing.
    """
    inodes: int | str | None = min_free_inodes
    inodes = int(inodes) if inodes and str(inodes).isdigit() else inodes
    given = Limits(min_free_inodes=inodes, **limits)
    catalog = open_catalog(directory)
    with undoing(), progress() as show:
        done = collect(
            catalog,
            given,
            keep=keep,
            quick=quick,
            dry_run=dry_run,
            ask=asking(yes=yes),
            show=show,
        )
    gone = [freed for name, freed in done.deleted.items() if name != "leftovers"]
    return Report(
        partial(_show_collected, directory, done, dict(catalog.counts), dry_run=dry_run),
        status=SOUND if done.within and not done.problems else DAMAGED,
        directory=directory,
        dry_run=dry_run,
        **{name: getattr(done, name) for name in _LEFT},
        limits=dict(done.limits),
        deleted={
            "chunks": sum(freed.chunks for freed in gone),
            "nbytes": sum(freed.nbytes for freed in gone),
            **{name: freed._asdict() for name, freed in done.deleted.items()},
        },
        emptied_namespaces=done.emptied,
        pinned_nbytes=done.pinned_nbytes,
        seconds=round(done.seconds, 3),
        problems=done.problems,
        strays=len(done.strays),
    )


# -- ttl ------------------------------------------------------------------------------------------


@command("ttl", as_owner_of=True)
@argument("seconds", "30m, 12h, 1d, 2w", metavar="[TIME]", type=lifetime_s, required=False)
@option("--off", "keep chunks for as long as there is room")
def ttl(directory: str, seconds: float | None = None, *, off: bool = False) -> Report:
    """Show, set or (``off``) remove the time without use after which chunks are deleted."""
    catalog = open_catalog(directory)
    if off or seconds is not None:
        catalog.claim()
        catalog.keep({"ttl_s": None if off else Limits(ttl_s=seconds).ttl_s})
    now, text = catalog.bounds().ttl_s, "no time to live"
    if now is not None:
        text = f"unused chunks are deleted after {now / 86_400:.6g} days"
    if is_url(directory):
        text += ", by `vua gc` and the bucket's lifecycle rule"
    text = f"{plain(directory)}: {text}"
    return Report(text, directory=directory, ttl_s=now)


# -- pin ------------------------------------------------------------------------------------------


@command("pin", as_owner_of=True)
@argument("names", "6 or more hex digits of a chunk", metavar="[NAME]...", nargs=-1)
@option("--remove", "unpin")
def pins(directory: str, names: Sequence[str] = (), *, remove: bool = False) -> Report:
    catalog = open_catalog(directory)
    if names:
        catalog.claim()
    elif remove:
        raise ConfigError("name the chunks to unpin; `vua pin DIR` lists what is pinned")
    found: list[dict[str, object]] = []
    with progress() as show, catalog.namespaces(show) as (spaces, _):
        for name in names:
            space, chunk = resolve(spaces, name)
            if not chunk:
                text = f"{name} is a namespace; pin a chunk, which keeps its whole prefix"
                raise ConfigError(text)
            count = space.pin(chunk, on=not remove)
            found.append({"namespace": space.name, "chunk": chunk, "chunks": count})
        found += [
            {"namespace": space.name, "chunk": chunk, "chunks": count}
            for space in (spaces if not names else ())
            for chunk, count in space.names(show).pins().items()
        ]

    def show_pins() -> None:
        rows = [(str(one["namespace"])[:SHORT], one["chunk"], one["chunks"]) for one in found]
        if rows:
            table(["namespace", "chunk", f" chunks {'released' if remove else 'held'}"], rows)
        else:
            print(f"{directory}: nothing is pinned")

    values: dict[str, Any] = {"unpinned" if remove else "pinned": found}
    return Report(show_pins, directory=directory, **values)


# -- rm -------------------------------------------------------------------------------------------


@command("rm", as_owner_of=True)
@argument("names", "6 or more hex digits of a name", metavar="[NAME]...", nargs=-1)
@option("--all", "everything", name="everything")
@option("--pinned", "pinned chunks too", name="force")
@_dry_run
@_yes
def rm(
    directory: str, names: Sequence[str] = (), *, everything: bool = False, force: bool = False,
    dry_run: bool = False, yes: bool = False,
) -> Report:  # fmt: skip
    """Delete chunks with all that follow them, or namespaces; exit status 1 if pins kept some.

    ``dry_run`` only reports what would be deleted. Files that are not VUA's stay.
    """
    catalog = open_catalog(directory)
    catalog.claim()
    if everything == bool(names):
        raise ConfigError("name what to remove, or use --all")
    with progress() as show:
        done = remove(catalog, names, force=force, dry_run=dry_run, ask=asking(yes=yes), show=show)
    if done.left:
        print(f"{directory}: {done.left}", file=sys.stderr)

    def show_removed() -> None:
        word = "would be removed" if dry_run else "removed"
        print(plain(f"{directory}: {counted(done.chunks, 'chunk')} {word}, {size(done.nbytes)}"))
        if done.kept:
            stays = counted(done.kept, "pinned chunk", "stays", "stay")
            print(f"{stays}; with --pinned none does")
        print_strays(done.strays)

    fields = ("chunks", "nbytes", "objects", "kept")
    values: dict[str, Any] = {name: getattr(done, name) for name in fields}
    values |= {"strays": len(done.strays), "dry_run": dry_run}
    status = DAMAGED if done.kept or done.left else SOUND
    return Report(show_removed, status=status, directory=directory, **values)
