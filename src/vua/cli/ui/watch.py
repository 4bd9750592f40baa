"""Looks at a cache directory again and again: what is there, and what is new, used and gone.

What the page shows of the directory comes from here, in a process of its own; nothing is written.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from vua.capacity.limits import Limits, ResolvedLimits
from vua.capacity.prefix_tree import PrefixTree, read_prefix_tree
from vua.capacity.sample import sample_prefix_tree
from vua.capacity.scan import Space, spaces
from vua.capacity.usage import measure
from vua.cli.listing import content_of
from vua.cli.spread import is_large, over_fans
from vua.cli.text import plain
from vua.cli.ui.child import Talk
from vua.cli.ui.runs import Runs, runs_of
from vua.cli.walk import described, open_root
from vua.errors import VUAError
from vua.storage.description import Description
from vua.storage.urls import is_url

__all__ = ["View", "watch"]

_LEAST_S: Final = 2.0
"""Between two looks; a bucket, whose listings cost money, is looked at once a minute."""
_LEAST_BUCKET_S: Final = 60.0
_REST: Final = 5
"""A look that took a second is followed by so many seconds of rest."""
_AGES_S: Final = (60, 3600, 86_400, 7 * 86_400)


@dataclass(frozen=True, slots=True)
class View:
    """A namespace at one moment."""

    summary: dict[str, object]
    """Plain values for the page."""
    tree: PrefixTree | None = None
    """None until it is read whole."""
    runs: Runs | None = None
    """None in a bucket: its names do not say which chunk follows which."""


@dataclass(slots=True)
class _Seen:
    """What is known of a namespace from the last look."""

    tree: PrefixTree
    uses: npt.NDArray[np.int64]
    """How often each chunk was seen to be used, since the first look."""
    counts: dict[str, int] = field(default_factory=dict)
    """New, used and gone since the look before."""
    ages: list[int] = field(default_factory=list)
    """Chunks by the time since their last use, see `_AGES_S`."""


def watch(directory: str, talk: Talk) -> None:
    """Look until nobody listens. Tells "usage", "views", "look", "progress" and "problem"."""
    seen: dict[str, _Seen] = {}
    first, least_s = True, _LEAST_BUCKET_S if is_url(directory) else _LEAST_S
    while True:
        began_s = time.monotonic()
        try:
            _look(directory, seen, talk, first=first)
            first = False
        except (VUAError, OSError) as problem:
            talk.tell("problem", plain(str(problem)))
        took_s = time.monotonic() - began_s
        talk.wait(max(least_s, _REST * took_s))


def _look(directory: str, seen: dict[str, _Seen], talk: Talk, *, first: bool) -> None:
    """Look at everything once."""
    found, _ = open_root(directory)
    if is_url(directory):
        views = {one.name: _in_bucket(one, talk) for one in found}
        talk.tell("views", (views, list(views)))
        talk.tell("look", None)
        return
    known = {one.name: one for one in found}
    if first:
        _sample(directory, known, talk)
    talk.tell("usage", _usage(Path(directory)))
    total = dict.fromkeys(("new", "used", "gone"), 0)
    for name in seen.keys() - known.keys():
        total["gone"] += len(seen.pop(name).tree.names)
    with spaces(directory) as there:
        for space in there:
            description, before = known.get(space.name), seen.get(space.name)
            if description is None:
                continue  # made this moment: the next look sees it
            now = _seen(space, before, talk, is_first=first)
            seen[space.name] = now
            for what, count in now.counts.items():
                total[what] += count
            now.ages = _ages(now.tree)
            if before is None or any(now.counts.values()) or now.ages != before.ages:
                view = _view(description, now)
                talk.tell("views", ({space.name: view}, list(known)))
    talk.tell("views", ({}, list(known)))
    talk.tell("look", None if first else total)


def _usage(root: Path) -> dict[str, object]:
    """What `vua du --quick` tells."""
    usage, status = measure(root), os.statvfs(root)
    limits = asdict(ResolvedLimits.of(root, Limits()))
    free_nbytes = status.f_bavail * status.f_frsize
    return {**usage._asdict(), "limits": limits, "free_nbytes": free_nbytes}


def _seen(space: Space, before: _Seen | None, talk: Talk, *, is_first: bool) -> _Seen:
    """Read a namespace, after the first time only what has changed."""
    if before is None:
        tree = read_prefix_tree(space, talk.show, over_fans)
        uses = np.zeros(len(tree.names), dtype=np.int64)
        return _Seen(tree, uses, {} if is_first else {"new": len(tree.names)})
    old = before.tree
    tree = read_prefix_tree(space, known=old)
    place = old.places(tree.names)
    is_new = place == len(old.names)
    is_used = ~is_new & (tree.mtimes_ns > np.append(old.mtimes_ns, 0)[place])
    uses = np.append(before.uses, 0)[place] + is_used
    stayed = int((~is_new).sum())
    counts = {"new": int(is_new.sum()), "used": int(is_used.sum())}
    return _Seen(tree, uses, {**counts, "gone": len(old.names) - stayed})


def _sample(directory: str, known: dict[str, Description], talk: Talk) -> None:
    """Tell what random chunks say of large namespaces, before all are read."""
    with spaces(directory) as there:
        for space in there:
            if space.name in known and is_large(space):
                tree, stands_for = sample_prefix_tree(space)
                runs = runs_of(tree, np.zeros(len(tree.names), dtype=np.int64), stands_for)
                summary = {
                    **_described(known[space.name]),
                    "chunks": round(stands_for.sum()),
                    "nbytes": int(tree.nbytes.sum()),
                    "newest_s": int(tree.mtimes_ns.max(initial=0)) / 1e9,
                }
                talk.tell("views", ({space.name: View(summary, runs=runs)}, list(known)))


def _view(description: Description, now: _Seen) -> View:
    runs = runs_of(now.tree, now.uses)
    summary = {
        **_described(description),
        "chunks": len(now.tree.names),
        "nbytes": int(now.tree.nbytes.sum()),
        "pinned": int(now.tree.pinned.sum()),
        "unreachable": runs.unreachable,
        "prompts": len(runs.beginnings),
        "newest_s": int(now.tree.mtimes_ns.max(initial=0)) / 1e9,
        "ages": now.ages,
    }
    return View(summary, now.tree, runs)


def _ages(tree: PrefixTree) -> list[int]:
    """Count chunks by the time since their last use: `_AGES_S`, and longer."""
    # The server's clock, by which mtimes are, may be ahead of this host's.
    now_ns = max(time.time_ns(), int(tree.mtimes_ns.max(initial=0)))
    ages_s = np.sort((now_ns - tree.mtimes_ns) / 1e9)
    bounds = [*np.searchsorted(ages_s, _AGES_S, side="right").tolist(), len(ages_s)]
    return [int(count) for count in np.diff([0, *bounds])]


def _in_bucket(description: Description, talk: Talk) -> View:
    """What a listing tells."""
    content = content_of(description, talk.show)
    counted = {"chunks": content.chunks, "nbytes": content.nbytes, "newest_s": content.newest_s}
    return View({**_described(description), **counted})


def _described(description: Description) -> dict[str, object]:
    identity, layout = description.identity, description.layout
    return {
        "namespace": description.name,
        "model": "" if identity is None else plain(identity.name or identity.model),
        "description": described(description),
        "dtype": None if layout is None else plain(layout.dtype),
        "chunk_tokens": None if layout is None else layout.chunk_tokens,
    }
