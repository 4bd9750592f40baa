"""vLLM's KV cache events for what the directory holds, see `vua.connector.events`.

Only if ``kv_events_config.enable_kv_cache_events`` is on; the medium is ``STORAGE``.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from vua.connector.cache_spec import Model
from vua.connector.events import KVEventPublisher
from vua.vllm.versions import MEDIUM_STORAGE, event_extra_keys, session_of

__all__ = ["BlockEvents", "enabled"]


def enabled(vllm_config: Any) -> bool:  # noqa: ANN401
    """Whether vLLM publishes KV cache events."""
    events = vllm_config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


class BlockEvents(KVEventPublisher):
    """Describes chunks as vLLM's blocks."""

    def __init__(self, model: Model, vllm_config: Any, kv_cache_config: Any) -> None:  # noqa: ANN401
        """Take the kind and the hashes of blocks from the engine's configuration."""
        super().__init__(model)
        spec = kv_cache_config.kv_cache_groups[self._table].kv_cache_spec
        _, hash_block = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self._hashes_per_block = self._block // hash_block
        self._kind: dict[str, Any] = {
            "group_idx": self._table,
            "kv_cache_spec_kind": get_kv_cache_spec_kind(spec).value,
            "kv_cache_spec_sliding_window": get_kv_cache_spec_sliding_window(spec),
        }

    def stored_event(self, request: Any, start: int, stop: int) -> BlockStored | None:  # noqa: ANN401
        """See :meth:`KVEventPublisher.stored_event`."""
        hashes, each = request.block_hashes, self._hashes_per_block
        blocks = range(start // self._block, stop // self._block)
        if not blocks or blocks.stop * each > len(hashes):
            return None
        lora = request.lora_request
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(hashes[(at + 1) * each - 1]) for at in blocks],
            parent_block_hash=(
                maybe_convert_block_hash(hashes[blocks.start * each - 1]) if blocks.start else None
            ),
            token_ids=list(request.all_token_ids[start:stop]),
            block_size=self._block,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_STORAGE,
            lora_name=lora.name if lora else None,
            extra_keys=event_extra_keys(request, blocks, self._block),
            **self._kind,
            **session_of(request),
        )

    def removed_event(self, hashes: list[Any]) -> BlockRemoved:
        """See :meth:`KVEventPublisher.removed_event`."""
        return BlockRemoved(block_hashes=hashes, medium=MEDIUM_STORAGE, group_idx=self._table)
