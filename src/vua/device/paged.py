"""Where an engine's paged KV cache keeps the rows of K and V, for every layout in use.

A *row* is one token's K (or V) of one head of one layer: ``dim`` elements, contiguous but in the
pages of some CPU backends. A *slot* is one token's place, ``block id * block_size + index in the
block``. A layout is named by the *axes* of the engine's tensor, one letter each, in the order of
its shape::

    L  layers (absent if there is one tensor per layer)
    B  blocks (absent if the cache is one long array of slots)
    2  K, then V
    N  slots of a block
    H  KV heads (absent for one head, as in MLA)
    D  the elements of a row
    C  the elements of K's row, then V's

Strides are the tensor's own, so one name covers every order and padding in memory. Nothing here
moves a byte; `vua.device.copy` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, SupportsIndex, TypeAlias

import numpy as np
import torch
from torch import Tensor

from vua.errors import InputError, LayoutError

KNOWN_AXES: Final = {
    "BHNC": "vLLM: [blocks, heads, block_size, k_dim + v_dim]",
    "LBHNC": "vLLM 0.29 and later, all layers, in the allocation's order",
    "2BNHD": "K before V, as LMCache's connectors read: [2, blocks, block_size, heads, dim]",
    "2BHND": "the same, HND",
    "B2NHD": "K and V of a block together: [blocks, 2, block_size, heads, dim]",
    "B2HND": "the same, HND",
    "BND": "MLA: [blocks, block_size, latent]; one array, no V",
    "BHND": "MLA as of vLLM 0.29, [blocks, 1, block_size, latent]; of a (K, V) pair: HND",
    "BNHD": "a (K, V) pair of [blocks, block_size, heads, dim] per layer",
    "NHD": "a (K, V) pair of [slots, heads, dim] per layer, as in SGLang",
}
"""Layouts that engines are known to use; any other sensible order of the letters works, too."""

WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Element types by size for copying: an integer is never rounded, flushed or quieted."""

