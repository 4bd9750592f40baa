"""What both halves of a connector know of an engine's KV cache.

An engine's own package creates this from the engine's configuration alone, so that the scheduler's
process and every worker agree. Also finds the local files of a model; nothing is downloaded.

Here is also what is not stored, why, and what to do: of an engine, or of one request. Where each
holds is decided in `vua.vllm.support`, `vua.vllm.cache_spec` and where requests are named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from vua.errors import ConfigError, VUAError
from vua.format.identity import Identity
from vua.format.layout import Kind, KVLayout, Shard, alignment, first_needed, first_token, leading


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
    """Whether the engine may apply an adapter to requests without one: they are not cached."""
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


_WITHOUT: Final = "start it without --kv-transfer-config or VUA_PATH"
_TIER: Final = "set VUA_DOOR=tier, which needs for states --enable-prefix-caching"


class Refusal(NamedTuple):
    """Something that is not stored."""

    why: str
    do: str
    """What to do instead."""


REFUSALS: Final[Mapping[str, Refusal]] = {
    "tier_alone": Refusal("VUA's own connector does not serve {}", _TIER),
    "mixed_blocks": Refusal(  # seen: it lets a block's bytes lie in others
        "vLLM's CPU backend mixes up blocks of a {} KV cache", "leave out --kv-cache-dtype"
    ),
    "encoder_decoder": Refusal(
        "vLLM starts no encoder-decoder model with a KV connector", _WITHOUT
    ),
    "pooling": Refusal(
        "a {} model that vLLM itself caches no prefix for: each token sees later ones, or all of "
        "them make its vector",
        _WITHOUT,
    ),
    "no_cache": Refusal("the engine has no KV cache", _WITHOUT),
    "unidentified": Refusal("the model cannot be identified: {}", "give vLLM a readable directory"),
    "weights": Refusal(
        "the weights cannot be identified: {}",
        "give --model a directory of safetensors, and leave out --load-format",
    ),
    "more_weights": Refusal(
        "{} loads weights from a second place, which vLLM does not name", _WITHOUT
    ),
    "weights_changed": Refusal(
        "weight files were changed after the engine's start, so what it has loaded is unknown",
        "restart the engine",
    ),
    "setting": Refusal(
        "{}: two engines' values of this setting cannot be compared", "leave it out, or report it"
    ),
    "draft_method": Refusal(
        "{}: it is unknown how its draft's K and V depend on the prompt",
        "use ngram, or a draft by eagle or mtp",
    ),
    "latent": Refusal(
        "this MLA backend cannot continue a cached prefix (vLLM turned prefix caching off)",
        '"allow": ["inexact_continuation"] loads correct bytes anyway',
    ),
    "on_host": Refusal("a KV cache that vLLM moves to the host's memory (HiSparse)", _WITHOUT),
    "no_prefix": Refusal("a {} KV cache of which vLLM itself caches no prefix", _WITHOUT),
    "pipeline": Refusal(
        "several kinds of KV cache, or layers that share caches, together with pipeline "
        "parallelism",
        "leave out --pipeline-parallel-size; --tensor-parallel-size divides it, too; or " + _TIER,
    ),
    "no_images": Refusal("the model takes no images", "send text alone"),
    "other_encoder": Refusal(
        "prompts with images are not cached: another process computes their embeddings",
        "run the encoder in the engine, without --ec-transfer-config",
    ),
    "shared_memory": Refusal(
        'prompts with images are not cached: with mm_processor_cache_type="shm" their content '
        "does not reach the scheduler",
        'leave out --mm-processor-cache-type, or give "lru"',
    ),
    "processor": Refusal(
        "prompts with images are not cached: what prepares them cannot be identified: {}",
        "give vLLM a readable directory",
    ),
    "no_content": Refusal(
        "vLLM's scheduler was not given the content of an image",
        "send the image, with an identifier that had none before, or without one",
    ),
    "content": Refusal(
        "an image's content cannot be digested: {}",
        "report the model, or send text alone",
    ),
    "identifiers": Refusal(
        "one identifier was given to different images",
        "leave out multi_modal_uuids, or give each image one that was not used before",
    ),
    "adapter": Refusal(
        "requests with an adapter are not cached that the workers do not have, or not all alike "
        "(expert parallelism gives each a part of it)",
        "report the adapter; requests without it are cached",
    ),
}


def refused(name: str, *found: object) -> UncachedError:
    """Return the error of :data:`REFUSALS` of this name, with what was found."""
    one = REFUSALS[name]
    return UncachedError(f"{one.why.format(*found)}: {one.do}")
