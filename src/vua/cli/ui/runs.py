"""A prefix tree drawn together to runs: chunks between one branch and the next are one box.

A million chunks are a few ten thousand runs, of which a page shows those that are wide enough.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from vua.capacity.prefix_tree import PrefixTree

__all__ = ["Runs", "runs_of"]

_Ints: TypeAlias = npt.NDArray[np.int64]
_Floats: TypeAlias = npt.NDArray[np.float64]
_NARROWEST: Final = 1 / 500
"""Share of the whole below which a box is not drawn by itself: less than two pixels or so."""
_MOST_BOXES: Final = 1200
_LISTED: Final = 20


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of a namespace's tree: arrays over them, every run behind the one it follows."""

    names: list[str]
    """Of each run's first chunk, 64 hex digits: it stays when the run grows, or branches."""
    parent: _Ints
    """The run before; -1 where a prompt begins."""
    chunks: _Ints
    """In the run itself."""
    place: _Ints
    """Chunks before it in the prompt."""
    total_chunks: _Ints
    """In the run and all that follows, likewise the other totals."""
    total_nbytes: _Ints
    total_uses: _Ints
    last_used_ns: _Ints
    """The latest mtime in the run and all that follows."""
    children: list[list[int]]
    beginnings: list[int]
    unreachable: int
    """Chunks whose prefix is not stored whole."""

    def boxes(self, focus: str, by: str) -> list[dict[str, object]]:
        """Return what is drawn, generation by generation, from the run ``focus`` on.

        Widths are by ``by``, ``nbytes`` or ``chunks``. ``x`` and ``width`` are shares of the whole.
        What is too narrow is drawn as one box without a name, with how many runs it stands for.
        ``focus`` itself is the first box; for "", or where it is gone, prompts' beginnings are.
        """
        weight = self.total_nbytes if by == "nbytes" else self.total_chunks
        at = self.names.index(focus) if focus in self.names else -1
        first = self.beginnings if at < 0 else [at]
        whole = max(1, int(weight[first].sum()))
        queue = deque([(-1, 0, 0.0, first)])  # (box above, generation, x, runs)
        boxes: list[dict[str, object]] = []
        while queue and len(boxes) < _MOST_BOXES:
            above, row, x, members = queue.popleft()
            narrow: list[int] = []
            for run in sorted(members, key=lambda one: (-int(weight[one]), self.names[one])):
                width = int(weight[run]) / whole
                if width < _NARROWEST:
                    narrow.append(run)
                    continue
                queue.append((len(boxes), row + 1, x, self.children[run]))
                boxes.append(
                    {**self.describe(run), "x": x, "width": width, "row": row, "above": above}
                )
                x += width
            if narrow:
                width = int(weight[narrow].sum()) / whole
                summed = {
                    "chunks": int(self.total_chunks[narrow].sum()),
                    "nbytes": int(self.total_nbytes[narrow].sum()),
                    "last_used_s": int(self.last_used_ns[narrow].max()) / 1e9,
                    "uses": int(self.total_uses[narrow].sum()),
                }
                where = {"x": x, "width": width, "row": row, "above": above}
                boxes.append({"name": "", "runs": len(narrow), **summed, **where})
        return boxes

    def describe(self, run: int) -> dict[str, object]:
        """Return plain values for the page."""
        return {
            "name": self.names[run],
            "own_chunks": int(self.chunks[run]),
            "place": int(self.place[run]),
            "chunks": int(self.total_chunks[run]),
            "nbytes": int(self.total_nbytes[run]),
            "uses": int(self.total_uses[run]),
            "last_used_s": int(self.last_used_ns[run]) / 1e9,
            "branches": len(self.children[run]),
        }

    def path(self, name: str) -> list[dict[str, object]]:
        """Return a run and those before it, first ones first; [] where it is gone."""
        run = self.names.index(name) if name in self.names else -1
        found = []
        while run >= 0:
            found.append(self.describe(run))
            run = int(self.parent[run])
        return found[::-1]

    def listed(self) -> dict[str, list[dict[str, object]]]:
        """Return the largest of the prefixes that begin prompts, and the hottest runs of all.

        Hottest: used most while the page was open, and among equals last.
        """
        firsts = np.array(self.beginnings, dtype=np.int64)
        largest = firsts[np.argsort(-self.total_nbytes[firsts], kind="stable")][:_LISTED]
        hottest = np.lexsort((-self.last_used_ns, -self.total_uses))[:_LISTED]
        return {
            "largest": [self.describe(int(run)) for run in largest],
            "hottest": [self.describe(int(run)) for run in hottest],
        }


