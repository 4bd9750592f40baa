"""States of Mamba-like layers in vLLM's cache: which ones can be stored, and where they lie.

In vLLM's cache mode "align" a request's block table has one block per `block_size` tokens, as for
attention, and a step that ends behind token p leaves the state as of p in block (p - 1) //
block_size; what came before it is overwritten or freed. A step that goes on behind p computed
tokens takes it from that same block. So a state can be stored after a step that ends with a block,
and loaded into the block before the point where the computation goes on. (vLLM 0.32:
`mamba_utils.preprocess_mamba`, `MambaManager`, `Scheduler._mamba_block_aligned_split`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from vua.errors import InputError, LayoutError

__all__ = ["StatePages"]


class StatePages:
    """The states of one vLLM cache group's layers, addressed by a request's block table.

    ``caches`` are vLLM's tensors in model order, one page per block, ``[blocks, ...]`` of one byte
    per element, whose first ``nbytes`` bytes are the state. Threads may use one object at once on
    different blocks.
    """

    def __init__(self, caches: Sequence[Tensor], nbytes: int, block_size: int) -> None:
        """Find the pages. Raises LayoutError when they are none, or too small."""
        self._nbytes, self._block_size = nbytes, block_size
        self._pages = []
        for cache in caches:
            page = cache[0].numel() * cache.element_size() if cache.dim() > 1 else 0
            dense = page and cache[0].is_contiguous() and cache.element_size() == 1
            if cache.device.type != "cpu" or not dense or page < nbytes:
                msg = (
                    f"expected pages in CPU memory that hold a state of {nbytes} bytes, found "
                    f"{tuple(cache.shape)} {cache.dtype} {cache.stride()} on {cache.device}"
                )
                raise LayoutError(msg)
            flat = cache.detach().view(torch.uint8).flatten(1)
            self._pages.append(flat.numpy()[:, :nbytes])

    def gather(
        self,
        block_ids: Sequence[SupportsIndex],
        token_start: int,
        n_tokens: int,
        k_out: Tensor,
        v_out: Tensor | None,
    ) -> None:
        """Copy the states behind a chunk's last token out of the cache.

        Args:
            block_ids: the request's block table; its first block holds its first tokens.
            token_start: the chunk's first token.
            n_tokens: the tokens of a chunk.
            k_out: ``[1, layers, n_tokens, k_dim]`` of uint8, contiguous per layer: see
                `vua.format.states`.
            v_out: None.

        Raises InputError: the chunk does not end with a block that the table has.
        """
        block = self._block(block_ids, token_start + n_tokens)
        for page, row in zip(self._pages, _rows(k_out, self._nbytes), strict=True):
            row[: self._nbytes] = page[block]
            row[self._nbytes :] = 0

    def scatter(
        self,
        block_ids: Sequence[SupportsIndex],
        token_start: int,
        n_tokens: int,
        k_in: Tensor,
        v_in: Tensor | None,
    ) -> None:
        """Copy the states behind a chunk's last token into the cache: the inverse of `gather`."""
        block = self._block(block_ids, token_start + n_tokens)
        for page, row in zip(self._pages, _rows(k_in, self._nbytes), strict=True):
            page[block] = row[: self._nbytes]

    def scatter_chunks(
        self,
        block_ids: Sequence[SupportsIndex],
        token_start: int,
        n_tokens: int,
        skip: int,
        k_in: Tensor,
        v_in: Tensor | None,
    ) -> None:
        """Copy the states behind each of some chunks ``[chunks, 1, layers, tokens, k_dim]``.

        ``token_start`` is the first one's token after ``skip`` others, as in
        :meth:`vua.device.cpu_pages.PagedKV.scatter_chunks`.
        """
        size, stop = k_in.shape[3], token_start + n_tokens
        for number, chunk in enumerate(k_in):
            end = min(token_start - skip + (number + 1) * size, stop)
            self.scatter(block_ids, token_start, end - token_start, chunk, v_in)

    def _block(self, block_ids: Sequence[SupportsIndex], tokens: int) -> int:
        column, rest = divmod(tokens, self._block_size)
        if rest or not 0 < column <= len(block_ids):
            msg = (
                f"a state behind token {tokens}: expected a multiple of {self._block_size} and a "
                f"table as long, found {len(block_ids)} blocks"
            )
            raise InputError(msg)
        block = int(block_ids[column - 1])
        if not 0 < block < len(self._pages[0]):
            msg = f"block id {block} is not one of {len(self._pages[0])} blocks in use"
            raise InputError(msg)
        return block


def _rows(chunk: Tensor, nbytes: int) -> list[np.ndarray[Any, Any]]:
    """Each layer's state in a chunk's array ``[1, layers, tokens, k_dim]``, as one flat row."""
    data = chunk.numpy()
    if data.dtype != np.uint8 or data.ndim != 4 or len(data) != 1 or data[0, 0].size < nbytes:
        msg = f"expected a chunk with states of {nbytes} bytes, found {data.shape} {data.dtype}"
        raise LayoutError(msg)
    return [layer.reshape(-1) if layer.flags.c_contiguous else _refuse(layer) for layer in data[0]]


def _refuse(layer: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    msg = f"expected a state's rows without gaps, found strides {layer.strides}"
    raise LayoutError(msg)
