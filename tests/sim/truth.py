"""The fake model: its K/V and its next token are functions of the tokens before them.

So every slot of a cache has one right content, known without any attention. Values are finite and
normal bit patterns with 14 random bits each; two different prefixes agree in a slot by chance about
once in 2**14 per element, and a slot has hundreds of elements.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

Hashes = npt.NDArray[np.uint64]
"""One per token: the digest of all tokens up to and including it."""
Rows = npt.NDArray[np.int16]
_Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes K and V, ``[K and V, tokens, heads, dim]``, of one layer: (cache, slots, K and V)."""

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
    windows: tuple[int, ...] = (0, 0)
    """Per layer the tokens that it attends to, its own one included; 0 stands for all."""
    heads: int = 2
    dim: int = 64
    latent: bool = False
    """Whether K and V are one row (MLA)."""

    @property
    def kinds(self) -> dict[int, tuple[int, ...]]:
        """The layers of each window, those that attend to everything first."""
        number = range(len(self.windows))
        sizes = sorted(set(self.windows))
        return {size: tuple(n for n in number if self.windows[n] == size) for size in sizes}


MODELS: Final = ("full", "hybrid", "windowed", "latent", "two windows")


def make_shape(model: str, window: int) -> Shape:
    """One of `MODELS`, with layers of this window where it has any."""
    if model == "hybrid":  # three cache groups of two layers: one of full attention, two of windows
        return Shape((window, window, 0, window, window, 0), dim=32)
    if model == "two windows":
        return Shape((window + 32, 0, window))
    if model == "windowed":
        return Shape((window, window))
    return Shape(heads=1, dim=96, latent=True) if model == "latent" else Shape()


def rows(hashes: Hashes, shape: Shape, layers: Sequence[int]) -> Rows:
    """The K and V of tokens as bit patterns: ``[K and V, tokens, layers, heads, dim]``."""
    size = (1 if shape.latent else 2, 1, len(shape.windows), shape.heads, shape.dim)
    each = np.arange(np.prod(size), dtype=np.uint64).reshape(size)[:, :, list(layers)]
    factors = np.uint64(2) * each * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x5851F42D4C957F2D)
    mixed = (hashes ^ hashes >> np.uint64(29))[None, :, None, None, None] * (factors | np.uint64(1))
    return ((mixed >> np.uint64(50)) + np.uint64(_LOWEST)).astype(np.int16)


def first_read(position: int, window: int) -> int:
    """The first token that the token at ``position`` attends to."""
    return max(0, position - window + 1) if window > 0 else 0


