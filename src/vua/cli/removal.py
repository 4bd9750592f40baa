"""`vua rm` and `vua pin`: what goes at once, and what stays whatever happens."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

from vua.cli.names import Target, resolve
from vua.cli.spread import over_fans
from vua.cli.text import DAMAGED, SHORT, SOUND, Write, plain, progress, size
from vua.directory import check_root
from vua.errors import ConfigError, StorageError
from vua.eviction import NOTHING, Freed, bury, delete_tree
from vua.lineage import chain_of, link_of, pin, unpin
from vua.storage.problems import explained
from vua.survey import TRASH, Space, chunks_of, fans_of, spaces

__all__ = ["pins", "rm"]


def rm(
    directory: str, targets: list[str], *, everything: bool, force: bool, write: Write | None
) -> int:
    """Delete chunks with all that follows them, or namespaces; exit status 1 if pins kept some."""
    root = check_root(directory, create=False)
    if everything == bool(targets):
        msg = "name what to remove, or say --all"
        raise ConfigError(msg)
    freed, kept = NOTHING, 0
    try:
        with progress() as show, spaces(root) as found:
            picked = [resolve(found, text) for text in targets] or [Target(one) for one in found]
            for target in picked:
                show(f"{target.space.name[:SHORT]}/{target.chunk[:SHORT]}")
                gone, held = _remove(root, target, show, force=force)
                freed, kept = freed + gone, kept + held
    except OSError as problem:
        if isinstance(problem, StorageError):
            raise
        raise explained(problem, directory) from problem
    if write is not None:
        done = {"chunks": freed.chunks, "nbytes": freed.nbytes, "kept": kept}
        write({"directory": directory, **done})
    else:
        print(f"{directory}: {freed.chunks} chunks removed, {size(freed.nbytes)}")
        if kept:
            print(f"{kept} pinned chunks stay; --pinned removes these too")
    return DAMAGED if kept else SOUND


def _remove(
    root: Path, target: Target, show: Callable[[str], None], *, force: bool
) -> tuple[Freed, int]:
    space, freed = target.space, NOTHING
    chain = chain_of(space, show, over_fans)
    if target.chunk:
        doomed = chain.descendants(target.chunk)
    else:
        doomed = [chain.name(index) for index in range(len(chain.names))]
        if force or not chain.pinned.any():
            trash = root / f"{TRASH}{secrets.token_hex(8)}"
            (root / space.name).rename(trash)
            fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return Freed(len(doomed), delete_tree(fd, trash.name)), 0
            finally:
                os.close(fd)
    kept = 0
    for name in reversed(doomed):  # leaves first
        nbytes = bury(space, name, pinned=force)
        if nbytes is not None:
            freed += Freed(1, nbytes)
        elif link_of(space, name).pinned:
            kept += 1
    return freed, kept


def pins(directory: str, targets: list[str], *, remove: bool, write: Write | None) -> int:
    """Pin chunks with their prefixes, unpin them, or (no targets) list what is pinned."""
    root = check_root(directory, create=False)
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
    except OSError as problem:
        if isinstance(problem, StorageError):
            raise
        raise explained(problem, directory) from problem
    if write is not None:
        write({"directory": directory, "unpinned" if remove else "pinned": report})
        return SOUND
    word = "released" if remove else "held"
    for one in report:
        line = f"{str(one['namespace'])[:SHORT]}  {one['chunk']}  {one['chunks']} chunks {word}"
        print(plain(line))
    if not report:
        print(f"{directory}: nothing is pinned")
    return SOUND


def _pinned(space: Space) -> list[dict[str, object]]:
    """The pins of a namespace, with the number of chunks that each one holds."""
    held: dict[str, int] = {}
    for fan in fans_of(space):
        for chunk, _ in chunks_of(space, fan):
            for one in link_of(space, chunk).pinned:
                held[one] = held.get(one, 0) + 1
    return [
        {"namespace": space.name, "chunk": chunk, "chunks": count}
        for chunk, count in sorted(held.items())
    ]
