"""VUA for SGLang: a storage backend of its hierarchical cache (HiCache).

SGLang imports it by name: ``--hicache-storage-backend dynamic`` and, in the extra configuration,
``"module_path": "vua.sglang.storage", "class_name": "VUAHiCacheStorage"``. docs/sglang.md is the
how-to.
"""

__all__: list[str] = []