class Cache:
    """A paged KV cache as vLLM's CPU worker allocates it, written by vLLM's own operators.

    The n-th layers of all cache groups share memory: a block belongs to one group at a time.
    """

    packed = True
    """False: plain rows, K then V, as on a GPU, instead of what the CPU's operators make."""

    def __init__(
        self, shape: Shape, groups: Sequence[Sequence[int]], blocks: int, block_size: int
    ) -> None:
        """Allocate ``blocks`` blocks; ``groups``: the layers of each cache group."""
        self.shape, self.groups, self.block_size = shape, groups, block_size
        page = (shape.heads, block_size, 2 * shape.dim)
        page = (block_size, shape.dim) if shape.latent else page
        size = (max(len(layers) for layers in groups), blocks, *page)
        self.memory = torch.zeros(size, dtype=torch.bfloat16)
        self._bits = self.memory.view(torch.int16).numpy()
        self._write_layer = self._latent_writer() if shape.latent else self._writer()

    def _writer(self) -> _Write:
        if not self.packed:
            size = self.block_size

            def write(cache: torch.Tensor, slots: torch.Tensor, kv: torch.Tensor) -> None:
                cache[slots // size, :, slots % size] = torch.cat([kv[0], kv[1]], dim=-1)

            return write
        from vllm.v1.attention.backends import cpu_attn

        isa = cpu_attn._get_attn_isa(torch.bfloat16, self.block_size, self.shape.dim)
        scales = {"_k_scale_float": 1.0, "_v_scale_float": 1.0}
        layer = SimpleNamespace(isa=isa, attn_type="decoder", kv_cache_dtype="auto", **scales)
        update: Any = cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update
        return lambda cache, slots, kv: update(layer, layer, kv[0], kv[1], cache, slots)

    def _latent_writer(self) -> _Write:
        from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

        update: Any = CPUMLAImpl.do_kv_cache_update
        rank = self.shape.dim - 32  # the rest is RoPE's part of the latent

        def write(cache: torch.Tensor, slots: torch.Tensor, kv: torch.Tensor) -> None:
            update(None, kv[0, :, 0, :rank], kv[0, :, :, rank:], cache, slots, "auto", None)

        return write

    @property
    def layers(self) -> dict[str, torch.Tensor]:
        return {
            layer_name(number): self.memory[at]
            for layers in self.groups
            for at, number in enumerate(layers)
        }

    def write(self, group: int, table: Sequence[int], start: int, hashes: Hashes) -> None:
        """Write tokens from ``start`` on, as the attention layers of a group do."""
        at = np.arange(start, start + len(hashes))
        slots = np.array(table)[at // self.block_size] * self.block_size + at % self.block_size
        self.write_rows(slots, rows(hashes, self.shape, self.groups[group]))

    def write_rows(self, slots: npt.NDArray[np.int64], values: Rows) -> None:
        """Write K and V, ``[K and V, tokens, layers, heads, dim]``, into slots."""
        kv, where = torch.from_numpy(values).view(torch.bfloat16), torch.from_numpy(slots)
        for number in range(values.shape[2]):
            self._write_layer(self.memory[number], where, kv[:, :, number].contiguous())

    def page(self, block: int) -> Rows:
        """A block's bits in all layers of the group it belongs to, layers first."""
        return self._bits[:, block]

    def poison(self, blocks: Sequence[int], pattern: int) -> None:
        """Overwrite blocks with a value that no token has."""
        self._bits[:, list(blocks)] = 0x7000 + pattern


class Oracle:
    """What the blocks of a cache group must hold."""

    def __init__(self, shape: Shape, layers: Sequence[int], block_size: int) -> None:
        """Learn which elements of a page belong to which slot from the operator itself."""
        self.block_size = block_size
        self._scratch = Cache(shape, [layers], 1, block_size)
        self._pages: dict[int, Rows] = {}
        values = rows(np.zeros(block_size, dtype=np.uint64), shape, layers)
        values[:] = np.arange(block_size)[None, :, None, None, None] + _LOWEST
        self._scratch.write_rows(np.arange(block_size), values)
        self._owner = self._scratch.page(0).copy() - _LOWEST

    def wrong_block(
        self, cache: Cache, table: Sequence[int], hashes: Hashes, first: int
    ) -> int | None:
        """The index of the first block with a wrong value among tokens ``first`` and following.

        ``hashes`` are those of all tokens from the start of the prompt on.
        """
        for index in range(first // self.block_size, -(-len(hashes) // self.block_size)):
            mine = hashes[index * self.block_size : (index + 1) * self.block_size]
            skipped = first - index * self.block_size
            if index >= len(table) or not self._holds(cache.page(table[index]), mine, skipped):
                return index
        return None

    def _holds(self, page: Rows, hashes: Hashes, skipped: int) -> bool:
        held, last = len(hashes), int(hashes[-1])
        expected = self._pages.get(last) if held == self.block_size else None
        if expected is None:
            self._scratch.write(0, [0], 0, hashes)
            expected = self._scratch.page(0)
            if held == self.block_size:
                expected = self._pages[last] = expected.copy()
        if held == self.block_size and skipped <= 0:
            return np.array_equal(page, expected)
        mine = (self._owner >= skipped) & (self._owner < held)
        return not ((page != expected) & mine).any()


def layer_name(number: int) -> str:
    return f"model.layers.{number}.self_attn.attn"