_Layers: TypeAlias = Tensor | Sequence[Tensor] | Sequence[Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Rows:
    """Strides of K's or V's rows of one layer, in elements of the engine's tensor."""

    offset: int
    """From the tensor's first element to the row of head 0 in slot 0 of block 0."""
    block: int
    slot: int
    head: int
    dim: int
    step: int = 1
    """From one element of a row to the next, where a CPU backend packs pages; 0: it varies."""


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """One layer's blocks: sizes, and where K and V are. Checked when it is made."""

    blocks: int
    block_size: int
    """Slots of a block."""
    heads: int
    arrays: tuple[Rows, ...]
    """K and V, or the one latent that stands for both."""

    def __post_init__(self) -> None:
        """Refuse what no cache can have. Raises LayoutError."""
        if min(self.blocks, self.block_size, self.heads) < 1 or len(self.arrays) not in (1, 2):
            raise LayoutError(f"a paged cache needs blocks, slots, heads and K; found {self}")
        for name, rows in zip("KV", self.arrays, strict=False):
            steps = {"block": (self.blocks, rows.block), "slot": (self.block_size, rows.slot)}
            steps["head"] = (self.heads, rows.head)
            for axis, (size, stride) in steps.items():
                if size > 1 and rows.step == 1 and stride < rows.dim:
                    raise LayoutError(
                        f"{name}: one {axis} lies {stride} elements after the other, but a row has "
                        f"{rows.dim}; expected rows that do not overlap"
                    )
            if rows.dim < 1 or rows.offset < 0:
                raise LayoutError(f"{name}: expected rows of at least one element, found {rows}")

    @classmethod
    def of(
        cls, shape: Sequence[int], stride: Sequence[int], axes: str, k_dim: int | None = None
    ) -> PagedLayout:
        """Describe a layer's tensor by its shape, its strides in elements, and its axes.

        ``k_dim`` says how many elements of axis C are K's (by default half of them).

        >>> PagedLayout.of((9, 2, 16, 8), (256, 128, 8, 1), "BHNC").arrays[1]
        Rows(offset=4, block=256, slot=8, head=128, dim=4, step=1)
        """
        if (
            len(set(axes)) != len(axes)
            or not set(axes) <= set("B2NHDC")
            or "N" not in axes
            or ("D" in axes) == ("C" in axes)
            or ("2" in axes and "D" not in axes)
        ):
            known = ", ".join(KNOWN_AXES)
            raise LayoutError(
                f"axes {axes!r} do not describe a paged cache; known ones are {known}"
            )
        if len(shape) != len(axes):
            raise LayoutError(f"shape {tuple(shape)} has not the {len(axes)} axes {axes!r}")
        size, step = dict(zip(axes, shape, strict=True)), dict(zip(axes, stride, strict=True))
        inner = "C" if "C" in axes else "D"
        if step[inner] != 1 or size.get("2", 2) != 2:
            raise LayoutError(
                f"shape {tuple(shape)}, strides {tuple(stride)} for axes {axes!r}: expected 2 in "
                f"axis 2, and rows without gaps (stride 1 in axis {inner})"
            )
        places = [(0, size[inner])]
        if inner == "C":
            cut = size["C"] // 2 if k_dim is None else k_dim
            places = [(0, cut), (cut, size["C"] - cut)]
        elif "2" in axes:
            places.append((step["2"], size["D"]))
        steps = {"block": step.get("B", 0), "slot": step["N"], "head": step.get("H", 0)}
        rows = tuple(Rows(offset=at, dim=dim, **steps) for at, dim in places)
        return cls(size.get("B", 1), size["N"], size.get("H", 1), rows)

    @property
    def slots(self) -> int:
        return self.blocks * self.block_size

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(rows.dim for rows in self.arrays)

    def view(self, tensor: Tensor, array: int) -> Tensor:
        """Return the rows of one array in a layer's tensor, ``[blocks, slots, heads, dim]``."""
        rows = self.arrays[array]
        return tensor.as_strided(
            (self.blocks, self.block_size, self.heads, rows.dim),
            (rows.block, rows.slot, rows.head, rows.step),
            int(tensor.storage_offset()) + rows.offset,
        )


class PagedCache:
    """An engine's paged KV cache: some layers of one layout. Never copies it, and keeps it alive.

    Immutable; threads may share it as long as they move different tokens.

    >>> layers = [torch.zeros(2, 9, 16, 4, 8) for _ in range(3)]
    >>> cache = PagedCache.of(layers, "2BNHD")
    >>> cache.layers, cache.layout.heads, cache.layout.dims
    (3, 4, (8, 8))
    """

    def __init__(self, arrays: Sequence[Sequence[Tensor]], layout: PagedLayout) -> None:
        """Use ``arrays[K, V][layer]``, each ``[blocks, slots, heads, dim]``; see :meth:`of`."""
        first = arrays[0][0]
        self.layout, self.layers = layout, len(arrays[0])
        self.itemsize, self.device = first.element_size(), first.device
        word = WORDS[self.itemsize]
        self.arrays = tuple(tuple(t.detach().view(word) for t in array) for array in arrays)
        """``[K, V][layer]``: the rows as integers, ``[blocks, slots, heads, dim]``."""
        places = [[t.data_ptr() for t in array] for array in self.arrays]
        self.table = torch.tensor(places, dtype=torch.int64).to(self.device)
        """Addresses of the first rows, ``[arrays, layers]``, on the cache's device."""
        lengths = [(r, r.dim if r.step == 1 else 1) for r in layout.arrays]
        steps = [s for r, length in lengths for s in (r.block, r.slot, r.head, length)]
        steps += [int(t.storage_offset()) for array in self.arrays for t in array]
        flat = [place for array in places for place in array]
        self.alignment = math.gcd(*(step * self.itemsize for step in steps), *flat)
        """The largest number of bytes that divides all addresses and lengths."""

    @classmethod
    def of(cls, layers: _Layers, axes: str, *, k_dim: int | None = None) -> PagedCache:
        """Describe a cache by its tensors and their axes.

        ``layers`` is one tensor per layer; or one (K, V) pair per layer, each with these axes (one
        of ``2`` and ``C`` less); or one tensor of all layers, with an axis ``L``. Any dtype of 1,
        2, 4 or 8 bytes, on any device.

        Raises:
            LayoutError: The tensors differ from each other or do not have these axes.
        """
        if isinstance(layers, Tensor):
            if "L" not in axes or layers.dim() != len(axes):
                raise LayoutError(
                    f"one tensor of shape {tuple(layers.shape)} for axes {axes!r}: expected an "
                    "axis L, or a list with a tensor per layer"
                )
            layers, axes = layers.unbind(axes.index("L")), axes.replace("L", "")
        if layers and not isinstance(layers[0], Tensor):
            return cls._of_pairs([tuple(pair) for pair in layers], axes)
        tensors = [layer for layer in layers if isinstance(layer, Tensor)]
        layout = _alike(tensors, axes, k_dim)
        return cls([[layout.view(t, a) for t in tensors] for a in range(len(layout.dims))], layout)

    @classmethod
    def _of_pairs(cls, pairs: Sequence[tuple[Tensor, ...]], axes: str) -> PagedCache:
        if {"2", "C"} & set(axes) or any(len(pair) != 2 for pair in pairs):
            raise LayoutError(f"axes {axes!r} for tuples: expected pairs (K, V) with an axis D")
        columns = list(zip(*pairs, strict=True))
        k, v = (_alike(column, axes, None) for column in columns)
        kinds = {(t.dtype, t.device) for t in pairs[0]}
        if (k.blocks, k.block_size, k.heads) != (v.blocks, v.block_size, v.heads) or len(kinds) > 1:
            raise LayoutError(
                f"K and V differ in blocks, slots, heads, dtype or device: {k}, {v}, {kinds}"
            )
        arrays = [[p.view(t, 0) for t in c] for p, c in zip((k, v), columns, strict=True)]
        return cls(arrays, replace(k, arrays=(*k.arrays, *v.arrays)))


def _alike(tensors: Sequence[Tensor], axes: str, k_dim: int | None) -> PagedLayout:
    found = {(tuple(t.shape), t.stride(), t.dtype, t.device) for t in tensors}
    if len(found) != 1:
        kinds = ", ".join(sorted(map(str, found))) or "none"
        raise LayoutError(f"expected layers of one shape, strides, dtype and device; found {kinds}")
    shape, stride, dtype, _ = found.pop()
    if dtype.itemsize not in WORDS:
        raise LayoutError(f"elements of {dtype} have {dtype.itemsize} bytes; expected {[*WORDS]}")
    return PagedLayout.of(shape, stride, axes, k_dim)


def slots_of(
    block_ids: Sequence[SupportsIndex],
    block_size: int,
    start: int,
    stop: int,
    *,
    wanted: tuple[int, int] | None = None,
) -> Tensor:
    """Return the slots of a request's tokens ``start`` to ``stop``, int64 ``[stop - start]``.

    Block ``block_ids[i]`` holds the tokens from ``i * block_size`` on. Tokens outside ``wanted``
    get slot -1, which moves skip, and need no block; so a batch of whole chunks can begin and end
    anywhere.

    Raises:
        InputError: A wanted token has no block.

    >>> slots_of([7, 3], 4, 0, 8, wanted=(2, 6)).tolist()
    [-1, -1, 30, 31, 12, 13, -1, -1]
    """
    first, last = wanted or (start, stop)
    held = len(block_ids) * block_size
    if block_size < 1 or not 0 <= start <= stop:
        raise InputError(f"tokens {start}..{stop} in blocks of {block_size} are not a range")
    token = np.arange(start, stop, dtype=np.int64)
    inside = (token >= first) & (token < last)
    if inside.any() and (first < 0 or min(last, stop) > held):
        raise InputError(f"tokens {first}..{last} are not in a table of {held} tokens")
    slots = np.full(len(token), -1, dtype=np.int64)
    block, slot = np.divmod(token[inside], block_size)
    low, high = (int(block[0]), int(block[-1]) + 1) if len(block) else (0, 0)
    ids = np.array([int(i) for i in block_ids[low:high]], dtype=np.int64)[block - low]
    if ids.size and ids.min() < 0:
        raise InputError(f"block id {ids.min()} is negative: these tokens have no block")
    slots[inside] = ids * block_size + slot
    return torch.from_numpy(slots)
