"""`vua adopt`: makes a directory one in which VUA deletes what it has written itself."""

from __future__ import annotations

from typing import Final

from vua.capacity.owned import is_ours
from vua.capacity.scan import spaces
from vua.capacity.usage import Usage, measure
from vua.cli.owner import confirm
from vua.cli.text import SOUND, Write, plain, size
from vua.errors import StorageError
from vua.storage.claim import make_mark, strangers
from vua.storage.mark import MARK, is_marked
from vua.storage.problems import explained
from vua.store.namespace import check_root

__all__ = ["adopt"]

_SHOWN: Final = 20


def adopt(directory: str, *, yes: bool, write: Write | None) -> int:
    """Show what a directory holds, ask, and mark it. Raises ConfigError where that is not wanted.

    What is no namespace of VUA stays as it is, now and later.
    """
    root = check_root(directory, create=False)
    try:
        there = is_marked(root)
        others, _ = strangers(root)
        with spaces(root) as found:
            mine = [space.name for space in found if is_ours(space)]
        others = [name for name in others if name not in mine]
        usage = measure(root) if mine else Usage(0, 0, exact=True)
        if not there:
            if write is None:
                _print(directory, len(mine), usage, others)
            confirm(f"Let VUA delete in {directory} what it has written itself?", yes=yes)
            make_mark(root)
    except OSError as problem:
        if isinstance(problem, StorageError):
            raise
        raise explained(problem, directory) from problem
    if write is not None:
        write(
            {
                "directory": directory,
                "was_marked": there,
                "namespaces": mine,
                "chunks": usage.chunks,
                "nbytes": usage.nbytes,
                "others": others,
            }
        )
    else:
        print(f"{directory}: {'has its' if there else 'got its'} {MARK}")
    return SOUND


def _print(directory: str, namespaces: int, usage: Usage, others: list[str]) -> None:
    about = "" if usage.exact else "about "
    print(
        f"{directory}: {namespaces} namespaces of VUA, {about}{usage.chunks} chunks, "
        f"{size(usage.nbytes)}"
    )
    for name in others[:_SHOWN]:
        print(plain(f"not of VUA, stays untouched: {name}"))
    if len(others) > _SHOWN:
        print(f"and {len(others) - _SHOWN} more")
