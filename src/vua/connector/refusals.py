"""What is not stored, why, and what to do: of an engine, or of one request.

`vua-vllm refused` lists them. Where each holds is decided in `vua.vllm.support`,
`vua.vllm.cache_spec` and where requests are named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from vua.connector.cache_spec import UncachedError

_REQUEST: Final = "request"
_WITHOUT: Final = "start it without --kv-transfer-config or VUA_PATH"
_TIER: Final = (
    "set VUA_DOOR=tier, which needs vLLM 0.32 or newer, and for states --enable-prefix-caching"
)


class Refusal(NamedTuple):
    """Something that is not stored."""

    why: str
    do: str
    """What to do instead."""
    of: str = "engine"
    """It concerns an `engine`, which is then served uncached; or a `request`."""


REFUSALS: Final[Mapping[str, Refusal]] = {
    "tier_alone": Refusal("VUA's own connector does not serve {}", _TIER),
    "old_vllm": Refusal("{} needs more of vLLM's load interface", "install vLLM 0.30 or later"),
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
    "no_images": Refusal("the model takes no images", "send text alone", _REQUEST),
    "other_encoder": Refusal(
        "prompts with images are not cached: another process computes their embeddings",
        'run the encoder in the engine (without --ec-transfer-config), or "allow": '
        '["other_encoders"] where that process runs the same model and settings',
        _REQUEST,
    ),
    "shared_memory": Refusal(
        'prompts with images are not cached: with mm_processor_cache_type="shm" their content '
        "does not reach the scheduler",
        'leave out --mm-processor-cache-type, or give "lru"',
        _REQUEST,
    ),
    "processor": Refusal(
        "prompts with images are not cached: what prepares them cannot be identified: {}",
        "give vLLM a readable directory",
        _REQUEST,
    ),
    "no_content": Refusal(
        "vLLM's scheduler was not given the content of an image",
        "send the image, with an identifier that had none before, or without one",
        _REQUEST,
    ),
    "content": Refusal(
        "an image's content cannot be digested: {}",
        "report the model, or send text alone",
        _REQUEST,
    ),
    "identifiers": Refusal(
        "one identifier was given to different images",
        "leave out multi_modal_uuids, or give each image one that was not used before",
        _REQUEST,
    ),
    "adapter": Refusal(
        "requests with an adapter are not cached that the workers do not have, or not all alike "
        "(expert parallelism gives each a part of it)",
        "report the adapter; requests without it are cached",
        _REQUEST,
    ),
}


def refused(name: str, *found: object) -> UncachedError:
    """Return the error of :data:`REFUSALS` of this name, with what was found."""
    one = REFUSALS[name]
    return UncachedError(f"{one.why.format(*found)}: {one.do}")
