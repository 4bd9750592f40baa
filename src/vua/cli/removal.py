"""`vua rm` and `vua pin`: what goes at once, and what stays whatever happens."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sys
from pathlib import Path

from vua.capacity.evictor import PINNED_SHARE
from vua.capacity.limits import Limits, ResolvedLimits
from vua.capacity.owned import is_all_ours, is_ours
from vua.capacity.prefix_tree import ancestors, pin, read_node, read_prefix_tree, unpin
from vua.capacity.removal import NOTHING, Freed, Remover, delete_namespace
from vua.capacity.scan import (
    TRASH,
    Show,
    Space,
    chunk_nbytes,
    chunks_of,
    fans_of,
    spaces,
)
from vua.capacity.usage import measure
from vua.cli.names import Target, resolve
from vua.cli.owner import confirm, to_change
from vua.cli.spread import over_fans
from vua.cli.text import (
    DAMAGED,
    SHORT,
    SOUND,
    Write,
    progress,
    size,
    table,
)
from vua.errors import ConfigError, StorageError
from vua.io.posix import close_quietly
from vua.storage.local import chunk_path
from vua.storage.problems import explained
from vua.store.namespace import check_root

__all__ = ["pins", "print_pins", "rm"]


def rm(
    directory: str,
    targets: list[str],
    *,
    everything: bool,
    force: bool,
    dry_run: bool = False,
    yes: bool = False,
    write: Write | None,
) -> int:
    """Delete chunks with all that follows them, or namespaces; exit status 1 if pins kept some.

    With ``dry_run`` it only says what would go. On a terminal it asks before namespaces go, unless
    told ``yes``.
    """
    root = to_change(directory)
    if everything == bool(targets):
        msg = "name what to remove, or say --all"
        raise ConfigError(msg)
    freed, kept, remover = NOTHING, 0, Remover(rehearse=dry_run)
    try:
        with progress() as show, spaces(root) as found:
            picked = [resolve(found, text) for text in targets]
            picked += [Target(one) for one in found if everything and is_ours(one)]
            if not dry_run:
                _ask(directory, picked, everything=everything, yes=yes)
            for target in picked:
                gone, held = _remove(root, target, show, remover, force=force)
                freed, kept = freed + gone, kept + held
    except OSError as problem:
        if isinstance(problem, StorageError):
            raise
        raise explained(problem, directory) from problem
    if write is not None:
        done = {"chunks": freed.chunks, "nbytes": freed.nbytes, "kept": kept, "dry_run": dry_run}
        write({"directory": directory, **done})
    else:
        done_ = "would be removed" if dry_run else "removed"
        print(f"{directory}: {freed.chunks} chunks {done_}, {size(freed.nbytes)}")
        if kept:
            print(f"{kept} pinned chunks stay; --pinned removes these too")
    if remover.left:
        print(f"{directory}: {remover.left}", file=sys.stderr)
    return DAMAGED if kept or remover.left else SOUND


def _ask(directory: str, picked: list[Target], *, everything: bool, yes: bool) -> None:
    namespaces = {target.space.name for target in picked if not target.chunk}
    if not namespaces:
        return
    part = "everything" if everything else f"{len(namespaces)} namespaces"
    usage = measure(directory, only=namespaces)
    about = f"{usage.chunks} chunks, {size(usage.nbytes)}"
    confirm(f"Delete {part} in {directory} ({about})?", yes=yes)


def _remove(
    root: Path, target: Target, show: Show, remover: Remover, *, force: bool
) -> tuple[Freed, int]:
    space, freed = target.space, NOTHING
    if not target.chunk and not is_ours(space):
        msg = f"{space.name} is no namespace of VUA, it stays untouched"
        raise ConfigError(msg)
    tree = read_prefix_tree(space, show, over_fans)
    whole = not target.chunk and (force or not tree.pinned.any())
    if whole and not remover.rehearse and is_all_ours(space):
        trash = f"{TRASH}{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):  # a full file system may refuse it: one by one, then
            (root / space.name).rename(root / trash)
            freed = Freed(len(tree.names), _delete(root, trash))
            if (root / trash).exists():
                why = OSError(errno.EPERM, "some of its files cannot be deleted", trash)
                remover.immovable[space.name, ""] = why
            return freed, 0
    every = range(len(tree.names))
    doomed = (
        tree.descendants(target.chunk) if target.chunk else [tree.name(index) for index in every]
    )
    kept = 0
    for number, name in enumerate(reversed(doomed), 1):  # leaves first
        show(f"{space.name[:SHORT]}: deleting", number, len(doomed), amount=freed.nbytes)
        nbytes = remover.evict_chunk(space, name, pinned=force)
        if nbytes is not None:
            freed += Freed(1, nbytes)
        elif read_node(space, name).pinned:
            kept += 1
    if whole and not remover.rehearse:
        _delete(root, space.name)
    return freed, kept


def _delete(root: Path, name: str) -> int:
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return delete_namespace(fd, name)
    finally:
        close_quietly(fd)


def pins(directory: str, targets: list[str], *, remove: bool, write: Write | None) -> int:
    """Pin chunks with their prefixes, unpin them, or (no targets) list what is pinned."""
    root = to_change(directory) if targets else check_root(directory, create=False)
    if remove and not targets:
        msg = "name the chunks to unpin; `vua pin DIR` lists what is pinned"
        raise ConfigError(msg)
    report: list[dict[str, object]] = []
    try:
        with spaces(root) as found:
            for text in targets:
                space, chunk = resolve(found, text)
                if not chunk:
                    msg = f"{text} is a namespace; pin a chunk, which keeps its whole prefix"
                    raise ConfigError(msg)
                held = unpin(space, chunk) if remove else pin(space, chunk)
                report.append({"namespace": space.name, "chunk": chunk, "chunks": len(held)})
            if not targets:
                report = [one for space in found for one in _pinned(space)]
            nbytes = 0 if remove else _weigh(found, report, listing=not targets)
            limits = ResolvedLimits.of(root, Limits(), refused=lambda _: None)
    except OSError as problem:
        if isinstance(problem, StorageError):
            raise
        raise explained(problem, directory) from problem
    if write is not None:
        write({"directory": directory, "unpinned" if remove else "pinned": report})
    else:
        print_pins(directory, report, "released" if remove else "held")
        _judge(nbytes, int(limits.max_bytes * PINNED_SHARE))
    return SOUND


def print_pins(directory: str, report: list[dict[str, object]], word: str) -> None:
    """Print what is held or released, by pin."""
    rows = [(str(one["namespace"])[:SHORT], one["chunk"], one["chunks"]) for one in report]
    if rows:
        table(["namespace", "chunk", f" chunks {word}"], rows)
    else:
        print(f"{directory}: nothing is pinned")


def _judge(nbytes: int, most: int) -> None:
    if nbytes > most:
        print(
            f"these pins hold {size(nbytes)}, and no more than {size(most)} ({PINNED_SHARE:.0%} of "
            "the limit) stays when room is needed: what was not used for longest goes all the same"
        )


def _pinned(space: Space) -> list[dict[str, object]]:
    """The pins of a namespace, with the number of chunks that each one holds."""
    held: dict[str, int] = {}
    for fan in fans_of(space):
        for chunk, _ in chunks_of(space, fan):
            for one in read_node(space, chunk).pinned:
                held[one] = held.get(one, 0) + 1
    return [
        {"namespace": space.name, "chunk": chunk, "chunks": count}
        for chunk, count in sorted(held.items())
    ]


def _weigh(found: list[Space], report: list[dict[str, object]], *, listing: bool) -> int:
    """The bytes that are pinned: all that there are, or those of the prefixes just pinned."""
    by_name = {space.name: space for space in found}
    if listing:
        return sum(
            link.nbytes
            for space in found
            for fan in fans_of(space)
            for chunk, _ in chunks_of(space, fan)
            if (link := read_node(space, chunk)).pinned
        )
    held = {
        (space.name, name)
        for one in report
        for space in [by_name[str(one["namespace"])]]
        for name in ancestors(space, str(one["chunk"]))
    }
    return sum(chunk_nbytes(by_name[name], chunk_path(chunk)) for name, chunk in held)
