"""The fake model: its K/V and its next token are functions of the tokens before them.

So every slot of a cache has one right content, known without any attention. Values are finite and
normal bit patterns with 14 random bits each; two different prefixes agree in a slot by chance about
once in 2**14 per element, and a slot has hundreds of elements.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

Hashes = npt.NDArray[np.uint64]
"""One per token: the digest of all tokens up to and including it."""
Rows = npt.NDArray[np.int16]

VOCABULARY: Final = 400
_MASK: Final = (1 << 64) - 1
_MULTIPLIER: Final = 6364136223846793005
_LOWEST: Final = 0x0400  # the smallest normal float16; finite and normal as bfloat16 as well


def extend(digest: int, tokens: Sequence[int]) -> list[int]:
    """The digests after each of ``tokens``, which follow a prefix of digest ``digest``."""
    digests = []
    for token in tokens:
        digest = ((digest ^ digest >> 31) * _MULTIPLIER + 2 * token + 1) & _MASK
        digests.append(digest)
    return digests


def next_token(digest: int) -> int:
    """What the model says after a prefix."""
    return 5 + (digest >> 24) % VOCABULARY


class Chain:
    """A prompt and what the model says after it, for ever."""

    def __init__(self, prompt: Sequence[int], salt: str | None) -> None:
        """Begin with a prompt; prompts of different salts have nothing in common."""
        self.prompt, self.salt = list(prompt), salt
        self._tokens = list(prompt)
        self._digests = extend(zlib.crc32((salt or "").encode()) << 32, prompt)

    def _grow(self, count: int) -> None:
        while len(self._tokens) < count:
            self._tokens.append(next_token(self._digests[-1]))
            self._digests += extend(self._digests[-1], self._tokens[-1:])

    def tokens(self, start: int, stop: int) -> list[int]:
        """The tokens from ``start`` to ``stop``."""
        self._grow(stop)
        return self._tokens[start:stop]

    def hashes(self, start: int, stop: int, drafts: Sequence[int] = ()) -> Hashes:
        """The digests of tokens ``start`` to ``stop``, then of ``drafts`` after them."""
        self._grow(stop)
        digests = self._digests[start:stop]
        if drafts:
            digests = digests + extend(self._digests[stop - 1], drafts)
        return np.array(digests, dtype=np.uint64)


@dataclass(frozen=True)
class Shape:
    """The model's KV cache."""

    layers: int = 2
    heads: int = 2
    dim: int = 64


SHAPE: Final = Shape()


def rows(hashes: Hashes, shape: Shape = SHAPE) -> Rows:
    """The K and V of tokens as bit patterns: ``[K and V, tokens, layers, heads, dim]``."""
    size = (2, 1, shape.layers, shape.heads, shape.dim)
    each = np.arange(np.prod(size), dtype=np.uint64).reshape(size) * np.uint64(2)
    factors = each * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x5851F42D4C957F2D)
    mixed = (hashes ^ hashes >> np.uint64(29))[None, :, None, None, None] * (factors | np.uint64(1))
    return ((mixed >> np.uint64(50)) + np.uint64(_LOWEST)).astype(np.int16)


class Cache:
    """A paged KV cache as vLLM's CPU worker allocates it, written by vLLM's own operator."""

    def __init__(self, blocks: int, block_size: int, shape: Shape = SHAPE) -> None:
        """Allocate ``blocks`` blocks, one allocation for all layers."""
        from vllm.v1.attention.backends import cpu_attn

        self.shape, self.block_size = shape, block_size
        size = (shape.layers, blocks, shape.heads, block_size, 2 * shape.dim)
        self.memory = torch.zeros(size, dtype=torch.bfloat16)
        self._bits = self.memory.view(torch.int16).numpy()
        isa = cpu_attn._get_attn_isa(torch.bfloat16, block_size, shape.dim)
        scales = {"_k_scale_float": 1.0, "_v_scale_float": 1.0}
        self._layer = SimpleNamespace(isa=isa, attn_type="decoder", kv_cache_dtype="auto", **scales)
        self._update: Any = cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update

    @property
    def layers(self) -> dict[str, torch.Tensor]:
        """The tensors as vLLM registers them."""
        return {f"model.layers.{n}.self_attn.attn": part for n, part in enumerate(self.memory)}

    def write(self, table: Sequence[int], start: int, hashes: Hashes) -> None:
        """Write tokens from ``start`` on, as the attention layers do."""
        at = np.arange(start, start + len(hashes))
        slots = np.array(table)[at // self.block_size] * self.block_size + at % self.block_size
        self.write_rows(slots, rows(hashes, self.shape))

    def write_rows(self, slots: npt.NDArray[np.int64], values: Rows) -> None:
        """Write K and V, ``[K and V, tokens, layers, heads, dim]``, into slots."""
        k, v = torch.from_numpy(values).view(torch.bfloat16)
        where = torch.from_numpy(slots)
        for number, layer in enumerate(self.memory):
            mine = (k[:, number].contiguous(), v[:, number].contiguous())
            self._update(self._layer, self._layer, *mine, layer, where)

    def page(self, block: int) -> Rows:
        """A block's bits in all layers: ``[layers, heads, block_size, width]``."""
        return self._bits[:, block]

    def poison(self, blocks: Sequence[int], pattern: int) -> None:
        """Overwrite blocks with a value that no token has."""
        self._bits[:, list(blocks)] = 0x7000 + pattern


class Oracle:
    """What the blocks of a cache must hold."""

    def __init__(self, block_size: int, shape: Shape = SHAPE) -> None:
        """Learn which elements of a page belong to which slot from the operator itself."""
        self.block_size = block_size
        self._scratch = Cache(1, block_size, shape)
        self._pages: dict[int, Rows] = {}
        number = np.arange(block_size, dtype=np.int16)[None, :, None, None, None]
        size = (2, block_size, shape.layers, shape.heads, shape.dim)
        owners = np.broadcast_to(number + np.int16(_LOWEST), size)
        self._scratch.write_rows(np.arange(block_size), np.ascontiguousarray(owners))
        self._owner = self._scratch.page(0).copy() - _LOWEST

    def wrong_block(self, cache: Cache, table: Sequence[int], hashes: Hashes) -> int | None:
        """The index of the first block whose first ``len(hashes)`` tokens are not these."""
        for index in range(-(-len(hashes) // self.block_size)):
            mine = hashes[index * self.block_size : (index + 1) * self.block_size]
            if index >= len(table) or not self._holds(cache.page(table[index]), mine):
                return index
        return None

    def _holds(self, page: Rows, hashes: Hashes) -> bool:
        held, last = len(hashes), int(hashes[-1])
        expected = self._pages.get(last) if held == self.block_size else None
        if expected is None:
            self._scratch.write([0], 0, hashes)
            expected = self._scratch.page(0)
        if held < self.block_size:
            return not ((page != expected) & (self._owner < held)).any()
        if last not in self._pages:
            self._pages[last] = expected.copy()
        return np.array_equal(page, expected)
