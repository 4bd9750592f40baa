"""What is moved: geometries of chunks, memory of each kind, and prompts with their keys."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from vua.device.buffers import StagingBuffer
from vua.format.keys import ChunkKey, KeyChain, token_ids
from vua.format.layout import KVLayout
from vua.native import MemoryMap, blocks_of
from vua.store.store import Store

Words = npt.NDArray[np.uint16]
Place = Literal["dense", "paged", "staged"]


@dataclass(frozen=True, slots=True)
class Case:
    """One geometry, in elements of 2 bytes."""

    name: str
    layout: KVLayout
    chunks: int
    block_tokens: int = 32

    @property
    def nbytes(self) -> int:
        """Payload of all chunks."""
        return self.chunks * self.layout.full.payload_nbytes(self.layout)


CASES: Final = (
    Case("256 KiB chunks", KVLayout(8, 2, 64, 64, "BF16", 64), 250),
    Case("2 MiB chunks", KVLayout(16, 4, 128, 128, "BF16", 64), 60),
    Case("8 MiB chunks", KVLayout(32, 8, 128, 128, "BF16", 64), 15),
    Case("32 MiB chunks", KVLayout(32, 8, 128, 128, "BF16", 256), 5),
)
"""From a small model's 64 tokens to 256 tokens of Llama-3-8B."""
TINY: Final = (Case("64 KiB chunks", KVLayout(4, 2, 32, 32, "BF16", 64), 6),)


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory for a case's chunks."""

    place: Place
    words: Words
    """All of it, as 2-byte words."""
    map: MemoryMap

    def tokens(self) -> Words:
        """Return ``[array, layer, head, token, dim]``, whatever the memory's own order."""
        words = self.words
        if self.place == "dense":
            return words
        if self.place == "staged":
            array = words.transpose(1, 3, 2, 0, 4, 5)
            return array.reshape(*array.shape[:3], -1, array.shape[-1])
        order = self.map.segment_offset[0] // np.uint64(words.strides[2])
        blocks = words[:, :, order].transpose(0, 1, 3, 2, 4, 5)
        return blocks.reshape(*blocks.shape[:3], -1, blocks.shape[-1])


def dense(layout: KVLayout, chunks: int) -> Memory:
    """One tensor ``[array, layer, head, token, dim]`` for the whole prefix: segments of a chunk."""
    tokens, dim = chunks * layout.chunk_tokens, layout.k_dim
    words = np.zeros((2, layout.layers, layout.kv_heads, tokens, dim), dtype=np.uint16)
    segments = np.arange(chunks, dtype=np.uint64) * np.uint64(layout.extent_nbytes[0])
    return Memory("dense", words, _map(words, segments, layout.chunk_tokens, words.strides[2]))


def paged(layout: KVLayout, chunks: int, block: int) -> Memory:
    """Blocks ``[array, layer, block, head, token, dim]`` in random order: segments of one block."""
    blocks, dim = chunks * layout.chunk_tokens // block, layout.k_dim
    words = np.zeros((2, layout.layers, blocks, layout.kv_heads, block, dim), dtype=np.uint16)
    table = np.random.default_rng(1).permutation(blocks).astype(np.uint64)
    segments = table * np.uint64(words.strides[2])
    return Memory("paged", words, _map(words, segments, block, words.strides[3]))


def staged(layout: KVLayout, chunks: int) -> Memory:
    """Chunk after chunk as the file has it, as in the buffers that adapters load through."""
    buffer = StagingBuffer(layout, layout.full, chunks)
    shape = (chunks, 2, layout.kv_heads, layout.layers, layout.chunk_tokens, layout.k_dim)
    return Memory("staged", buffer.bytes.view(np.uint16).reshape(shape), buffer.memory)


def make(place: Place, case: Case) -> Memory:
    """Return memory of one kind for a case."""
    if place == "paged":
        return paged(case.layout, case.chunks, case.block_tokens)
    return (dense if place == "dense" else staged)(case.layout, case.chunks)


def noise(case: Case) -> Memory:
    """Return dense memory full of random bits."""
    memory = dense(case.layout, case.chunks)
    random = np.random.default_rng(3)
    memory.words[:] = random.integers(0, 1 << 16, memory.words.shape, dtype=np.uint16)
    return memory


def _map(words: Words, segments: npt.NDArray[np.uint64], tokens: int, head: int) -> MemoryMap:
    layers = np.arange(words.shape[1], dtype=np.uint64) * np.uint64(words.strides[1])
    base = tuple(np.uint64(words.ctypes.data + a * words.strides[0]) + layers for a in range(2))
    return MemoryMap(base, (head, head), (segments, segments), tokens, words)


def keys_of(layout: KVLayout, chunks: int, seed: int = 2) -> list[ChunkKey]:
    """Return the keys of a prompt of random tokens, ``chunks`` of them."""
    ids = np.random.default_rng(seed).integers(0, 1 << 17, chunks * layout.chunk_tokens)
    return KeyChain(token_ids(ids), layout.chunk_tokens).first(chunks)


def file_rows(
    store: Store, memory: MemoryMap, chunks: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint8]]:
    """Return the iovecs ``[chunks, rows, 2]`` of whole files, and the headers they start with."""
    full = store.layout.full
    transfer = store.transfer(full, full, full, memory)
    headers = np.zeros((chunks, transfer.header_nbytes), dtype=np.uint8)
    rows = []
    for place, header in enumerate(headers):
        views = [header.data, *chain.from_iterable(blocks_of(transfer, place))]
        rows.append([(np.frombuffer(view, np.uint8).ctypes.data, len(view)) for view in views])
    return np.array(rows, dtype=np.uint64), headers


def file_path(root: str, store: Store, key: ChunkKey) -> str:
    """Return where a store in the directory ``root`` keeps the one file of a chunk."""
    return f"{root}/{key.name[:2]}/{key.name}/{store.layout.full.name}.safetensors"
