"""LMCache's L2 adapters on the scorecard: `dev.py scorecard --subject THIS:lmcache_fs`.

By the adapters' own tasks with their own defaults, from and into LMCache's memory, which holds
before a load what the caller's memory held. A task that failed, or a bit that is not set, is
"not stored" or a miss.
"""

from __future__ import annotations

import hashlib
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import lmcache_stores
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import _object_key_to_filename

from scorecard.subject import Key, NotApplicableError, Subject


class LMCacheFs(Subject):
    """LMCache's file system L2 adapter with its defaults, moving from and into LMCache's memory."""

    has_salts = has_models = True
    forks = False
    native = False

    def __init__(self, root: Path, nbytes: int) -> None:
        """Start the adapter and take two buffers of LMCache's pool."""
        kind = lmcache_stores.FsNative if self.native else lmcache_stores.Fs
        self.name = f"LMCache {metadata.version('lmcache')} L2 " + (
            "fs_native" if self.native else "fs"
        )
        self.root, self.nbytes = root, nbytes
        self._pool = kind(root, np.zeros((1, nbytes), dtype=np.uint8), 1)
        self._source, self._target = self._pool.object(), self._pool.object()

    def key(self, key: Key) -> Any:
        """Return LMCache's name of an entry. Raises ValueError for names that it refuses."""
        digest = self.cut(hashlib.sha256(str(key.number).encode()).digest())
        return ObjectKey(digest, key.model, 0, cache_salt=key.salt)

    def put(self, key: Key, data: bytes) -> bool:
        """A store task of one object."""
        self._pool.words(self._source)[:] = np.frombuffer(data, dtype=np.uint8)
        adapter = self._pool.adapter
        task = adapter.submit_store_task([self.key(key)], [self._source])
        done = self._pool._wait(
            adapter.get_store_event_fd(),
            lambda: adapter.pop_completed_store_tasks().get(task),
        )
        return bool(done.is_successful())

    def get(self, key: Key, into: memoryview) -> bool:
        """A load task of one object, into LMCache's memory that holds what ``into`` held."""
        words = self._pool.words(self._target)
        words[:] = np.frombuffer(into, dtype=np.uint8)
        adapter = self._pool.adapter
        task = adapter.submit_load_task([self.key(key)], [self._target])
        bits = self._pool._wait(
            adapter.get_load_event_fd(), lambda: adapter.query_load_result(task)
        )
        into[:] = memoryview(words)
        return bool(bits.test(0))

    def files(self, key: Key) -> list[Path]:
        """The one file, by the adapter's own rule."""
        path = self.root / _object_key_to_filename(self.key(key))
        return [path] if path.exists() else []

    def temporary_name(self, key: Key) -> Path | None:
        """The name with another suffix, which the adapter in Python uses."""
        if self.native:
            return None
        return (self.root / _object_key_to_filename(self.key(key))).with_suffix(".tmp")

    def close(self) -> None:
        """Stop the adapter."""
        self._pool.close()


class LMCacheFsNative(LMCacheFs):
    """The same adapter in C++."""

    native = True


def refuse(max_bytes: int | None, *, durable: bool) -> None:
    """Say what it does not have."""
    if max_bytes is not None:
        raise NotApplicableError("it has no limit")
    if durable:
        raise NotApplicableError("it has no durable mode")


def lmcache_fs(
    root: Path, nbytes: int, *, max_bytes: int | None = None, durable: bool = False
) -> Subject:
    """LMCache's L2 adapter ``fs``."""
    refuse(max_bytes, durable=durable)
    return LMCacheFs(root, nbytes)


def lmcache_fs_native(
    root: Path, nbytes: int, *, max_bytes: int | None = None, durable: bool = False
) -> Subject:
    """LMCache's L2 adapter ``fs_native``."""
    refuse(max_bytes, durable=durable)
    return LMCacheFsNative(root, nbytes)
