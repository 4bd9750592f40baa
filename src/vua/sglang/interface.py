"""The rest of SGLang's storage interface, besides pages that are moved in place.

SGLang calls none of it with ``"interface_v1": 1``.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

__all__ = ["PagesInPlace"]


class PagesInPlace(HiCacheStorage):
    """Refuses everything through the other methods."""

    def exists(self, key: str) -> bool:
        """Return False: pages are looked up by `batch_exists`."""
        return False

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Return None: pages go through `batch_get_v1`."""

    def batch_get(
        self,
        keys: list[str],
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> list[torch.Tensor | None]:
        """Return None for each: pages go through `batch_get_v1`."""
        return [None] * len(keys)

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Return False: pages go through `batch_set_v1`."""
        return False

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Return False: pages go through `batch_set_v1`."""
        return False
