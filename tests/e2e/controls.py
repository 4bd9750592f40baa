"""For negative controls: valid files whose K/V are noise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from e2e.damage import CHUNK, chunk_files
from helpers import save_chunk
from vua.device.buffers import StagingBuffer
from vua.format.keys import KeyChain, token_ids
from vua.storage.description import descriptions
from vua.store.namespace import Namespace


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
