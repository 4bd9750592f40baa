"""Coordinates: which rectangle of a model's KV cache a file holds, and where its extents lie.

The canonical payload of a chunk is two arrays, ``k`` and ``v``, each ``[KV heads, layers, tokens,
head_dim]``. Heads come first, so the heads of one TP rank are one contiguous byte range per array.
A *shard* is a rectangle ``layers a..b, heads c..d`` (half-open, in the model's global numbering,
never a rank); one file holds one shard of one chunk. An *extent* is one head of one layer of K or
V, ``tokens * head_dim`` elements. A *checksum block* is what one checksum covers: the extents of
``checksum_block_layers`` consecutive layers of one head, some 64 KiB. Nothing here touches a file
or copies a byte.

:func:`longest_prefix` says which prefix of a prompt can be used, given the stored chunks: the one
rule for all callers. Layers with full attention need every chunk of the prefix. Layers with a
sliding window need the chunks that hold the window at the prefix's end, from the first token of a
block on: an engine fills whole blocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vua.errors import LayoutError

if TYPE_CHECKING:
    from vua.native import MemoryMap

ITEMSIZE: Final[Mapping[str, int]] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8,
    "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
}  # fmt: skip
"""Bytes per element by safetensors dtype name."""

_CHECKSUM_BLOCK_NBYTES: Final = 128 << 10
"""Most bytes per checksum (or one extent): xxhash keeps the GIL for inputs of this size."""

_MAX_CELLS: Final = 1 << 20
"""Layers times KV heads, far beyond any model: a description's claims must not fill memory."""

_MAX_COUNT: Final = 99_999
_MAX_DIM: Final = 1 << 24
_LIMITS: Final = (
    *(("layers", 1, _MAX_COUNT), ("kv_heads", 1, _MAX_COUNT), ("chunk_tokens", 1, 1 << 16)),
    *(("k_dim", 1, _MAX_DIM), ("v_dim", 0, _MAX_DIM)),
)
"""Of a layout's fields; elements of one head's row are far beyond any model."""

