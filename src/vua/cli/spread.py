"""Work on the 256 parts of a large namespace in several processes at once.

Looking at a million chunks is a million small reads: on a disk they take turns unless several are
asked for at once, in memory they are bound by one interpreter. Small namespaces are not worth it.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from vua.capacity.scan import Space, listed

__all__ = ["is_large", "over_fans", "spread"]

T = TypeVar("T")
R = TypeVar("R")

_PROCESSES: Final = 8
"""More than most machines have free cores: on a cold disk each waits for its own reads."""
_LARGE: Final = 20_000


def is_large(space: Space) -> bool:
    """Whether a namespace has some ten thousands of chunks or more, judged by two of its parts."""
    names = 0
    for fan in ("00", "80"):
        with listed(space.fd, fan) as entries:
            names += sum(1 for _ in entries)
    return 128 * names >= _LARGE


def spread(work: Callable[[T], R], items: Sequence[T], *, large: bool) -> Iterator[R]:
    """Yield ``work`` of each item in order; with ``large`` several at a time in processes.

    Then both, and ``work`` too, are to be picklable; descriptors that are open stay valid. What
    ``work`` raises is raised here.
    """
    if not large:
        yield from map(work, items)
        return
    with multiprocessing.get_context("fork").Pool(
        _PROCESSES, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)
    ) as pool:
        yield from pool.imap(work, items)


def over_fans(work: Callable[[str], R], space: Space, fans: list[str]) -> Iterator[R]:
    """Yield ``work`` of each of a namespace's fan-out directories, as `read_prefix_tree` asks."""
    return spread(work, fans, large=is_large(space))
