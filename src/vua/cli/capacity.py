"""`vua gc`, `vua ttl` and `vua du`: how large a directory may be, is, and becomes."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from vua.capacity.gc import Report, collect
from vua.capacity.limits import Limits, ResolvedLimits, read_bounds, write_bounds
from vua.capacity.owned import trash_in
from vua.capacity.removal import Freed
from vua.capacity.scan import (
    PIN,
    Show,
    Space,
    chunk_nbytes,
    chunks_of,
    fans_of,
    listed,
    spaces,
)
from vua.capacity.ttl import count
from vua.capacity.usage import measure
from vua.cli.arguments import duration
from vua.cli.keys import NO_KEYS, key_ids
from vua.cli.owner import confirm, to_change
from vua.cli.spread import over_fans
from vua.cli.text import DAMAGED, SHORT, SOUND, Write, progress, size, table, when
from vua.errors import ConfigError, StorageError
from vua.security.settings import Security
from vua.storage.aside import QUARANTINE
from vua.storage.problems import explained
from vua.store.namespace import check_root

__all__ = ["du", "gc", "ttl"]


def _limits(root: Path, said: Limits) -> ResolvedLimits:
    try:
        return ResolvedLimits.of(root, said)
    except OSError as problem:
        raise explained(problem, str(root)) from problem


def gc(  # noqa: PLR0913 - the options of a command
    directory: str,
    said: Limits,
    *,
    keep: bool,
    quick: bool,
    lost_keys: bool = False,
    dry_run: bool = False,
    yes: bool = False,
    security: Security = NO_KEYS,
    write: Write | None,
) -> int:
    """Bring a directory within its bounds and sweep it; exit status 1 if it stays beyond them.

    With ``keep`` what is ``said`` goes into ``bounds.json`` first; with ``lost_keys`` what is
    sealed with none of the keys that ``security`` names is deleted; with ``dry_run`` nothing is
    changed. On a terminal it asks before it shrinks a directory, unless told ``yes``. Exit status 1
    also where pins keep some of that. Raises ConfigError, before anything is changed, where these
    keys are not all to be had.
    """
    root = to_change(directory)
    known = partial(key_ids, security) if lost_keys else None
    if known is not None:
        known()
    elif security != NO_KEYS:
        msg = "keys are given, and nothing to do with them: did you mean --lost-keys?"
        raise ConfigError(msg)
    limits = _limits(root, said)
    try:
        if said.max_bytes is not None and not dry_run:
            _ask(directory, limits, yes=yes)
        if keep and not dry_run:
            _keep(root, said)
        with progress() as show:
            report = collect(
                *(root, limits), quick=quick, rehearse=dry_run, known=known, show=show,
                spread=over_fans,
            )  # fmt: skip
    except OSError as problem:
        if isinstance(problem, StorageError):
            raise
        raise explained(problem, directory) from problem
    if write is not None:
        write({"directory": directory, "dry_run": dry_run, **_described(report)})
    else:
        _print(directory, report, dry_run=dry_run)
    return SOUND if report.within and not report.problems else DAMAGED


def _ask(directory: str, limits: ResolvedLimits, *, yes: bool) -> None:
    usage = measure(directory)
    if usage.nbytes > limits.max_bytes:
        now, then = size(usage.nbytes), size(limits.max_bytes)
        confirm(f"Shrink {directory} from {now} to {then} by deleting the rest?", yes=yes)


def _described(report: Report) -> dict[str, object]:
    swept = {
        name: {"chunks": freed.chunks, "nbytes": freed.nbytes} for name, freed in _freed(report)
    }
    return {
        "within": report.within,
        "chunks": report.usage.chunks,
        "nbytes": report.usage.nbytes,
        "exact": report.usage.exact,
        "free_nbytes": report.free_nbytes,
        "limits": asdict(report.limits),
        "deleted": swept,
        "emptied_namespaces": report.emptied,
        "pinned_nbytes": report.pinned_nbytes,
        "seconds": round(report.seconds, 3),
        "problems": [*report.problems, *filter(None, [report.left])],
    }


def _freed(report: Report) -> list[tuple[str, Freed]]:
    names = ("lost_keys", "evicted", "expired", "over_quota", "orphans", "leftovers")
    return [(name, getattr(report, name)) for name in names]


def _print(directory: str, report: Report, *, dry_run: bool) -> None:
    usage, limits = report.usage, report.limits
    rows = [
        (name.replace("_", " "), freed.chunks, size(freed.nbytes)) for name, freed in _freed(report)
    ]
    table(["would be deleted" if dry_run else "deleted", " chunks", " size"], rows)
    state = "within" if report.within else "BEYOND"
    left = "would be left" if dry_run else "left"
    print(
        f"{directory}: {usage.chunks} chunks, {size(usage.nbytes)} {left}, {state} its bounds of "
        f"{size(limits.max_bytes)} with {size(limits.min_free_bytes)} of the disk left free "
        f"({size(report.free_nbytes)} are); {report.seconds:.1f} s"
    )
    if report.free_inodes is not None and report.free_inodes < limits.min_free_inodes:
        print(
            f"{report.free_inodes} inodes of the file system are free, {limits.min_free_inodes} "
            "are to be left (min_free_inodes)"
        )
    if report.emptied:
        print(f"{report.emptied} empty namespaces deleted")
    for problem in [*report.problems, *filter(None, [report.left])]:
        print(problem)


def _keep(root: Path, said: Limits) -> None:
    """Put what is said into ``bounds.json``, beside what stands there."""
    news = {name: value for name, value in asdict(said).items() if value is not None}
    try:
        write_bounds(root, replace(read_bounds(root, lambda _: None), **news))
    except OSError as problem:
        raise explained(problem, str(root)) from problem


def ttl(directory: str, seconds: float | None, *, off: bool, write: Write | None) -> int:
    """Show, set or (``off``) lift the time without use after which chunks are deleted."""
    changes = off or seconds is not None
    root = to_change(directory) if changes else check_root(directory, create=False)
    if off:
        write_bounds(root, replace(read_bounds(root, lambda _: None), ttl_s=None))
    elif seconds is not None:
        _keep(root, Limits(ttl_s=seconds))
    now = read_bounds(root).ttl_s
    with spaces(root) as found:
        own = count(found)
    if write is not None:
        write({"directory": directory, "ttl_s": now, "chunks_with_their_own": own})
    else:
        text = (
            "no time to live" if now is None else f"unused chunks are deleted after {duration(now)}"
        )
        print(f"{directory}: {text}; {own} chunks have a time to live of their own")
    return SOUND


def du(directory: str, *, quick: bool, write: Write | None) -> int:
    """Show what a directory occupies, by namespace; ``quick`` estimates it from a sample."""
    root = check_root(directory, create=False)
    try:
        if quick:
            usage, rows = measure(root), []
        else:
            with progress() as show, spaces(root) as found:
                rows = [_occupied(space, show) for space in found]
            usage = measure(root)._replace(
                nbytes=sum(int(str(row["nbytes"])) for row in rows),
                chunks=sum(int(str(row["chunks"])) for row in rows),
                exact=True,
            )
        status = os.statvfs(root)
    except OSError as problem:
        raise explained(problem, directory) from problem
    limits = _limits(root, Limits())
    free = status.f_bavail * status.f_frsize
    if write is not None:
        whole = {"nbytes": usage.nbytes, "chunks": usage.chunks, "exact": usage.exact}
        end = {"limits": asdict(limits), "free_nbytes": free}
        write({"directory": directory, **whole, **end, "namespaces": rows})
        return SOUND
    if rows:
        names = ("namespace", "chunks", "nbytes", "pinned", "quarantine", "leftovers")
        shown = [[_short(name, row[name]) for name in names] for row in rows]
        used = [
            [when(float(str(row[k])) / 1e9) if row[k] else "-" for k in ("oldest_ns", "newest_ns")]
            for row in rows
        ]
        head = [names[0], *(f" {name.replace('nbytes', 'size')}" for name in names[1:])]
        lines = [one + two for one, two in zip(shown, used, strict=True)]
        table([*head, "least recently used", "last used"], lines)
    print(
        f"{directory}: {usage.chunks} chunks, {'' if usage.exact else 'about '}"
        f"{size(usage.nbytes)} of at most {size(limits.max_bytes)}; {size(free)} of the disk free"
    )
    return SOUND


def _short(name: str, value: object) -> object:
    if name == "namespace":
        return str(value)[:SHORT]
    return value if name in ("chunks", "pinned") else size(int(str(value)))


def _occupied(space: Space, show: Show) -> dict[str, object]:
    chunks = nbytes = pinned = 0
    mtimes_ns: list[int] = []
    fans = fans_of(space)
    parts = over_fans(partial(_part, space), space, fans)
    for number, (some, size_, held, times) in enumerate(parts, 1):
        chunks, nbytes, pinned = chunks + some, nbytes + size_, pinned + held
        mtimes_ns += times
        show(space.name[:SHORT], number, len(fans), amount=chunks, unit="chunks")
    quarantine = chunk_nbytes(space, QUARANTINE)
    return {
        "namespace": space.name,
        "chunks": chunks,
        "nbytes": nbytes + quarantine,
        "pinned": pinned,
        "quarantine": quarantine,
        "leftovers": _leftover_nbytes(space),
        "oldest_ns": min(mtimes_ns, default=None),
        "newest_ns": max(mtimes_ns, default=None),
    }


def _leftover_nbytes(space: Space) -> int:
    names = [name for name, _ in trash_in(space.fd, roots=False)]
    return sum(chunk_nbytes(space, name) or _size_of(space, name) for name in names)


def _size_of(space: Space, name: str) -> int:
    with contextlib.suppress(OSError):
        status = os.stat(name, dir_fd=space.fd, follow_symlinks=False)
        return status.st_size if stat.S_ISREG(status.st_mode) else 0
    return 0


def _part(space: Space, fan: str) -> tuple[int, int, int, list[int]]:
    """One fan-out directory: chunks, bytes, pinned chunks, and the oldest and newest mtime."""
    chunks = nbytes = pinned = 0
    mtimes_ns = []
    for chunk, mtime_ns in chunks_of(space, fan):
        chunks += 1
        with listed(space.fd, f"{fan}/{chunk}") as entries:
            found = list(entries)
            with contextlib.suppress(OSError):
                nbytes += sum(one.stat(follow_symlinks=False).st_size for one in found)
        pinned += any(one.name.startswith(PIN) for one in found)
        mtimes_ns.append(mtime_ns)
    return chunks, nbytes, pinned, [min(mtimes_ns), max(mtimes_ns)] if mtimes_ns else []
