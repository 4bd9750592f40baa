"""What `vua explain` has found of a prompt in one namespace, and what that comes to in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vua.cli.identify import Difference
from vua.cli.prefix import ChunkState, Continuations, GroupState, loadable, usable
from vua.cli.walk import described
from vua.storage.description import Description

if TYPE_CHECKING:
    from vua.security.seal import Seal  # needs an optional package

__all__ = ["BLOCKS", "Answer", "verdict"]

BLOCKS: Final = (16, 128)
"""Tokens per block of vLLM (its `block_size`) by default: on GPUs, and on CPUs."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What was found in one namespace."""

    namespace: Description
    differences: list[Difference] | None
    """From the identity that the model leads to; None where none was asked for."""
    length: int = 0
    """Tokens of the prompt."""
    groups: tuple[GroupState, ...] = ()
    """Empty where the namespace is not described, or the prompt is not cached."""
    others: Continuations | None = None
    seal: Seal | None = None
    """Of such a prompt's files, if they are sealed."""
    locked: str = ""
    """Why such a prompt is not cached at all."""
    blocks: tuple[int, ...] = BLOCKS
    """Tokens per block of the engines in question."""

    @property
    def usable(self) -> int:
        """Leading chunks that can be used."""
        return usable(self.groups) if self.groups else 0

    @property
    def size(self) -> int:
        """Tokens per chunk."""
        return self.groups[0].layout.chunk_tokens if self.groups else 0

    @property
    def loads(self) -> dict[int, int]:
        """By tokens per block of vLLM, how many tokens of the prompt it can load."""
        return {size: loadable(self.groups, self.length, size) for size in self.blocks
                if self.groups}  # fmt: skip

    @property
    def gap(self) -> ChunkState | None:
        """The first chunk that is missing of a group which needs all of them."""
        full = [group for group in self.groups if group.layout.window is None] or self.groups
        gaps = [group.first_missing for group in full]
        return min((gap for gap in gaps if gap is not None), key=_index, default=None)


def _index(chunk: ChunkState) -> int:
    return chunk.index


def verdict(answer: Answer) -> str:
    """Return in one line what the prompt would find, and why no more."""
    if answer.locked:
        return f"not cached: {answer.locked}"
    if not answer.groups:
        state = described(answer.namespace)
        return f"a miss: namespace.json is {state}; the next engine that stores writes it anew"
    size, chunks, count = answer.size, len(answer.groups[0].chunks), answer.usable
    if not chunks:
        return f"a miss: {answer.length} tokens are less than one chunk of {size}"
    gap = answer.gap
    if gap is None and count == chunks:
        hit = f"a hit: all {chunks} whole chunks, {count * size} of {answer.length} tokens"
        return f"{hit}{_loaded(answer)}"
    hit = f"a hit of {count * size} of {answer.length} tokens" if count else "a miss"
    hit += _loaded(answer) if count else ""
    if gap is None or gap.index > count:
        return f"{hit}: no later window of the sliding layers is stored whole"
    return f"{hit}: chunk {gap.index} is {gap.state}{_reason(answer, gap)}"


def _loaded(answer: Answer) -> str:
    """How much of that vLLM loads: a hit ends with a block of it."""
    words = [f"{tokens} with blocks of {size}" for size, tokens in answer.loads.items()]
    return f", of which vLLM loads {' or '.join(words)}"


def _reason(answer: Answer, gap: ChunkState) -> str:
    groups, others = answer.groups, answer.others
    if any(group.layout.window is None and group.runs and group.runs[-1][1] > gap.index
           for group in groups):  # fmt: skip
        return ", a hole: chunks behind it are stored, of no use until it is stored again"
    if gap.state != "absent" or others is None:
        return ""
    if gap.index == 0:
        text = f"; of {others.others} other first chunks {others.with_extras} have extras"
        return f"{text} (a salt, an adapter, an image)" if others.others else "; none is stored"
    if not others.others:
        return "; nothing stored goes on from there: never stored, or evicted"
    return (
        f"; {others.others} stored go on otherwise: their tokens (or extras) differ from the "
        f"prompt's somewhere in {gap.key.start} to {gap.key.stop}"
    )
