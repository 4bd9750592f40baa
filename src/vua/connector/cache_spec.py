"""What both halves of a connector know of an engine's KV cache.

An engine's own package creates this from the engine's configuration alone, so that the scheduler's
process and every worker agree. Also finds the local files of a model; nothing is downloaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from vua.errors import ConfigError, VUAError
from vua.format.identity import Identity
from vua.format.layout import KVLayout, Shard
from vua.format.prefix import Kind, alignment, first_needed, first_token, leading


class UncachedError(VUAError):
    """This engine's KV cache cannot be stored correctly; it is served without VUA."""


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """The fields that count, and for which requests."""

    config: Mapping[str, object]
    """For `vua.format.identity.config_digest`."""
    adapters: str
    """Counts in addition to an adapter's own files; "" for nothing."""
    media: str
    """Counts from the first image on."""
    media_refused: str
    """Why prompts with an image are not cached; "" if they are."""


NOTHING_MORE: Final = EngineIdentity({}, "", "", "")


@dataclass(frozen=True, slots=True)
class Group:
    """The layers of one kind: full attention, or a sliding window.

    An engine may spread one kind over several of its own cache groups, each with a block table.
    """

    layout: KVLayout
    layers: tuple[int, ...]
    shards: tuple[tuple[Shard, ...], ...]
    """The rectangle of each worker: ``shards[pp rank][tp rank]``."""
    tables: tuple[int, ...]
    """The engine's cache groups that these layers are spread over."""

    @property
    def written(self) -> tuple[Shard, ...]:
        """The files that this engine writes for one chunk: each distinct rectangle once."""
        return tuple(dict.fromkeys(shard for row in self.shards for shard in row))

    def first_needed(self, tokens: int) -> int:
        """The first token whose K/V are needed to continue after ``tokens`` tokens."""
        return first_needed(self.layout, tokens)


def division(groups: Sequence[Group]) -> dict[str, object]:
    """Return what a model's config gets in addition if some layers have windows.

    So caches that are divided into other groups have another identity.
    """
    if not any(group.layout.window for group in groups):
        return {}
    return {"vua.groups": sorted([group.layout.group, *group.layers] for group in groups)}


@dataclass(frozen=True, slots=True)
class Model:
    """What both sides of the connector need to know about the engine's KV cache."""

    identity: Identity
    groups: tuple[Group, ...]
    """Those with full attention first."""
    block_sizes: tuple[int, ...]
    """Tokens per block of each of the engine's cache groups."""
    quantised: bool = False
    """Whether the model computes with quantised weights or activations."""
    engine: EngineIdentity = NOTHING_MORE
    """Fields that count in addition for requests with an adapter or an image."""
    blocks: int = 0
    """Number of blocks in the engine's own cache, of each of its groups."""
    step_tokens: int = 8192
    adapters_spill: bool = False
    """Whether the engine computes requests without an adapter wrongly in a step with one."""
    identified: bool = True
    """Whether the identity is complete: the weights' fingerprint takes longer than the rest."""
    loads: bool = True
    trusts_itself: bool = True
    """False: the way of chunks is tried first, and what this engine has stored is compared before
    its first load, as foreign chunks."""

    def with_weights(self, fingerprint: str) -> Model:
        """The same cache, now that the weights are known."""
        identity = replace(self.identity, weights=fingerprint)
        return replace(self, identity=identity, identified=True)

    def in_epoch(self, epoch: str) -> Model:
        """The same cache in another epoch, so in another namespace."""
        return replace(self, identity=replace(self.identity, epoch=epoch))

    @property
    def workers(self) -> int:
        """Number of workers that each hold a part of the cache."""
        return sum(len(row) for row in self.groups[0].shards)

    @property
    def chunk_tokens(self) -> int:
        return self.groups[0].layout.chunk_tokens

    @property
    def align(self) -> int:
        """The length of a hit must be a multiple of this: it ends with a block in every group."""
        return math.lcm(*self.block_sizes, alignment(self.kinds))

    def useful_chunks(self, chunks: int) -> int:
        """How many of a prompt's leading ``chunks`` this engine could load.

        A hit ends with a block. What begins after the last of these ends needs a further chunk; the
        prompt that brings that one stores both. All are useful to an engine that only stores:
        other engines load them, in their own blocks.
        """
        size, align = self.chunk_tokens, self.align
        return -(-(chunks * size // align * align) // size) if self.loads else chunks

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The groups, in the form that the rule for usable prefixes needs."""
        return tuple(self._kind(group) for group in self.groups)

    def _kind(self, group: Group) -> Kind:
        return Kind(group.layout, math.lcm(*(self.block_sizes[table] for table in group.tables)))

    def first_loaded(self, group: Group, tokens: int) -> int:
        """The first token of a group to load in order to continue after ``tokens`` tokens."""
        return first_token(self._kind(group), tokens)

    def in_blocks(self, group: Group, chunk: int, tables: Sequence[Sequence[int]]) -> bool:
        """Whether all blocks of a chunk are in a request's block tables; 0: a freed one."""
        start, stop = chunk * self.chunk_tokens, (chunk + 1) * self.chunk_tokens
        return all(
            all(tables[table][start // block : -(-stop // block)])
            for table in group.tables
            for block in (self.block_sizes[table],)
        )

    def loaded_nbytes(self, start: int, stop: int) -> int:
        """The bytes that all workers read, in whole chunks, to load tokens [start, stop)."""
        total = 0
        for group in self.groups:
            size = group.layout.chunk_tokens
            first = max(self.first_loaded(group, stop), start) // size
            total += (-(-stop // size) - first) * group.layout.full.payload_nbytes(group.layout)
        return total

    @property
    def plain(self) -> bool:
        """Whether all layers have full attention, in one cache group: any part of a hit is usable.

        Blocks that were not loaded can then be named to the engine.
        """
        (first, *others) = self.groups
        return first.layout.window is None and not others and len(self.block_sizes) == 1

    @property
    def leading(self) -> tuple[Group, ...]:
        """The groups of which every chunk is stored: they decide how much of a prompt is shared."""
        return tuple(self.groups[at] for at in leading([one.layout for one in self.groups]))


def local_directory(model: str, revision: str | None, download_dir: str | None) -> Path:
    """Return where a model's files are on this machine.

    Args:
        model: a path, or a name on the Hugging Face hub.
        revision: the hub's, for a name.
        download_dir: where the engine downloads to; None: where Hugging Face does.

    Raises:
        ConfigError: there are none.
    """
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - for names alone
    from huggingface_hub.errors import (  # noqa: PLC0415
        HfHubHTTPError,
        LocalEntryNotFoundError,
    )

    try:
        found = snapshot_download(  # of any file, for engines leave some out
            model,
            revision=revision,
            cache_dir=download_dir,
            local_files_only=True,
            ignore_patterns="*",
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError) as problem:
        raise ConfigError(f"no local files of {model!r} to fingerprint: {problem}") from problem
    return Path(found)