_SHARD_NAME = re.compile(r"(?:(w\d{1,9})\.)?l(\d{1,5})-(\d{1,5})\.h(\d{1,5})-(\d{1,5})")
_GROUP = re.compile(r"(?:w[1-9]\d{0,8})?")


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of one model's KV cache, the same for every engine and every parallel size."""

    layers: int
    kv_heads: int
    k_dim: int
    """Elements of one head's K row (MLA: the whole latent)."""
    v_dim: int
    """Elements of one head's V row; 0 if K and V are one latent (MLA)."""
    dtype: str
    """Element type by its safetensors name, e.g. ``BF16``."""
    chunk_tokens: int
    group: str = ""
    """The group of layers; ``layers`` counts within it. Empty for layers that attend to the whole
    prefix (and for models with one kind of layer), ``w1024`` for a sliding window of 1024
    tokens."""

    def __post_init__(self) -> None:
        for name, low, most in _LIMITS:
            if not low <= (found := getattr(self, name)) <= most:
                msg = f"{name} must be at least {low} and at most {most}, found {found}"
                raise LayoutError(msg)
        if self.layers * self.kv_heads > _MAX_CELLS:
            msg = f"{self.layers} layers x {self.kv_heads} KV heads: expected at most {_MAX_CELLS}"
            raise LayoutError(msg)
        if self.dtype not in ITEMSIZE:
            raise LayoutError(f"dtype {self.dtype}: expected one of {[*ITEMSIZE]}")
        if _GROUP.fullmatch(self.group) is None:
            raise LayoutError(f"group {self.group!r:.40}: expected nothing, or w and a number")

    @property
    def window(self) -> int | None:
        """Tokens that a layer attends to, its own included; None: the whole prefix."""
        return int(self.group[1:]) if self.group else None

    @property
    def dims(self) -> tuple[int, ...]:
        """Row lengths of a chunk's arrays: (k_dim, v_dim), or (k_dim,) without V."""
        return (self.k_dim, self.v_dim) if self.v_dim else (self.k_dim,)

    @property
    def extent_nbytes(self) -> tuple[int, ...]:
        """Bytes of one extent of K, and of V if there is one."""
        return tuple(self.chunk_tokens * dim * ITEMSIZE[self.dtype] for dim in self.dims)

    @property
    def checksum_block_layers(self) -> int:
        """Consecutive layers of one head that share a checksum, from a file's first layer on."""
        return max(1, _CHECKSUM_BLOCK_NBYTES // max(self.extent_nbytes))

    @property
    def full(self) -> Shard:
        """The shard of the whole model."""
        return Shard(0, self.layers, 0, self.kv_heads, self.group)

    def describe(self) -> dict[str, int | str]:
        """Return the fields as plain values for ``namespace.json``; an empty group is left out."""
        names = self.__slots__ if self.group else self.__slots__[:-1]
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_description(cls, fields: Mapping[str, Any]) -> KVLayout:
        """Build a layout from :meth:`describe`'s values; raises LayoutError on anything else."""
        if sorted({"group": "", **fields}) != sorted(cls.__slots__) or any(
            type(fields[name]) is not (str if name in ("dtype", "group") else int)
            for name in fields
        ):
            msg = f"expected the fields {list(cls.__slots__)}, found {dict(fields)!r:.200}"
            raise LayoutError(msg)
        return cls(**fields)


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """A rectangle of a model's KV cache: layers and KV heads, half-open ranges."""

    layer_start: int
    layer_stop: int
    head_start: int
    head_stop: int
    group: str = ""
    """The group of layers, see :class:`KVLayout`; layers count within the group."""

    @property
    def name(self) -> str:
        """The shard's file name without suffix, e.g. ``l0-32.h0-8`` or ``w128.l0-18.h0-8``."""
        place = f"l{self.layer_start}-{self.layer_stop}.h{self.head_start}-{self.head_stop}"
        return f"{self.group}.{place}" if self.group else place

    @classmethod
    def parse(cls, name: str) -> Shard | None:
        """Return the shard that ``name`` stands for, or None if it is not a shard's name."""
        match = _SHARD_NAME.fullmatch(name)
        if match is None:
            return None
        group, *numbers = match.groups()
        first, last, head, stop = map(int, numbers)
        shard = cls(first, last, head, stop, group or "")
        return shard if shard.name == name and shard.layers > 0 and shard.heads > 0 else None

    @property
    def layers(self) -> int:
        return self.layer_stop - self.layer_start

    @property
    def heads(self) -> int:
        return self.head_stop - self.head_start

    def contains(self, other: Shard) -> bool:
        """Whether ``other`` lies wholly inside this shard."""
        return (
            self.group == other.group
            and self.layer_start <= other.layer_start
            and other.layer_stop <= self.layer_stop
            and self.head_start <= other.head_start
            and other.head_stop <= self.head_stop
        )

    def intersection(self, other: Shard) -> Shard | None:
        """Return the rectangle that both hold, or None if they do not overlap."""
        both = Shard(
            max(self.layer_start, other.layer_start),
            min(self.layer_stop, other.layer_stop),
            max(self.head_start, other.head_start),
            min(self.head_stop, other.head_stop),
            self.group,
        )
        meets = self.group == other.group and both.layers > 0 and both.heads > 0
        return both if meets else None

    def checksum_blocks(self, layout: KVLayout) -> int:
        """Checksums per head and array in a file of this shard."""
        return -(-self.layers // layout.checksum_block_layers)

    def payload_nbytes(self, layout: KVLayout) -> int:
        """Bytes of K and V that a file of this shard holds."""
        return self.heads * self.layers * sum(layout.extent_nbytes)


def cover(needed: Shard, available: Iterable[Shard]) -> list[tuple[Shard, Shard]] | None:
    """Choose stored shards that together hold ``needed``.

    Returns:
        (stored shard, rectangle to take from it) pairs whose rectangles tile ``needed``, or None if
            something is missing. Rectangles may overlap where stored shards do.
    """
    stored = sorted(available, key=lambda shard: (-shard.layers * shard.heads, shard))
    for shard in stored:
        if shard.contains(needed):
            return [(shard, needed)]
    import numpy as np  # noqa: PLC0415 - what only looks goes without

    missing = np.ones((needed.layers, needed.heads), dtype=bool)
    chosen = []
    for shard in stored:
        part = needed.intersection(shard)
        if part is None:
            continue
        cells = (
            slice(part.layer_start - needed.layer_start, part.layer_stop - needed.layer_start),
            slice(part.head_start - needed.head_start, part.head_stop - needed.head_start),
        )
        if missing[cells].any():
            missing[cells] = False
            chosen.append((shard, part))
    return None if missing.any() else chosen


def payload_map(
    layout: KVLayout, shard: Shard, address: int, owner: object, chunks: int
) -> MemoryMap:
    """Return the map of memory in which chunks lie one after the other as in their files.

    Args:
        address: of the first chunk's payload.
    """
    import numpy as np  # noqa: PLC0415 - what only looks goes without

    from vua.native import MemoryMap  # noqa: PLC0415 - as numpy

    payload = shard.payload_nbytes(layout)
    layers = np.arange(shard.layers, dtype=np.uint64)
    places = np.arange(chunks, dtype=np.uint64) * np.uint64(payload)
    bases = []
    for extent in layout.extent_nbytes:
        bases.append(np.uint64(address) + layers * np.uint64(extent))
        address += shard.heads * shard.layers * extent
    return MemoryMap(
        base=tuple(bases),
        head_stride=tuple(shard.layers * extent for extent in layout.extent_nbytes),
        segment_offset=tuple(places for _ in bases),
        segment_tokens=layout.chunk_tokens,
        owner=owner,
    )


class Kind(NamedTuple):
    """Layers of one kind, as an engine holds them."""

    layout: KVLayout
    block_tokens: int
    """Tokens per block: the least common multiple if an engine has several sizes; 1 without
    blocks."""


def first_needed(layout: KVLayout, tokens: int) -> int:
    """Return the first token whose K/V are needed to continue after ``tokens`` tokens.

    >>> first_needed(KVLayout(1, 1, 4, 4, "U8", 8, "w20"), 64)
    45
    """
    return 0 if layout.window is None else max(0, tokens - layout.window + 1)


def first_token(kind: Kind, tokens: int) -> int:
    """Return the first token to load of layers in order to continue after ``tokens`` tokens.

    A window's first block counts as a whole: the engine's own prefix cache offers it to other
    requests, whose windows may begin earlier.

    >>> layout = KVLayout(1, 1, 4, 4, "U8", 8, "w20")
    >>> first_token(Kind(layout, 1), 64), first_token(Kind(layout, 16), 64)
    (45, 32)
    """
    first = first_needed(kind.layout, tokens)
    return first - first % kind.block_tokens


def alignment(kinds: Sequence[Kind]) -> int:
    """Return a number that divides a prefix's length: it ends with a block of every kind."""
    return math.lcm(*(kind.block_tokens for kind in kinds))


def leading(layouts: Sequence[KVLayout]) -> list[int]:
    """Return the indices of the layouts of which every chunk is stored.

    These have full attention; if none has, they are those with windows.
    """
    full = [at for at, layout in enumerate(layouts) if layout.window is None]
    return full or [*range(len(layouts))]


def longest_prefix(
    kinds: Sequence[Kind],
    stored: int,
    most: int,
    missing: Callable[[int, Sequence[int]], int | None],
    align: int = 1,
) -> int:
    """Return how many tokens of a prompt can be used: every window after them is stored.

    Args:
        kinds: the model's, in any order.
        stored: how many of the prompt's chunks, from the first on, the :func:`leading` kinds have.
        most: tokens to use at most.
        missing: returns, for a kind's index and some chunks, the first of these that is not stored;
            None: all are. It is called for the other kinds only.
        align: divides the answer, besides :func:`alignment`.
    """
    lead = set(leading([kind.layout for kind in kinds]))
    others = [(at, kind) for at, kind in enumerate(kinds) if at not in lead]
    size, align = kinds[0].layout.chunk_tokens, math.lcm(align, alignment(kinds))
    while (tokens := min(stored * size, most) // align * align) > 0:
        gap = None
        for at, kind in others:
            first, stop = first_token(kind, tokens) // size, -(-tokens // size)
            # The lowest first: without it no prefix that ends inside the window can be used either.
            gap = missing(at, (first, *range(stop - 1, first, -1)))
            if gap is not None:
                break
        if gap is None:
            return tokens
        stored = gap  # it is needed for every prefix from there up to `tokens`
    return 0
