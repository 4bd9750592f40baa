"""For each group of layers: which tokens to load, and which complete chunks to store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vua.connector.cache_spec import Group, Model
from vua.connector.metadata import GroupLoad
from vua.connector.prefix_match import PrefixMatch
from vua.format.keys import ChunkKey

__all__ = ["Step", "state_to_save", "to_load", "to_save"]


def to_load(
    model: Model, number: int, found: PrefixMatch | None, start: int, stop: int
) -> GroupLoad:
    """Return what to load of group ``number`` of a request's tokens [start, stop).

    Nothing of what the engine has already, and of a window no more than it. ``found`` is what the
    lookup learned about the prompt.
    """
    if found is None:  # cannot be; a load without keys fails, and no engine waits for ever
        return GroupLoad(number, start, stop, [])
    group, size = model.groups[number], model.chunk_tokens
    first = model.first_loaded(group, stop)
    if not group.keeps_state:  # of a state there is no half
        first = max(first, start)
    return GroupLoad(number, first, stop, found.keys.run(first // size, -(-stop // size)))


class Step(NamedTuple):
    """What one step does for a request."""

    chunks: range
    """The prompt's chunks that are complete after it, and were not ordered to be saved before."""
    computed: int
    """Tokens computed before it."""
    complete: int
    """Tokens computed after it."""
    tables: Sequence[Sequence[int]]
    """The request's block table in this step, per cache group; 0 where a block is freed."""
    reused: range = range(0)
    """In a request's first step: chunks before it that the engine's own prefix cache had, whose
    windows and states may not be stored."""


def to_save(
    model: Model, number: int, found: PrefixMatch, step: Step, every_tokens: int
) -> Sequence[ChunkKey]:
    """Return those of the step's chunks that are of use to a group, and still in its blocks.

    Args:
        model: the engine's KV cache.
        number: the group's place in it.
        found: what the lookup learned about the prompt.
        step: what happens now.
        every_tokens: distance of the points at which windows and states are stored in any case.
    """
    group = model.groups[number]
    if group.layout.window is None:
        return found.keys.run(step.chunks.start, step.chunks.stop)
    if group.keeps_state:
        return state_to_save(model, group, number, found, step, every_tokens)
    size, wanted = model.chunk_tokens, found.windows[number]
    keys = []
    for chunk in (*(chunk for chunk in step.reused if chunk in wanted), *step.chunks):
        held = all(
            all(step.tables[table][chunk * size // block : -(-(chunk + 1) * size // block)])
            for table in group.tables
            for block in (model.block_sizes[table],)
        )
        useful = chunk in wanted or chunk >= found.prompt_chunks  # of unknown end
        if held and (useful or group in model.leading):
            keys.append(found.keys[chunk])
    return keys


def state_to_save(
    model: Model, group: Group, number: int, found: PrefixMatch, step: Step, every_tokens: int
) -> Sequence[ChunkKey]:
    """The chunk with which the step ends, if its state is worth a file, and likewise begins.

    An engine has the states of no other chunks.
    """
    keys = []
    for end, chunks in ((step.computed, step.reused), (step.complete, step.chunks)):
        chunk = end // model.chunk_tokens - 1
        if end % model.align or chunk not in chunks:
            continue
        wanted = chunk in found.windows[number] or chunk >= found.prompt_chunks
        wanted |= chunks is step.chunks and end // every_tokens > step.computed // every_tokens
        tables = ((step.tables[table], model.block_sizes[table]) for table in group.tables)
        if wanted and all(table[end // block - 1] for table, block in tables):
            keys.append(found.keys[chunk])
    return keys
