"""LMCache 0.5.6's storage on a CPU: the local disk backend and the two file system L2 adapters."""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import stores
import torch

os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import fs_l2_adapter, fs_native_l2_adapter
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

TIMEOUT_S = 60


class Pool(stores.Store):
    """What the stores share: chunks in LMCache's own memory, from which and into which it moves."""

    def __init__(self, root: Path, source: np.ndarray, layers: int) -> None:
        """Fill LMCache's memory with the chunks."""
        super().__init__(root, source, layers)
        count, nbytes = source.shape
        self.shape = torch.Size([2, 1, 1, nbytes // 4])
        kv_shape = (1, 2, 1, 1, nbytes // 4)
        metadata = LMCacheMetadata("bench", 1, 1, 0, 0, torch.bfloat16, kv_shape)
        self.config = LMCacheEngineConfig.from_defaults(
            chunk_size=1, local_cpu=False, max_local_cpu_size=3.3 * source.nbytes / 2**30 + 0.1,
            local_disk=f"file://{root}/", max_local_disk_size=64, **self.settings(),
        )  # fmt: skip
        self.cpu = LocalCPUBackend(self.config, metadata, dst_device="cpu")
        self.objects = [self.object() for _ in range(count)]
        for one, chunk in zip(self.objects, source, strict=True):
            self.words(one)[:] = chunk
        self.results: list[Any] = []

    def settings(self) -> dict[str, Any]:
        """More of LMCache's settings."""
        return {}

    def object(self) -> Any:
        """Memory for a chunk."""
        one = self.cpu.allocate(self.shape, torch.bfloat16, MemoryFormat.KV_2LTD)
        if one is None:
            raise RuntimeError("LMCache's memory is too small")
        return one

    @staticmethod
    def words(one: Any) -> np.ndarray:
        """A chunk's bytes."""
        return np.frombuffer(one.byte_array, dtype=np.uint8)

    def loaded(self) -> np.ndarray:
        """What the last load brought."""
        return np.stack([self.words(one) for one in self.results])


class LocalDisk(Pool):
    """The in-process tier."""

    def __init__(self, root: Path, source: np.ndarray, layers: int) -> None:
        """Start its threads."""
        super().__init__(root, source, layers)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.disk = LocalDiskBackend(self.config, self.loop, self.cpu, dst_device="cpu")

    def keys(self) -> list[CacheEngineKey]:
        """The current generation's keys."""
        first = self.generation * 1_000_000
        return [
            CacheEngineKey("bench", 1, 0, first + n, torch.bfloat16)
            for n in range(len(self.source))
        ]

    def files(self) -> list[str]:
        """Whatever it has written."""
        return [str(path) for path in self.root.iterdir()]

    def next(self) -> None:
        """Let it delete its own files."""
        for key in self.keys():
            self.disk.remove(key)
        self.generation += 1

    def save(self) -> None:
        """Hand all chunks over and wait until they are written."""
        left, done = threading.Semaphore(0), self.keys()
        self.disk.batched_submit_put_task(
            done, self.objects, on_complete_callback=lambda _key: left.release()
        )
        for _ in done:
            if not left.acquire(timeout=TIMEOUT_S):
                raise TimeoutError("LMCache did not write within a minute")

    def load(self) -> None:
        """batched_get_blocking: it allocates in its pool, which is resident."""
        for one in self.results:
            one.ref_count_down()
        self.results = self.disk.batched_get_blocking(self.keys())
        if any(one is None for one in self.results):
            raise RuntimeError("LMCache missed")

    def close(self) -> None:
        """Stop the threads."""
        self.disk.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)


class LocalDiskDirect(LocalDisk):
    """The same past the page cache."""

    def settings(self) -> dict[str, Any]:
        """Its switch."""
        return {"extra_config": {"use_odirect": True}}


class FsNative(Pool):
    """The C++ file system adapter of the multi-process mode."""

    def __init__(self, root: Path, source: np.ndarray, layers: int) -> None:
        """Start the adapter."""
        super().__init__(root, source, layers)
        self.adapter = self.make(str(root))
        self.results = [self.object() for _ in self.objects]

    def make(self, root: str) -> Any:
        """Return the adapter, with its own defaults."""
        config = fs_native_l2_adapter.FSNativeL2AdapterConfig.from_dict(
            {"type": "fs_native", "base_path": root}
        )
        return fs_native_l2_adapter._create_fs_native_l2_adapter(config)

    def keys(self) -> list[ObjectKey]:
        """The current generation's keys."""
        first = self.generation * 1_000_000
        return [
            ObjectKey((first + n).to_bytes(32, "big"), "bench", 0) for n in range(len(self.source))
        ]

    def files(self) -> list[str]:
        """Whatever it has written."""
        return [str(path) for path in self.root.iterdir() if path.is_file()]

    def save(self) -> None:
        """Submit all chunks and wait for the completion."""
        task = self.adapter.submit_store_task(self.keys(), self.objects)
        found = self._wait(
            self.adapter.get_store_event_fd(),
            lambda: self.adapter.pop_completed_store_tasks().get(task),
        )
        if not getattr(found, "ok", found):
            raise RuntimeError("LMCache could not write")

    def load(self) -> None:
        """Submit all chunks and wait for the completion."""
        task = self.adapter.submit_load_task(self.keys(), self.results)
        self._wait(self.adapter.get_load_event_fd(), lambda: self.adapter.query_load_result(task))

    @staticmethod
    def _wait(fd: int, ask: Any) -> Any:
        start = time.monotonic()
        while time.monotonic() - start < TIMEOUT_S:
            found = ask()
            if found is not None:
                return found
            if select.select([fd], [], [], 0.05)[0]:
                os.read(fd, 8)
        raise TimeoutError("LMCache did not answer within a minute")

    def close(self) -> None:
        """Stop the adapter."""
        self.adapter.close()


class Fs(FsNative):
    """The same adapter in Python."""

    def make(self, root: str) -> Any:
        """Return the adapter, with its own defaults."""
        config = fs_l2_adapter.FSL2AdapterConfig.from_dict({"type": "fs", "base_path": root})
        return fs_l2_adapter.FSL2Adapter(config)


KNOWN: dict[str, type[stores.Store]] = {
    "LMCache local disk": LocalDisk,
    "LMCache local disk, O_DIRECT": LocalDiskDirect,
    "LMCache L2 fs": Fs,
    "LMCache L2 fs_native": FsNative,
}
