"""Which vLLM this connector works with, and everything that differs between its releases.

The connector itself is written for the newest one; what an older one lacks is asked for here.
"""

from __future__ import annotations

from typing import Any, Final

import vllm
from packaging.version import InvalidVersion, Version
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from vua.errors import ConfigError

__all__ = [
    "can_fail_requests",
    "check_version",
    "event_extra_keys",
    "knows_current_blocks",
    "session_of",
]

OLDEST: Final = Version("0.28")
NEWEST: Final = Version("0.33")
"""The last minor release whose connector interface was checked."""


def check_version(*, allow_untested: bool) -> None:
    """Refuse a vLLM whose interface this connector was never checked against.

    Args:
        allow_untested: go on with a newer one all the same.

    Raises:
        ConfigError: with the version found, the range, and what to do.
    """
    try:
        found = Version(vllm.__version__)
    except InvalidVersion:
        return  # somebody's own build: they know
    release = Version(f"{found.major}.{found.minor}")
    if release < OLDEST or (release > NEWEST and not allow_untested):
        text = (
            f"vLLM {vllm.__version__} is not supported: this version of VUA works with {OLDEST} "
            f"to {NEWEST}. Install one of these, or look for another version of VUA"
        )
        if release > NEWEST:
            text += '; "allow_untested_vllm": true in kv_connector_extra_config tries this one'
        raise ConfigError(text)


def can_fail_requests() -> bool:
    """Whether a failed load can be reported for a request as a whole (vLLM 0.30)."""
    return hasattr(KVConnectorOutput(), "failed_recving")


def knows_current_blocks() -> bool:
    """Whether a step says which blocks a request has now, freed ones left out (vLLM 0.32)."""
    return "kv_connector_block_state" in SchedulerOutput.__dataclass_fields__


def event_extra_keys(request: Any, blocks: range, block_size: int) -> list[Any] | None:  # noqa: ANN401
    """Return what beside tokens names each of a request's blocks, in the form of vLLM's events.

    None where that is nothing. vLLM 0.32 tags these keys and publishes them without the tags.
    """
    if not (request.lora_request or request.cache_salt or request.mm_features):
        return None
    keys, feature = [], 0
    for block in blocks:
        start = block * block_size
        found, feature = kv_cache_utils.generate_block_hash_extra_keys(
            request, start, start + block_size, feature
        )
        keys.append(found)
    untagged = getattr(kv_cache_utils, "to_event_extra_keys", None)
    return keys if untagged is None else list(untagged(keys))


def session_of(request: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the field of an event that names the request's session, where vLLM (0.32) has it."""
    if "session_id" not in BlockStored.__struct_fields__:
        return {}
    return {"session_id": request.session_id}
