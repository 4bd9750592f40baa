"""What engines are told at their start, so that they use VUA."""

from __future__ import annotations

import json
from typing import Any, Final

__all__ = ["VLLM_TRANSFER", "sglang_arguments"]

VLLM_TRANSFER: Final = {
    "kv_connector": "VUAStorageConnector_V1",
    "kv_connector_module_path": "vua.vllm.kv_connector_v1",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
"""vLLM's ``--kv-transfer-config``, without VUA's own settings."""


def sglang_arguments(path: str, **settings: Any) -> dict[str, Any]:
    """Return the arguments of an ``sglang.Engine`` that stores its pages in a directory or bucket.

    Args:
        path: the directory, or a bucket's URL.
        settings: further ones of VUA's, or of SGLang's extra configuration.
    """
    extra = {
        "backend_name": "vua",
        "module_path": "vua.sglang.storage",
        "class_name": "VUAHiCacheStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "shared_storage_path": path,
        **settings,
    }
    return {
        "enable_hierarchical_cache": True,
        "page_size": 64,
        "hicache_write_policy": "write_through",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }
