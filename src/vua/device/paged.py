"""Where an engine's paged KV cache keeps the rows of K and V; copies between them and chunks.

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

Strides are the tensor's own, so one name covers every order and padding in memory.

A chunk array is ``[chunks, heads, layers, tokens, dim]``, K and V separate, as in a
`vua.device.buffers.StagingBuffer`. `plan` checks a move's arguments. `move`, PyTorch's way, is the
reference for the others, and their fallback.

`PagedKV` is a cache whose pages an engine's CPU backend packs in a way of its own (`PageForm`),
addressed by block tables. It copies exactly the bytes of the given tokens, with any bit patterns,
and writes nothing else. There are no locks: the caller, a connector's worker, ensures that the same
tokens are not written meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Final, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vua.errors import InputError, LayoutError

if TYPE_CHECKING:
    from vua.native import MemoryMap  # not needed on a GPU

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

_Ids: TypeAlias = Sequence[SupportsIndex]
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
    block_ids: _Ids,
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


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A move with checked arguments. Made only by `plan`."""

    cache: PagedCache
    slots: Tensor
    """int64 ``[chunks, tokens]`` on the cache's device; negative: the token is skipped."""
    chunks: tuple[Tensor, ...]
    """Per array: words ``[chunks, heads, layers, tokens, words]``."""
    alignment: int
    """Bytes that divide every address and stride on both sides."""

    @property
    def word(self) -> torch.dtype:
        return self.chunks[0].dtype


Move: TypeAlias = Callable[..., None]
"""``move(job, store=...)``: makes it, into the cache (``store``) or out of it."""


def plan(cache: PagedCache, slots: Tensor, k: Tensor, v: Tensor | None) -> Job:
    """Check a move's arguments, and choose the widest word that fits all of them.

    Reading slots on a GPU waits for it; those in host memory are checked at once.

    Raises:
        LayoutError: The chunk arrays do not fit the cache.
        InputError: The slots do not fit either of them.
    """
    given = (k,) if v is None else (k, v)
    layout = cache.layout
    if len(given) != len(layout.arrays):
        has, asked = ("K and V", "K alone") if len(given) == 1 else ("one latent", "K and V")
        raise LayoutError(f"the cache holds {has}, the chunk {asked}")
    chunks = [t.detach().unsqueeze(0) if t.dim() == 4 else t.detach() for t in given]
    count, tokens = (chunks[0].shape[0], chunks[0].shape[-2]) if chunks[0].dim() == 5 else (0, 0)
    for name, chunk, dim in zip("KV", chunks, layout.dims, strict=False):
        wanted = (count, layout.heads, cache.layers, tokens, dim)
        if tuple(chunk.shape) != wanted or chunk.element_size() != cache.itemsize:
            raise LayoutError(
                f"{name} is {tuple(chunk.shape)} with {chunk.element_size()} bytes per element; "
                f"expected [chunks, heads, layers, tokens, dim] = {wanted} with {cache.itemsize}"
            )
        if chunk.device != cache.device or (dim > 1 and chunk.stride(-1) != 1):
            raise LayoutError(
                f"{name} is on {chunk.device} with strides {chunk.stride()}; expected rows without "
                f"gaps on {cache.device}"
            )
    check_slots(cache, slots, count * tokens)
    lengths = [s * cache.itemsize for c in chunks for s in (*c.stride()[:-1], c.storage_offset())]
    places = [c.data_ptr() for c in chunks]
    alignment = math.gcd(cache.alignment, *lengths, *places)
    word = WORDS[math.gcd(alignment, 8)]
    return Job(
        cache,
        slots.to(cache.device, non_blocking=True).reshape(count, tokens).contiguous(),
        tuple(c.view(WORDS[cache.itemsize]).view(word) for c in chunks),
        alignment,
    )


def check_slots(cache: PagedCache, slots: Tensor, tokens: int) -> None:
    """Refuse slots that are not one per token, or not in the cache. Raises InputError."""
    if slots.dtype != torch.int64 or slots.numel() != tokens:
        raise InputError(
            f"{slots.numel()} slots of {slots.dtype} for chunks of {tokens} tokens in all; "
            "expected one int64 per token"
        )
    if tokens and int(slots.max()) >= cache.layout.slots:
        raise InputError(f"slot {int(slots.max())} is not one of the cache's {cache.layout.slots}")


