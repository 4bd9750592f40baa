"""LMCache's in-process disk backend, without an engine: it has none on a CPU.

K and V are bytes that follow from the tokens, the model's files, the dtype and the adapter. Here an
engine's answer is a checksum of the K and V of each chunk, loaded or computed: other K and V are
other "tokens". The keys are those of LMCache's own token database.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import threading
import time
import zlib
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ["LMCACHE_TRACK_USAGE"] = "false"

CHUNK, LAYERS, WIDTH = 64, 2, 64
WRITTEN_S = 20.0


def prepare() -> None:
    """Import what takes long."""
    from lmcache.v1.storage_backend import local_disk_backend  # noqa: F401


def version() -> str:
    """Return its version."""
    return metadata.version("lmcache")


def make(job: dict[str, Any]) -> Engine:
    """Make one."""
    return Engine(job)


class Engine:
    """The backend, with the memory that it needs."""

    def __init__(self, job: dict[str, Any]) -> None:
        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
        from lmcache.v1.token_database import ChunkedTokenDatabase

        self.dtype = getattr(torch, job["dtype"])
        folder = Path(job["model"])
        self.model = b"".join(path.read_bytes() for path in sorted(folder.glob("*.*")))
        self.shape = torch.Size([2, LAYERS, CHUNK, WIDTH])
        self.disk = None
        if not job.get("transfer"):
            return
        root = job["transfer"]["root"]
        Path(root).mkdir(exist_ok=True)
        kv_shape = (LAYERS, 2, CHUNK, 1, WIDTH)
        known = LMCacheMetadata(str(folder), job["tp"], job["tp"], 0, 0, self.dtype, kv_shape)
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK, local_cpu=False, max_local_cpu_size=0.1, local_disk=f"file://{root}/",
            max_local_disk_size=4, pre_caching_hash_algorithm="sha256_cbor",
            save_unfull_chunk=False,
        )  # fmt: skip
        self.database = ChunkedTokenDatabase(config, known)
        self.memory = LocalCPUBackend(config, known, dst_device="cpu")
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        self.disk = LocalDiskBackend(config, loop, self.memory, dst_device="cpu")

    def _computed(self, prompt: list[int], adapter: str | None) -> bytes:
        """Return the K and V of a prompt's last chunk."""
        weights = Path(adapter, "adapter_model.safetensors").read_bytes() if adapter else b""
        seed = hashlib.sha256(repr(prompt).encode() + self.model + weights).digest()
        nbytes = self.shape.numel() * self.dtype.itemsize
        return hashlib.shake_128(seed + str(self.dtype).encode()).digest(nbytes)

    def ask(self, prompt: list[int], new: int, adapter: str | None) -> tuple[list[int], int]:  # noqa: ARG002
        """Load the leading chunks that are there; compute and store the others."""
        from lmcache.v1.memory_management import MemoryFormat

        whole = prompt[: len(prompt) // CHUNK * CHUNK]
        answers = []
        keys = [key for _, _, key in self.database.process_tokens(whole)] if self.disk else []
        there = list(itertools.takewhile(self.disk.contains, keys)) if self.disk else []
        loaded = self.disk.batched_get_blocking(there) if there else []  # as LMCache's engine does
        loaded = list(itertools.takewhile(lambda one: one is not None, loaded))
        for at in range(len(whole) // CHUNK):
            if at < len(loaded):
                kv = bytes(loaded[at].byte_array)
                loaded[at].ref_count_down()
            else:
                kv = self._computed(whole[: (at + 1) * CHUNK], adapter)
                if self.disk is not None:
                    one = self.memory.allocate(self.shape, self.dtype, MemoryFormat.KV_2LTD)
                    memoryview(one.byte_array).cast("B")[:] = kv
                    self.disk.batched_submit_put_task([keys[at]], [one])
                    one.ref_count_down()
            answers.append(zlib.crc32(kv))
        until = time.monotonic() + WRITTEN_S
        while any(self.disk.exists_in_put_tasks(key) for key in keys) and time.monotonic() < until:
            time.sleep(0.01)
        return answers, len(loaded) * CHUNK

    def step(self) -> None:
        """Its threads write."""

    def close(self) -> None:
        """Stop its threads."""
        if self.disk is not None:
            self.disk.close()
