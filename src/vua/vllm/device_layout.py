"""Which of the known layouts a layer's tensor in GPU memory has, from its shape alone.

vLLM describes its tensors nowhere. What it registers is the logical order of axes; another order in
memory (HND, blocks of all layers) shows in the strides only, which `vua.device` takes as they are.
"""

from __future__ import annotations

from vua.errors import LayoutError

__all__ = ["axes_of"]


def axes_of(shape: tuple[int, ...], *, heads: int, block_size: int, dims: tuple[int, ...]) -> str:
    """Return the axes of a layer's tensor, see `vua.device.KNOWN_AXES`.

    Args:
        shape: the tensor's shape.
        heads: KV heads that this worker holds.
        block_size: tokens per block of vLLM's tables; kernels may use smaller pages that divide it.
        dims: elements of a row of K and of V, or of the one latent.

    Where a page has as many slots as there are heads, the order that vLLM's GPU backends of that
    shape have is taken: slots before heads in ``[2, ...]`` and ``[blocks, 2, ...]``, heads before
    slots in ``[blocks, heads, slots, K and V]``.

    Raises:
        LayoutError: No known layout fits, or K and V could be in either of two places.
    """
    found = [
        axes
        for axes, sizes in _shapes(heads, dims)
        if len(shape) == len(axes)
        and all(size in (None, want) for size, want in zip(sizes, shape, strict=True))
        and shape[axes.index("N")] > 0
        and block_size % shape[axes.index("N")] == 0
    ]
    if len(found) > 1 and found[0][:2] == found[1][:2]:
        found = found[:1]  # as many slots as heads, see above
    if len(found) != 1:
        text = "more than one known layout" if found else "no known layout"
        raise LayoutError(
            f"a KV cache tensor of shape {shape} fits {text} of {heads} heads, rows of {dims} and "
            f"blocks of {block_size} tokens: this worker's engine is served uncached"
        )
    return found[0]


def _shapes(heads: int, dims: tuple[int, ...]) -> list[tuple[str, tuple[int | None, ...]]]:
    """The layouts that a cache of these rows can have, with the sizes that are known."""
    if len(dims) == 1:
        return [("BND", (None, None, dims[0])), ("BHND", (None, 1, None, dims[0]))]
    fused = ("BHNC", (None, heads, None, sum(dims)))
    if dims[0] != dims[1]:
        return [fused]
    dim = dims[0]
    return [
        fused,
        ("2BNHD", (2, None, None, heads, dim)),
        ("2BHND", (2, None, heads, None, dim)),
        ("B2NHD", (None, 2, None, heads, dim)),
        ("B2HND", (None, 2, heads, None, dim)),
    ]