def move(job: Job, *, store: bool) -> None:
    """Make the move with PyTorch, on any device. No calls per token.

    Two tokens with the same slot leave one of the two there.
    """
    # An engine may have made its cache in inference mode, the only mode that can write it then.
    with torch.inference_mode():
        slots, tokens = job.slots.flatten(), job.slots.shape[1]
        touched = slots >= 0
        some = None if bool(touched.all()) else touched.nonzero().flatten()
        if some is not None:
            slots = slots[some]
        block, slot = slots // job.cache.layout.block_size, slots % job.cache.layout.block_size
        for pages, chunk in zip(job.cache.arrays, job.chunks, strict=True):
            for page, rows in zip(pages, chunk.permute(2, 0, 3, 1, 4), strict=True):
                page = page.view(job.word)  # noqa: PLW2901 - the same bytes
                if some is None and store:  # rows are [chunks, tokens, heads, words]
                    page[block, slot] = rows.reshape(-1, *rows.shape[2:])
                elif some is None:
                    rows.copy_(page[block, slot].view(rows.shape))
                elif store:
                    page[block, slot] = rows[some // tokens, some % tokens]
                else:
                    rows[some // tokens, some % tokens] = page[block, slot]


def _runs(
    slots: npt.NDArray[np.int64], block_size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Cut the tokens of ``slots`` [chunks, tokens] into runs of neighbours on both sides.

    A run ends where a chunk or a block does. Tokens with a negative slot are left out. Returns of
    each run the first token, counted through all chunks, its slot, and how many tokens there are.
    """
    flat = slots.ravel()
    begins = (flat % block_size == 0) | (flat < 0)
    begins[1:] |= flat[1:] != flat[:-1] + 1
    begins[:: max(1, slots.shape[1])] = True
    edges = np.append(np.flatnonzero(begins), len(flat))
    first, counts = edges[:-1], edges[1:] - edges[:-1]
    wanted = flat[first] >= 0
    first, counts = first[wanted], counts[wanted]
    return first, flat[first], counts


def move_on_cpu(job: Job, *, store: bool) -> None:
    """Make the move, see `Move`, by the loop in C; releases the GIL once."""
    ordered = np.sort(job.slots.numpy(), axis=None)
    if store and bool(((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)).any()):
        move(job, store=store)  # two threads would mix the bytes of one slot
    else:
        copy_runs(job, store=store)


def copy_runs(job: Job, *, store: bool) -> None:
    """Copy K and V by boxes, one per layer and run of tokens, with both sides' strides."""
    from vua import native  # noqa: PLC0415 - not needed on a GPU

    layout, size, copies = job.cache.layout, job.cache.itemsize, []
    first, slot, counts = _runs(job.slots.numpy(), layout.block_size)
    block, place = np.divmod(slot, layout.block_size)
    for rows, table, chunk in zip(layout.arrays, job.cache.table, job.chunks, strict=True):
        if not rows.step:
            continue
        pages = table.numpy()[:, None] + (block * rows.block + place * rows.slot) * size
        inside = rows.head * size, rows.slot * size, rows.step * job.word.itemsize
        tokens, word = max(1, chunk.shape[3]), chunk.element_size()
        of_chunk, head, layer, row, column = (step * word for step in chunk.stride())
        lines = chunk.data_ptr() + np.arange(chunk.shape[2])[:, None] * layer
        lines = lines + (first // tokens * of_chunk + first % tokens * row)
        (target, to), (source, from_) = (lines, (head, row, column)), (pages, inside)
        if store:
            (target, to), (source, from_) = (source, from_), (target, to)
        shape = chunk.shape[1], chunk.shape[4], word
        many = np.broadcast_to(counts, lines.shape)
        copies.append(native.StridedCopy(shape, to, from_, target, source, many))
    native.copy_strided(copies)


@cache
def choose(device: torch.device) -> Move:
    """Return how rows are moved on a device: by Triton if that works, which one trial proves."""
    if device.type == "cpu":
        return move_on_cpu
    if device.type == "cuda":
        # Triton is optional: an error of it or its compiler must not end copies.
        with suppress(Exception):
            from vua.device import kernels  # noqa: PLC0415 - it needs Triton

            if proves(kernels.move, device):
                return kernels.move
    return move


def proves(tried: Move, device: torch.device) -> bool:
    """Whether a move gives, in both directions, the same bytes as PyTorch on a small cache."""
    generator = torch.Generator().manual_seed(0)
    pages = torch.randint(0, 256, (3, 7, 2, 16, 2 * 96), dtype=torch.uint8, generator=generator)
    slots = torch.randperm(7 * 16, generator=generator)[:80]
    slots[[3, 30]] = -1
    found = []
    for one in (tried, move):
        layers = pages.to(device, copy=True)
        chunk = torch.full((2, 1, 2, 3, 80, 96), 7, dtype=torch.uint8, device=device)
        paged = PagedCache.of(layers, "LBHNC")
        one(plan(paged, slots, *chunk), store=False)
        one(plan(paged, slots.flip(0), *chunk), store=True)
        found.append((layers.cpu(), chunk.cpu()))
    return all(map(torch.equal, *found))


def gather(
    paged: PagedCache,
    slots: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    move: Move | None = None,
) -> None:
    """Copy the rows of some slots out of a cache into chunk arrays, for all its heads and layers.

    Args:
        paged: the engine's cache.
        slots: int64, one per token, ``[chunks, tokens]`` or flat; a negative one leaves both sides
            unchanged. On the host, where they are checked at once, or on the cache's device, which
            must be waited for.
        k: ``[chunks, heads, layers, tokens, dim]``, or without ``chunks``; on the cache's device,
            of any dtype of its item size, any strides, contiguous rows.
        v: the same; None if the cache holds one latent.
        move: how; by default as :func:`choose` returns.

    On a GPU this only queues the copy on the current stream.

    Raises:
        LayoutError: The chunk arrays do not fit the cache; nothing was copied.
        InputError: The slots do not fit; nothing was copied.
    """
    (move or choose(paged.device))(plan(paged, slots, k, v), store=False)


def scatter(
    paged: PagedCache,
    slots: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    move: Move | None = None,
) -> None:
    """Copy chunk arrays into the slots of a cache: the inverse of :func:`gather`, same arguments.

    All other bytes of the cache keep their value, also those of the same blocks.
    """
    (move or choose(paged.device))(plan(paged, slots, k, v), store=True)


def synchronize(device: torch.device) -> None:
    """Wait for everything queued on the device's current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


@dataclass(frozen=True, slots=True, eq=False)
class PageForm:
    """Where one head's page of ``block_size * width`` elements holds K and V.

    ``k_index[t, d]`` is the index in the page of element ``d`` of the K row of token ``t``; the
    same for ``v_index``, which has no columns if K and V are one latent.
    """

    k_index: Tensor
    v_index: Tensor
    width: int
    """Elements per token slot: the last dimension of vLLM's cache tensor."""

    def __post_init__(self) -> None:
        """Refuse maps in which two elements share an index or are outside the page."""
        at = torch.cat([self.k_index, self.v_index], dim=1).flatten()
        size = self.block_size * self.width
        if not len(at) or at.min() < 0 or at.max() >= size or at.bincount().max() > 1:
            raise LayoutError(f"a page form must give each element its own one of {size} places")

    @property
    def block_size(self) -> int:
        return self.k_index.shape[0]


def fused_form(block_size: int, head_dim: int, v_dim: int | None = None) -> PageForm:
    """Return the form of pages ``[block_size, head_dim + v_dim]`` with rows K, then V.

    >>> fused_form(16, 4).v_index[2, :2].tolist()
    [20, 21]
    """
    width = head_dim + (head_dim if v_dim is None else v_dim)
    rows = torch.arange(block_size * width).view(block_size, width)
    return PageForm(rows[:, :head_dim], rows[:, head_dim:], width)


def latent_form(block_size: int, width: int) -> PageForm:
    """Return the form of MLA pages ``[block_size, width]``: one latent, kept as K; no V.

    >>> tuple(latent_form(16, 576).v_index.shape)
    (16, 0)
    """
    return fused_form(block_size, width, 0)


def _rows(places: npt.NDArray[np.int64], block: int, head: int) -> Rows:
    """Return the strides of the elements at ``places[t, d]`` of a page."""
    offset, dim = int(places[0, 0]), places.shape[1]
    token, step = int(places[:2, 0][-1]) - offset, int(places[0, :2][-1]) - offset
    steps = np.arange(len(places))[:, None] * token + np.arange(dim) * (step or 1)
    if min(token, step) < 0 or not np.array_equal(places, offset + steps):
        return Rows(0, block, 0, head, dim, 0)
    return Rows(offset, block, token, head, dim, step or 1)


class PagedKV:
    """The tokens of one KV cache group, addressed by a request's block table.

    ``caches`` are the engine's tensors in model order, ``[blocks, heads, slots, width]`` with any
    strides (or ``[blocks, slots, width]``); ``block_size`` is the tokens per block id, a multiple
    of ``form.block_size`` if vLLM splits its blocks for the kernels. Threads may use one object
    concurrently on different tokens.

    >>> cache = torch.arange(2 * 16 * 8.0).view(2, 1, 16, 8)
    >>> k = torch.empty(1, 1, 3, 4)
    >>> PagedKV([cache], fused_form(16, 4), 16).gather([1], 2, 3, k, torch.empty_like(k))
    >>> k[0, 0, 0].tolist()
    [144.0, 145.0, 146.0, 147.0]
    """

    def __init__(self, caches: Sequence[Tensor], form: PageForm, block_size: int) -> None:
        found = {(tuple(c.shape), c.stride(), c.dtype, c.device.type) for c in caches}
        page = (form.block_size, form.width)
        alike = len(found) == 1 and caches[0].dim() in (3, 4) and caches[0].shape[-2:] == page
        if not alike or caches[0].device.type != "cpu":
            raise LayoutError(f"expected alike layers of {page} pages in CPU memory, found {found}")
        if block_size < 1 or block_size % form.block_size:
            raise LayoutError(
                f"block size {block_size} is not a multiple of {form.block_size} slots"
            )
        layers = [one if one.dim() == 4 else one.unsqueeze(1) for one in caches]
        blocks, heads, slots, _ = layers[0].shape
        block, head, slot, element = layers[0].stride()
        self._places = [
            (index // form.width * slot + index % form.width * element).numpy()
            for index in (form.k_index, form.v_index)
            if index.shape[1]
        ]
        """Of K and V: which element of a page holds each."""
        arrays = tuple(_rows(places, block, head) for places in self._places)
        layout = PagedLayout(blocks, slots, heads, arrays)
        views = [[layout.view(one, at) for one in layers] for at in range(len(arrays))]
        self._cache, self._layers, self._block_size = PagedCache(views, layout), layers, block_size

    def gather(
        self,
        block_ids: _Ids,
        token_start: int,
        n_tokens: int,
        k_out: Tensor,
        v_out: Tensor | None,
    ) -> None:
        """Copy tokens ``token_start`` to ``token_start + n_tokens`` of a request out of the cache.

        Block ``block_ids[i]`` holds the tokens from ``i * block_size`` on. ``k_out`` and ``v_out``
        are ``[heads, layers, n_tokens, dim]``, of any dtype of the cache's item size, with rows
        without gaps; ``v_out`` is None without V.

        Raises:
            LayoutError: The chunks do not fit; nothing was copied.
            InputError: The tokens do not fit; nothing was copied.
        """
        v = None if v_out is None else v_out[None]
        self._move(block_ids, token_start, n_tokens, 0, k_out[None], v, store=False)

    def scatter_chunks(
        self, block_ids: _Ids, token_start: int, n_tokens: int, skip: int,
        k_in: Tensor, v_in: Tensor | None,
    ) -> None:  # fmt: skip
        """Copy the tokens of consecutive chunks into the cache, by one call for all.

        The inverse of `gather`, but that ``k_in`` and ``v_in`` are ``[chunks, heads, layers,
        chunk_tokens, dim]``, and token ``token_start`` follows ``skip`` other tokens of the first
        chunk. Tokens outside the range keep their bytes, also those in the same block.
        """
        self._move(block_ids, token_start, n_tokens, skip, k_in, v_in, store=True)

    def memory(self, chunk_tokens: int, chunks: int) -> MemoryMap | None:
        """Return a map of ``chunks`` chunk slots in these pages, which :meth:`aim` aims.

        None if elements have no fixed strides, and C cannot write to them.
        """
        from vua.native import NOWHERE, MemoryMap, Spread  # noqa: PLC0415

        arrays, item = self._cache.layout.arrays, self._cache.itemsize
        if not all(rows.step for rows in arrays):
            return None
        tokens = math.gcd(chunk_tokens, self._cache.layout.block_size)
        offsets = np.full(chunks * (chunk_tokens // tokens), NOWHERE, dtype=np.uint64)
        return MemoryMap(
            base=tuple(self._cache.table.numpy().view(np.uint64)),
            head_stride=tuple(rows.head * item for rows in arrays),
            segment_offset=tuple(offsets.copy() for _ in arrays),
            segment_tokens=tokens,
            owner=self,
            spread=Spread(
                item, [(rows.dim, rows.slot * item, rows.step * item) for rows in arrays]
            ),
            cached=True,
        )

    def aim(
        self,
        memory: MemoryMap,
        block_ids: _Ids,
        token_start: int,
        n_tokens: int,
        skip: int,
    ) -> bool:
        """Point the chunk slots of :meth:`memory` at a request's tokens.

        Arguments as for :meth:`scatter_chunks`; other tokens of the slots have no address. Returns
        False, and changes nothing, if the tokens cut a segment. Raises InputError.
        """
        from vua.native import NOWHERE  # noqa: PLC0415

        size, layout, item = memory.segment_tokens, self._cache.layout, self._cache.itemsize
        if (token_start | skip) % size or n_tokens % size:
            return False
        found = slots_of(block_ids, self._block_size, token_start, token_start + n_tokens)
        check_slots(self._cache, found, n_tokens)
        pages, slots = np.divmod(found.numpy()[::size], layout.block_size)
        first = skip // size
        for offsets, rows in zip(memory.segment_offset, layout.arrays, strict=True):
            offsets[:] = NOWHERE
            offsets[first : first + len(pages)] = (pages * rows.block + slots * rows.slot) * item
        return True

    def _move(
        self, ids: _Ids, start: int, count: int, skip: int, k: Tensor, v: Tensor | None,
        *, store: bool,
    ) -> None:  # fmt: skip
        number, tokens = k.shape[0], k.shape[-2]
        if not 0 <= skip <= skip + count <= number * tokens:
            raise InputError(f"{count} tokens after {skip} are not in {number} of {tokens}")
        slots = np.full(number * tokens, -1, dtype=np.int64)
        slots[skip : skip + count] = slots_of(ids, self._block_size, start, start + count).numpy()
        job = plan(self._cache, torch.from_numpy(slots), k, v)
        if not count:
            return
        copy_runs(job, store=store)
        for at, rows in enumerate(self._cache.layout.arrays):
            if not rows.step:
                self._move_each(job, at, store=store)

    def _move_each(self, job: Job, array: int, *, store: bool) -> None:
        """Copy K or V whose elements have no strides, one by one."""
        places, first = self._places[array], self._layers[0]
        heads = first.shape[1]
        # vLLM may have made its caches in inference mode, the only mode that can write them then.
        with torch.inference_mode():
            for chunk, some in zip(job.chunks[array], job.slots.numpy(), strict=True):
                (at,) = np.nonzero(some >= 0)  # neighbours
                page, slot = np.divmod(some[at], len(places))
                each = torch.from_numpy(page[:, None] * first.stride(0) + places[slot])
                index = each.flatten().expand(heads, -1)
                size = int(each.max()) + 1 if len(at) else 0
                for layer, tensor in enumerate(self._layers if size else ()):
                    words = tensor.view(job.word)
                    elements = words.as_strided((heads, size), (first.stride(1), 1))
                    side = chunk[:, layer, at[0] : at[-1] + 1]
                    if store:  # indexing and index_select are slower by far
                        elements.scatter_(1, index, side.reshape(heads, -1))
                    else:
                        side.copy_(elements.gather(1, index).view(side.shape))
