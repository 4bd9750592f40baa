"""The memory layouts of K and V in SGLang's host pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from vua.connector.cache_spec import UncachedError
from vua.device.cpu_pages import PagedKV, latent_form
from vua.errors import InputError, LayoutError

__all__ = ["HostPages"]

_PAIRS: Final = {
    "layer_first": "LTHD",
    "page_first": "TLHD",
    "page_first_direct": "PLSHD",
    "page_head": "PHSLD",
    "page_unified": "PGLSHD",
}
"""Axes of K, and of V, by the layout's name: pages P of slots S, or tokens T (both in one); layers,
heads H (in groups G), and the elements D of a row."""
_LATENT: Final = {
    "layer_first": "LTHD",
    "page_first": "TLHD",
    "page_first_direct": "PLSHD",
    "page_unified": "PLSD",
}
"""The same of one latent (MLA)."""


class HostPages:
    """The pages of one host pool, of K and V or of one latent.

    Copies whole pages only. Threads may use it at once for different pages. Raises UncachedError
    for a pool of unknown form.
    """

    def __init__(self, pool: Any, *, latent: bool) -> None:
        """Inspect ``pool``, an ``MHATokenToKVPoolHost`` or an ``MLATokenToKVPoolHost``."""
        arrays = _arrays(pool, latent=latent)
        axes = (_LATENT if latent else _PAIRS)[pool.layout]
        self.page_tokens: int = pool.page_size
        self._pages: int = pool.page_num
        try:
            self._parts = [
                PagedKV(
                    _layers(array, axes, self.page_tokens),
                    latent_form(self.page_tokens, array.shape[-1]),
                    self.page_tokens,
                )
                for array in arrays
            ]
        except (LayoutError, RuntimeError) as problem:  # RuntimeError: torch cannot view it so
            msg = f"the host pool's layout {pool.layout!r} has an unknown form: {problem}"
            raise UncachedError(msg) from problem

    def numbers(self, host_indices: torch.Tensor, pages: int) -> npt.NDArray[np.int64]:
        """Return the numbers of the pages whose token slots ``host_indices`` names, in order.

        Raises InputError: these are not ``pages`` whole pages of the pool.
        """
        slots = host_indices.numpy().astype(np.int64, copy=False)
        size = self.page_tokens
        if slots.shape != (pages * size,):
            raise InputError(f"{slots.shape} slots for {pages} pages of {size} tokens")
        found = slots[::size] // size
        expected = (found[:, None] * size + np.arange(size)).ravel()
        if not np.array_equal(slots, expected) or not np.all((found >= 0) & (found < self._pages)):
            raise InputError("the slots are not whole pages of the host pool")
        return found

    def gather(self, page: int, arrays: Sequence[torch.Tensor]) -> None:
        """Copy a page into K and V of a chunk, ``[heads, layers, tokens, dim]`` each."""
        for part, array in zip(self._parts, arrays, strict=True):
            part.gather([page], 0, self.page_tokens, array, None)

    def scatter(self, pages: Sequence[int], arrays: Sequence[torch.Tensor]) -> None:
        """Copy K and V of chunks into pages, ``[chunks, heads, layers, tokens, dim]`` each."""
        tokens = len(pages) * self.page_tokens
        for part, array in zip(self._parts, arrays, strict=True):
            part.scatter_chunks(pages, 0, tokens, 0, array, None)


def _arrays(pool: Any, *, latent: bool) -> list[torch.Tensor]:
    """Return the pool's tensors of K and of V, or the one of latents. Raises UncachedError."""
    known = _LATENT if latent else _PAIRS
    if pool.layout not in known:
        msg = f"host memory layout {pool.layout!r} is not supported; use one of {', '.join(known)}"
        raise UncachedError(msg)
    if pool.kv_buffer is None:
        msg = "this rank has no host pages of its own, which is not supported"
        raise UncachedError(msg)
    if latent:
        return [pool.kv_buffer]
    if pool.layout == "page_unified":
        return [pool.kv_buffer[:, :, :, at] for at in range(2)]
    return [pool.k_buffer, pool.v_buffer]


def _layers(array: torch.Tensor, axes: str, page_tokens: int) -> list[torch.Tensor]:
    """Return each layer of K, V or latents as ``[pages, heads, slots, dim]``, not copied."""
    if "T" in axes:
        at = axes.index("T")
        array = array.view(*array.shape[:at], -1, page_tokens, *array.shape[at + 1 :])
        axes = axes.replace("T", "PS")
    if "H" not in axes:
        array, axes = array.unsqueeze(-2), axes.replace("D", "HD")
    if "G" not in axes:
        array, axes = array.unsqueeze(0), "G" + axes
    array = array.permute([axes.index(axis) for axis in "LPGHSD"])
    layers, pages, groups, heads, slots, dim = array.shape
    return list(array.view(layers, pages, groups * heads, slots, dim).unbind(0))
