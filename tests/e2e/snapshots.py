"""Takes digests of the blocks in the engine's memory, for tests that compare processes by bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def snapshots(taken: list[dict[str, list[str]]] | None) -> Iterator[None]:
    """When a request ends, add the digests of its blocks' bytes: per layer, block after block.

    Straight from vLLM's own tensors, by its own block table; nothing of VUA is in between.
    """
    if taken is None:
        yield
        return
    from vua.vllm.kv_connector_v1 import VUAStorageConnector_V1 as Connector

    register, finished = Connector.register_kv_caches, Connector.request_finished_all_groups
    caches: dict[str, torch.Tensor] = {}

    def registered(self: Any, kv_caches: dict[str, torch.Tensor]) -> None:
        caches.update(kv_caches)
        register(self, kv_caches)

    def ended(self: Any, request: Any, block_ids: tuple[list[int], ...]) -> Any:
        digests = {}
        for group, table in zip(self._kv_cache_config.kv_cache_groups, block_ids, strict=True):
            for name in group.layer_names:
                digests[name] = [digest(caches[name][block]) for block in table]
        assert taken is not None
        taken.append(digests)
        return finished(self, request, block_ids)

    with (
        mock.patch.object(Connector, "register_kv_caches", registered),
        mock.patch.object(Connector, "request_finished_all_groups", ended),
    ):
        yield


def digest(block: torch.Tensor) -> str:
    return hashlib.sha256(block.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
