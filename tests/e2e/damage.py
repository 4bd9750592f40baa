"""What can happen to a stored chunk behind VUA's back."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from helpers import save_chunk
from vua.device.buffers import StagingBuffer
from vua.format.keys import KeyChain, token_ids
from vua.storage.description import descriptions
from vua.store.namespace import Namespace

CHUNK = 64


def stored(root: Path) -> list[Path]:
    found = root.glob("*/??/*/*.safetensors")
    return sorted(path for path in found if len(path.parent.name) == 64)


def chunk_files(root: Path, prompt: Sequence[int], index: int) -> list[Path]:
    """The files of one chunk of a prompt, one per shard."""
    name = KeyChain(token_ids(prompt), CHUNK)[index].name
    return [path for path in stored(root) if path.parent.name == name]


def flip(path: Path) -> None:
    """Invert one bit in the last quarter of a file."""
    data = bytearray(path.read_bytes())
    data[-len(data) // 4] ^= 0x10
    path.write_bytes(data)


def blank(path: Path) -> None:
    """Zero the last quarter of a file; doing it twice changes nothing more."""
    with path.open("r+b") as stream:
        size = path.stat().st_size
        stream.seek(size - size // 4)
        stream.write(bytes(size // 4))


def truncate(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size // 2)


def vanish(path: Path) -> None:
    shutil.rmtree(path.parent, ignore_errors=True)


STRIKES: dict[str, Callable[[Path], None]] = {
    "blank": blank,
    "truncate": truncate,
    "vanish": vanish,
}
"""What may strike while an engine runs."""


def exchange_for_noise(root: Path, prompt: Sequence[int], chunks: Sequence[int] = ()) -> None:
    """Put noise in the place of these chunks of a prompt, or of all, in the directory itself."""
    chunks = chunks or range(len(prompt) // CHUNK)
    for at in chunks:
        for path in chunk_files(root, prompt, at):
            path.unlink()
    (found,) = descriptions(root)
    assert found.identity is not None
    chance = torch.Generator().manual_seed(0)
    for store in Namespace.create(root, found.identity, found.layouts).stores:
        buffer = StagingBuffer(store.layout, store.layout.full, 1)
        noise = 8 * torch.randn(len(buffer.bytes) // 2, generator=chance)
        buffer.bytes[:] = noise.bfloat16().view(torch.uint8).numpy()  # finite as float32, too
        for at in chunks:
            save_chunk(store, KeyChain(token_ids(prompt), CHUNK)[at], buffer.memory)
