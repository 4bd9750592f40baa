"""How other stores write and read the same bytes, each by its own code.

Where that cannot be called alone, by the same library calls on the same files. Every store loads
into memory that is used again; what hands out its own memory is copied there.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

ALIGNMENT = 4096


def aligned(shape: tuple[int, int]) -> np.ndarray:
    """Touched, page aligned bytes."""
    raw = np.ones(shape[0] * shape[1] + ALIGNMENT, dtype=np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + shape[0] * shape[1]].reshape(shape)


class Store:
    """One peer. Sub-classes say how files are named, written and read."""

    def __init__(self, root: Path, source: np.ndarray, layers: int) -> None:
        """Write chunks ``source`` [chunks, nbytes] below ``root``."""
        self.root, self.source, self.layers = root, source, layers
        self.target = aligned(source.shape)
        self.generation = 0
        root.mkdir(parents=True, exist_ok=True)

    def files(self) -> list[str]:
        """The current generation's files."""
        return [f"{self.root}/{self.generation}-{n}" for n in range(len(self.source))]

    def next(self) -> None:
        """Delete the current files and choose new names; untimed."""
        for path in self.files():
            with contextlib.suppress(FileNotFoundError):
                Path(path).unlink()
        self.generation += 1

    def save(self) -> None:
        """Write all chunks."""
        raise NotImplementedError

    def load(self) -> None:
        """Read all chunks into ``target``."""
        raise NotImplementedError

    def loaded(self) -> np.ndarray:
        """What the last load brought."""
        return self.target

    def close(self) -> None:
        """Stop threads, if there are any."""


class Raw(Store):
    """A control: the floor, measured in this process."""

    def save(self) -> None:
        """Write, close, rename."""
        for path, chunk in zip(self.files(), self.source, strict=True):
            fd = os.open(path + ".tmp", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.pwritev(fd, [chunk], 0)
            os.close(fd)
            Path(path + ".tmp").rename(path)

    def load(self) -> None:
        """Open, preadv, close."""
        for path, chunk in zip(self.files(), self.target, strict=True):
            fd = os.open(path, os.O_RDONLY)
            os.preadv(fd, [chunk], 0)
            os.close(fd)


class Safetensors(Store):
    """A file per chunk by save_file and load_file."""

    def save(self) -> None:
        """save_file."""
        for path, chunk in zip(self.files(), self.source, strict=True):
            safetensors.torch.save_file({"kv": torch.from_numpy(chunk)}, path)

    def load(self) -> None:
        """load_file, and a copy to where the bytes are wanted."""
        for path, chunk in zip(self.files(), self.target, strict=True):
            torch.from_numpy(chunk).copy_(safetensors.torch.load_file(path)["kv"])


class TorchSave(Store):
    """A file per chunk by torch.save and torch.load."""

    def save(self) -> None:
        """torch.save."""
        for path, chunk in zip(self.files(), self.source, strict=True):
            torch.save(torch.from_numpy(chunk), path)

    def load(self) -> None:
        """torch.load, and a copy to where the bytes are wanted."""
        for path, chunk in zip(self.files(), self.target, strict=True):
            torch.from_numpy(chunk).copy_(torch.load(path, weights_only=True))


class ExampleConnector(Store):
    """vLLM's ExampleConnector: one safetensors file per layer for the whole prompt.

    Its storage is two calls inside methods that need an engine; these are the same two calls.
    """

    def files(self) -> list[str]:
        """A file per layer."""
        return [f"{self.root}/{self.generation}-layer{n}" for n in range(self.layers)]

    def _part(self, memory: np.ndarray, layer: int) -> torch.Tensor:
        flat = memory.reshape(-1)
        step = flat.size // self.layers
        return torch.from_numpy(flat[layer * step : (layer + 1) * step])

    def save(self) -> None:
        """save_file of each layer."""
        for layer, path in enumerate(self.files()):
            safetensors.torch.save_file({"kv_cache": self._part(self.source, layer)}, path)

    def load(self) -> None:
        """load_file of each layer, and a copy into the cache."""
        for layer, path in enumerate(self.files()):
            part = safetensors.torch.load_file(path)["kv_cache"]
            self._part(self.target, layer).copy_(part)


class FsTier(Store):
    """The file I/O of vLLM's fs tier: one batched call, in C where the wheel has it."""

    direct = False

    def __init__(self, root: Path, source: np.ndarray, layers: int) -> None:
        """Import it; raises ImportError where vLLM has no such tier."""
        from vllm.v1.kv_offload.tiering.fs import io

        super().__init__(root, source, layers)
        self._io, nbytes = io, source.shape[1]
        self._offsets = [n * nbytes for n in range(len(source))]
        if self.direct and (nbytes % ALIGNMENT or not io.probe_o_direct(str(root))):
            raise RuntimeError("O_DIRECT is refused here, or chunks are not whole pages")

    def save(self) -> None:
        """batch_store_block."""
        view, nbytes = memoryview(self.source.reshape(-1)), self.source.shape[1]
        self._io.batch_store_block(self.files(), view, self._offsets, nbytes, self.direct)

    def load(self) -> None:
        """batch_load_block."""
        view, nbytes = memoryview(self.target.reshape(-1)), self.target.shape[1]
        self._io.batch_load_block(self.files(), view, self._offsets, nbytes, self.direct)


class FsTierDirect(FsTier):
    """The same past the page cache, as it does by default."""

    direct = True


KNOWN: dict[str, type[Store]] = {
    "raw, in the peers' process": Raw,
    "safetensors": Safetensors,
    "torch.save and load": TorchSave,
    "vLLM ExampleConnector's files": ExampleConnector,
    "vLLM fs tier": FsTier,
    "vLLM fs tier, O_DIRECT": FsTierDirect,
}
"""Those that cannot be made here say why when they are made."""