def runs_of(tree: PrefixTree, uses: _Ints, stands_for: _Floats | None = None) -> Runs:
    """Draw a tree together; ``uses`` are how often each of its chunks was seen to be used.

    ``stands_for``: for how many chunks each one counts, where the tree is a sample.
    """
    count = len(tree.names)
    reached = tree.first < count
    at = np.flatnonzero(reached)
    own = np.arange(count)
    is_root = tree.parent == own
    follows = at[~is_root[at]]
    branches = np.bincount(tree.parent[follows], minlength=count)
    above = own.copy()  # within the run
    alone = follows[branches[tree.parent[follows]] == 1]
    above[alone] = tree.parent[alone]
    for _ in range(count.bit_length()):  # each time twice as far
        above = above[above]
    heads, run_of = np.unique(above[at], return_inverse=True)
    chunks = np.bincount(run_of, minlength=len(heads)).astype(np.int64)
    before = np.where(is_root[heads], -1, tree.parent[heads])
    parent = np.full(len(heads), -1, dtype=np.int64)
    where = np.zeros(count, dtype=np.int64)
    where[at] = run_of
    parent[before >= 0] = where[before[before >= 0]]

    def summed(values: _Ints) -> _Ints:
        found = np.zeros(len(heads), dtype=np.int64)
        np.add.at(found, run_of, values[at])
        return found

    newest = np.zeros(len(heads), dtype=np.int64)
    np.maximum.at(newest, run_of, tree.mtimes_ns[at])
    return _linked(
        [tree.name(int(one)) for one in heads],
        parent,
        chunks,
        [
            chunks if stands_for is None else summed(stands_for.astype(np.int64)),
            summed(tree.nbytes),
            summed(uses),
            newest,
        ],
        unreachable=int(count - len(at)),
    )


def _linked(
    names: list[str], parent: _Ints, length: _Ints, own: list[_Ints], *, unreachable: int
) -> Runs:
    """Add up the totals; ``own``: what each run adds of chunks, bytes, uses, and its latest mtime.

    ``length`` is a run's number of chunks: what it adds, too, but in a sample.
    """
    children: list[list[int]] = [[] for _ in names]
    beginnings: list[int] = []
    for run, before in enumerate(parent.tolist()):
        (children[before] if before >= 0 else beginnings).append(run)
    order = list(beginnings)
    for run in order:  # grows meanwhile
        order += children[run]
    lengths = length.tolist()
    place = [0] * len(names)
    chunks, nbytes, uses, newest = (one.tolist() for one in own)
    above = parent.tolist()
    for run in order:
        if above[run] >= 0:
            place[run] = place[above[run]] + lengths[above[run]]
    for run in reversed(order):
        before = above[run]
        if before >= 0:
            chunks[before] += chunks[run]
            nbytes[before] += nbytes[run]
            uses[before] += uses[run]
            newest[before] = max(newest[before], newest[run])
    at, *totals = (np.array(one, dtype=np.int64) for one in (place, chunks, nbytes, uses, newest))
    all_chunks, all_nbytes, all_uses, latest_ns = totals
    return Runs(
        names=names,
        parent=parent,
        chunks=length,
        place=at,
        total_chunks=all_chunks,
        total_nbytes=all_nbytes,
        total_uses=all_uses,
        last_used_ns=latest_ns,
        children=children,
        beginnings=beginnings,
        unreachable=unreachable,
    )
