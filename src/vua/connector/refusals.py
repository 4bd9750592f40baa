"""What is not stored, why, and what to do: of an engine, or of one request.

`vua-vllm refused` lists them. Where each holds is decided in `vua.vllm.support`,
`vua.vllm.cache_spec` and where requests are named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from vua.connector.cache_spec import UncachedError

_ENGINE: Final = "engine"
_REQUEST: Final = "request"
_WITHOUT: Final = "start it without --kv-transfer-config or VUA_PATH"
_TIER: Final = "set VUA_DOOR=tier, which needs vLLM 0.32 or newer"


class Refusal(NamedTuple):
    """Something that is not stored."""

    of: str
    """It concerns an `engine`, which is then served uncached; or a `request`."""
    why: str
    do: str
    """What to do instead."""


REFUSALS: Final[Mapping[str, Refusal]] = {
    "tier_alone": Refusal(_ENGINE, "on GPUs VUA's own connector does not serve {}", _TIER),
    "old_vllm": Refusal(
        _ENGINE, "{} needs more of vLLM's load interface", "install vLLM 0.30 or later"
    ),
    "mixed_blocks": Refusal(  # seen: it lets a block's bytes lie in others
        _ENGINE,
        "vLLM's CPU backend mixes up blocks of a {} KV cache",
        "leave out --kv-cache-dtype",
    ),
    "encoder_decoder": Refusal(
        _ENGINE,
        "vLLM starts no encoder-decoder model with a KV connector",
        _WITHOUT,
    ),
    "pooling": Refusal(
        _ENGINE,
        "a {} model that vLLM itself caches no prefix for: each token sees later ones, or all of "
        "them make its vector",
        _WITHOUT,
    ),
    "no_cache": Refusal(_ENGINE, "the engine has no KV cache", _WITHOUT),
    "no_attention": Refusal(
        _ENGINE,
        "a model without attention has no KV cache of single tokens to store",
        _WITHOUT,
    ),
    "unidentified": Refusal(
        _ENGINE, "the model cannot be identified: {}", "give vLLM a readable directory"
    ),
    "weights": Refusal(
        _ENGINE,
        "the weights cannot be identified: {}",
        "give --model a directory of safetensors, and leave out --load-format",
    ),
    "more_weights": Refusal(
        _ENGINE, "{} loads weights from a second place, which vLLM does not name", _WITHOUT
    ),
    "weights_changed": Refusal(
        _ENGINE,
        "weight files were changed after the engine's start, so what it has loaded is unknown",
        "restart the engine",
    ),
    "setting": Refusal(
        _ENGINE,
        "{}: two engines' values of this setting cannot be compared",
        "leave it out, or report it",
    ),
    "draft_method": Refusal(
        _ENGINE,
        "{}: it is unknown how its draft's K and V depend on the prompt",
        "use ngram, or a draft by eagle or mtp",
    ),
    "draft_layers": Refusal(
        _ENGINE, "the layers of a draft by {} cannot be found", "use ngram, or report it"
    ),
    "draft_setting": Refusal(
        _ENGINE, "{} together with {}", "leave that out; --tensor-parallel-size divides drafts"
    ),
    "latent": Refusal(
        _ENGINE,
        "this MLA backend cannot continue a cached prefix (vLLM turned prefix caching off)",
        '"allow": ["inexact_continuation"] loads correct bytes anyway',
    ),
    "on_host": Refusal(
        _ENGINE, "a KV cache that vLLM moves to the host's memory (HiSparse)", _WITHOUT
    ),
    "states_unaligned": Refusal(
        _ENGINE,
        'a state-space model in cache mode "{}": states are stored where vLLM keeps them at the '
        "ends of blocks",
        "start it with --enable-prefix-caching",
    ),
    "states_on_cpu": Refusal(
        _ENGINE,
        "vLLM's kernels for CPUs keep no {} states at the ends of blocks",
        f"{_WITHOUT}, and with --no-enable-prefix-caching",
    ),
    "no_prefix": Refusal("a {} KV cache of which vLLM itself caches no prefix", _WITHOUT),
    "chunked": Refusal(
        _ENGINE,
        "layers that attend within chunks of {} tokens (Llama 4)",
        "start it with VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE=0 in its environment",
    ),
    "unknown_rule": Refusal(
        _ENGINE,
        "a {} KV cache: it is unknown which of its tokens a hit needs",
        f"report the model; until then {_WITHOUT}",
    ),
    "pipeline": Refusal(
        _ENGINE,
        "several kinds of KV cache, pages of an unknown form, or layers that share caches, "
        "together with pipeline parallelism",
        f"leave out --pipeline-parallel-size; --tensor-parallel-size divides it, too; or on GPUs "
        f"{_TIER}",
    ),
    "no_images": Refusal(_REQUEST, "the model takes no images", "send text alone"),
    "other_encoder": Refusal(
        _REQUEST,
        "prompts with images are not cached: another process computes their embeddings",
        'run the encoder in the engine (without --ec-transfer-config), or "allow": '
        '["other_encoders"] where that process runs the same model and settings',
    ),
    "shared_memory": Refusal(
        _REQUEST,
        'prompts with images are not cached: with mm_processor_cache_type="shm" their content '
        "does not reach the scheduler",
        'leave out --mm-processor-cache-type, or give "lru"',
    ),
    "processor": Refusal(
        _REQUEST,
        "prompts with images are not cached: what prepares them cannot be identified: {}",
        "give vLLM a readable directory",
    ),
    "no_content": Refusal(
        _REQUEST,
        "vLLM's scheduler was not given the content of an image",
        "send the image, with an identifier that had none before, or without one",
    ),
    "content": Refusal(
        _REQUEST,
        "an image's content cannot be digested: {}",
        "report the model, or send text alone",
    ),
    "identifiers": Refusal(
        _REQUEST,
        "one identifier was given to different images",
        "leave out multi_modal_uuids, or give each image one that was not used before",
    ),
    "adapter": Refusal(
        _REQUEST,
        "requests with an adapter are not cached that the workers do not have, or not all alike "
        "(expert parallelism gives each a part of it)",
        "report the adapter; requests without it are cached",
    ),
}


def refused(name: str, *found: object) -> UncachedError:
    """Return the error of :data:`REFUSALS` of this name, with what was found."""
    one = REFUSALS[name]
    return UncachedError(f"{one.why.format(*found)}: {one.do}")
