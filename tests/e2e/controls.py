"""For negative controls: valid files whose K/V are noise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from e2e.damage import CHUNK, chunk_files
from helpers import save_chunk
from vua.device.buffers import StagingBuffer
from vua.format.keys import KeyChain, token_ids
from vua.storage.description import descriptions
from vua.store.namespace import Namespace


def store_noise(root: Path, other: Path, prompts: Iterable[Sequence[int]]) -> None:
    """Fill a new directory with noise for each chunk of the prompts.

    Args:
        root: a directory in which an engine has stored something: whose noise it is to be.
        other: the new directory.
        prompts: token ids.
    """
    other.mkdir()
    for prompt in prompts:
        _store_noise(root, other, prompt)


def exchange_for_noise(root: Path, prompt: Sequence[int]) -> None:
    """Put noise in the place of each chunk of a prompt, in the directory itself."""
    for at in range(len(prompt) // CHUNK):
        for path in chunk_files(root, prompt, at):
            path.unlink()
    _store_noise(root, root, prompt)


def _store_noise(root: Path, other: Path, prompt: Sequence[int]) -> None:
    (found,) = descriptions(root)
    assert found.identity is not None
    chance = torch.Generator().manual_seed(0)
    for store in Namespace.create(other, found.identity, found.layouts).stores:
        buffer = StagingBuffer(store.layout, store.layout.full, 1)
        noise = 8 * torch.randn(len(buffer.bytes) // 2, generator=chance)
        buffer.bytes[:] = noise.bfloat16().view(torch.uint8).numpy()  # finite as float32, too
        for key in KeyChain(token_ids(prompt), CHUNK).first(len(prompt) // CHUNK):
            save_chunk(store, key, buffer.memory)
