"""GPU connectors: copy tokens of an engine's KV cache into memory objects and back.

They have the names and the contract of LMCache's documented connectors, and work without LMCache on
tensors of any device, CPU included. ``start`` and ``end`` are token positions in the whole
sequence, half open. The memory object holds just these tokens: ``[2, layers, tokens, hidden]``. In
a row the elements of one head are contiguous, for any order in the cache. The copy is bitwise:
``to_gpu`` restores what ``from_gpu`` read. A method returns when its copy is complete; one
connector serves one thread at a time. Caches may have been made in PyTorch's inference mode.

Errors, raised before anything is copied: AssertionError for a memory object without a tensor;
ValueError if ``kvcaches`` or ``slot_mapping`` is missing, or format, shape or slots do not fit.

Connectors also accept LMCache's own memory objects: they use only ``tensor`` and ``metadata.fmt``,
and formats are compared by their number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vua.errors import InputError, how_to_get

try:
    import torch
    from torch import Tensor
except ModuleNotFoundError as problem:
    raise how_to_get(problem) from None

from vua.device.paged import PagedCache, gather, scatter, synchronize

__all__ = [
    "GPUConnectorInterface",
    "MemoryFormat",
    "MemoryObj",
    "VLLMNestedTupleGPUConnector",
    "VLLMPagedMemGPUConnector",
    "VLLMPagedMemGPUConnectorV2",
]


class MemoryFormat(Enum):
    """The axes of a memory object's tensor. The numbers are LMCache's."""

    UNDEFINED = 0
    KV_BLOB = 1
    """``[2, layers, tokens, hidden]``: K of all layers, then V; one row holds all heads."""
    KV_2LTD = 1  # noqa: PIE796 - what LMCache calls KV_BLOB today
    KV_MLA_FMT = 6
    """``[1, layers, tokens, latent]``."""


@dataclass(slots=True)
class MemoryObjMetadata:
    """A memory object's properties beside its bytes."""

    fmt: MemoryFormat = MemoryFormat.UNDEFINED


class MemoryObj:
    """A chunk in memory. Not safe for threads that write."""

    def __init__(self, tensor: Tensor | None, fmt: MemoryFormat = MemoryFormat.KV_BLOB) -> None:
        """Hold a tensor, or None for an object whose memory was taken back."""
        self.tensor = tensor
        self.metadata = MemoryObjMetadata(fmt)


class GPUConnectorInterface(ABC):
    """Moves the tokens of one sequence between an engine's KV cache and memory objects."""

    @abstractmethod
    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Copy tokens ``start`` to ``end`` out of the engine's cache into the memory object."""

    @abstractmethod
    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Copy the memory object into tokens ``start`` to ``end`` of the engine's cache."""

    @abstractmethod
    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return the shape of a memory object of ``num_tokens`` tokens."""

    def batched_from_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Call :meth:`from_gpu` for each memory object with its range."""
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def batched_to_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Call :meth:`to_gpu` for each memory object with its range."""
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)


class VLLMPagedMemGPUConnector(GPUConnectorInterface):
    """For paged caches: ``kvcaches[layer]`` is (K, V), ``[blocks, block_size, heads, head_size]``.

    ``slot_mapping``, int64, has one slot per token of the whole sequence. A token with a negative
    slot is skipped on both sides; callers keep [start, end) clear of such.
    """

    _format = MemoryFormat.KV_BLOB
    _marks = False
    """Whether ``from_gpu`` takes objects of any format, and sets it."""

    def __init__(self, hidden_dim_size: int, num_layers: int) -> None:
        """Serve caches of ``num_layers`` layers with ``hidden_dim_size`` = heads * head size."""
        if hidden_dim_size < 1 or num_layers < 1:
            raise InputError(
                f"hidden_dim_size {hidden_dim_size}, num_layers {num_layers}: expected at least 1"
            )
        self.hidden_dim_size, self.num_layers = hidden_dim_size, num_layers
        self._known: tuple[object, PagedCache] | None = None

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return ``[2, num_layers, num_tokens, hidden_dim_size]``; 1 instead of 2 for MLA."""
        arrays = 1 if self._format is MemoryFormat.KV_MLA_FMT else 2
        return torch.Size([arrays, self.num_layers, num_tokens, self.hidden_dim_size])

    @torch.inference_mode()
    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Copy tokens ``start`` to ``end`` of ``kvcaches`` into the object.

        Rows of tokens with a negative slot keep their bytes.

        Raises:
            ValueError: ``kvcaches`` or ``slot_mapping`` is missing or does not fit; the format is
                another one than the connector's.
            AssertionError: The memory object has no tensor.
        """
        tensor = self._tensor_of(memory_obj, start, end, fmt=None if self._marks else self._format)
        paged, slots = self._paged(kwargs, tensor), self._slots(kwargs, start, end)
        near = tensor
        if tensor.device != paged.device:
            near = torch.empty_like(tensor, device=paged.device)
        if near is not tensor and bool((slots < 0).any()):
            near.copy_(tensor)  # what has no slot keeps its bytes
        gather(paged, slots, *_chunk(near, paged))
        if near is not tensor:
            tensor.copy_(near)
        synchronize(paged.device)
        metadata: Any = memory_obj.metadata
        metadata.fmt = type(metadata.fmt)(self._format.value)  # an enum of its own library

    @torch.inference_mode()
    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Copy the object into tokens ``start`` to ``end`` of ``kvcaches`` alone.

        Raises as :meth:`from_gpu` does.
        """
        tensor = self._tensor_of(memory_obj, start, end, fmt=self._format)
        paged, slots = self._paged(kwargs, tensor), self._unwritten(kwargs, start, end)
        near = tensor.to(paged.device, non_blocking=True)
        scatter(paged, slots, *_chunk(near, paged))
        synchronize(paged.device)

    def _tensor_of(
        self, memory_obj: MemoryObj, start: int, end: int, *, fmt: MemoryFormat | None
    ) -> Tensor:
        tensor, found = memory_obj.tensor, memory_obj.metadata.fmt
        if tensor is None:
            raise AssertionError("the memory object has no tensor: its memory was taken back")
        if fmt is not None and getattr(found, "value", found) != fmt.value:
            raise InputError(f"the memory object's format is {found}; expected {fmt.name}")
        if not 0 <= start <= end or tensor.shape != self.get_shape(end - start):
            raise InputError(
                f"the memory object is {tuple(tensor.shape)} for tokens {start}..{end}; expected "
                f"{tuple(self.get_shape(end - start))}"
            )
        return tensor

    def _layers(self, kwargs: dict[str, Any]) -> list[Any]:
        found = kwargs.get("kvcaches")
        if found is None:
            raise InputError("'kvcaches' is missing; pass kvcaches=<the engine's KV cache>")
        if len(found) != self.num_layers:
            raise InputError(f"kvcaches of {len(found)} layers; expected {self.num_layers}")
        return list(found)

    def _axes(self, layer: Any) -> str:
        """Return the axes of a layer's tensor or pair, see `vua.device.paged.KNOWN_AXES`."""
        if isinstance(layer, Tensor) or len(layer) != 2 or layer[0].dim() != 4:
            raise InputError(
                f"a layer of kvcaches is {_kind(layer)}; expected a pair (K, V) of "
                "[num_blocks, block_size, num_heads, head_size]"
            )
        return "BNHD"

    def _paged(self, kwargs: dict[str, Any], tensor: Tensor) -> PagedCache:
        layers = self._layers(kwargs)
        tensors = [t for layer in layers for t in ([layer] if isinstance(layer, Tensor) else layer)]
        mark = [(t.data_ptr(), tuple(t.shape), t.stride(), t.dtype, t.device) for t in tensors]
        if self._known is None or self._known[0] != mark:  # an engine passes the same ones for ever
            self._known = (mark, PagedCache.of(layers, self._axes(layers[0])))
        paged = self._known[1]
        dtypes = {tensors[0].dtype, tensor.dtype}
        if {paged.layout.heads * dim for dim in paged.layout.dims} != {self.hidden_dim_size} or (
            len(dtypes) > 1 and any(d.itemsize != 1 for d in dtypes)  # fp8 goes by many names
        ):
            raise InputError(
                f"kvcaches of {paged.layout.heads} heads * {paged.layout.dims} in "
                f"{tensors[0].dtype}; expected {self.hidden_dim_size} elements in {tensor.dtype}"
            )
        return paged

    def _slots(self, kwargs: dict[str, Any], start: int, end: int) -> Tensor:
        slots = kwargs.get("slot_mapping")
        if slots is None:
            raise InputError("'slot_mapping' is missing; pass one slot per token of the sequence")
        if slots.dim() != 1 or len(slots) < end or slots.dtype != torch.int64:
            raise InputError(
                f"slot_mapping is {slots.dtype} {tuple(slots.shape)}; expected int64 of the whole "
                f"sequence, which has at least {end} tokens"
            )
        part: Tensor = slots[start:end]
        return part

    def _unwritten(self, kwargs: dict[str, Any], start: int, end: int) -> Tensor:
        """Return the slots that :meth:`to_gpu` writes; negative where it writes nothing."""
        return self._slots(kwargs, start, end)


class VLLMNestedTupleGPUConnector(VLLMPagedMemGPUConnector):
    """For contiguous caches: ``kvcaches[layer]`` is a pair (K, V) of ``[num_tokens, ...]``.

    The pairs hold the whole sequence; the axes after the token axis have ``hidden_dim_size``
    elements.
    """

    def _layers(self, kwargs: dict[str, Any]) -> list[Any]:
        pairs = super()._layers(kwargs)
        return [tuple(t if t.dim() == 3 else t.view(len(t), 1, -1) for t in pair) for pair in pairs]

    def _axes(self, layer: Any) -> str:  # noqa: ARG002 - the same for all
        return "NHD"

    def _slots(self, kwargs: dict[str, Any], start: int, end: int) -> Tensor:  # noqa: ARG002 - none
        return torch.arange(start, end)


class VLLMPagedMemGPUConnectorV2(VLLMPagedMemGPUConnector):
    """For paged caches in any layout that vLLM has had: one tensor or one (K, V) pair per layer.

    Beside the pairs of :class:`VLLMPagedMemGPUConnector`: ``[2, blocks, block_size, heads, size]``,
    ``[blocks, 2, block_size, heads, size]``, ``[blocks, heads, block_size, 2 * size]``, and for MLA
    ``[blocks, block_size, latent]`` (then with ``use_mla=True``, and memory objects of one array in
    the format KV_MLA_FMT). ``slot_mapping`` is the same, -1 for a prefix that must not be touched.
    ``from_gpu`` marks the object with its format. For ``to_gpu``, ``vllm_cached_tokens`` (0 by
    default) leading tokens are already in the cache, maybe in shared blocks, and are not written.
    """

    _marks = True

    def __init__(
        self,
        hidden_dim_size: int,
        num_layers: int,
        use_gpu: bool = False,  # noqa: FBT001, FBT002 - the documented signature
        **kwargs: Any,
    ) -> None:
        """Serve caches of these sizes.

        Args:
            hidden_dim_size: heads * head size (MLA: the latent's length).
            num_layers: layers of ``kvcaches``.
            use_gpu: needs ``chunk_size``, ``dtype`` and ``device``, as in LMCache. No buffer is
                kept: chunks to and from other devices pass through memory that torch reuses.
            kwargs: ``chunk_size`` (tokens), ``dtype``, ``device``; ``use_mla``.

        Raises ValueError on bad sizes, or if ``use_gpu`` lacks one of its three.
        """
        super().__init__(hidden_dim_size, num_layers)
        self.use_mla = bool(kwargs.get("use_mla", False))
        if self.use_mla:
            self._format = MemoryFormat.KV_MLA_FMT
        self._remembered: Any = None
        missing = [n for n in ("chunk_size", "dtype", "device") if kwargs.get(n) is None]
        if use_gpu and missing:
            raise InputError(f"use_gpu=True needs {', '.join(missing)}")

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        """Remember ``kvcaches``, if given, for calls that do not pass it."""
        if kwargs.get("kvcaches") is not None:
            self._remembered = kwargs["kvcaches"]

    def _layers(self, kwargs: dict[str, Any]) -> list[Any]:
        given = kwargs.get("kvcaches")
        return super()._layers({"kvcaches": self._remembered if given is None else given})

    def _unwritten(self, kwargs: dict[str, Any], start: int, end: int) -> Tensor:
        slots, cached = self._slots(kwargs, start, end).clone(), kwargs.get("vllm_cached_tokens")
        slots[: max(0, int(cached or 0) - start)] = -1
        return slots

    def _axes(self, layer: Any) -> str:
        if not isinstance(layer, Tensor):
            return super()._axes(layer)
        axes = _recognised(tuple(layer.shape), self.hidden_dim_size, latent=self.use_mla)
        if axes is None:
            raise InputError(
                f"a layer of kvcaches is {_kind(layer)}, which is an unknown layout, or could be "
                f"more than one, for {self.hidden_dim_size} elements per token"
            )
        return axes


def _recognised(shape: tuple[int, ...], hidden: int, *, latent: bool) -> str | None:
    if latent:
        return {3: "BND", 4: "BHND"}.get(len(shape))
    if len(shape) == 4 and shape[1] * shape[3] == 2 * hidden:
        return "BHNC"
    if len(shape) == 5 and shape[3] * shape[4] == hidden and shape[:2].count(2) == 1:
        return "2BNHD" if shape[0] == 2 else "B2NHD"
    return None


def _kind(layer: Any) -> str:
    if isinstance(layer, Tensor):
        return f"a tensor {tuple(layer.shape)}"
    return f"{len(layer)} tensors {[tuple(t.shape) for t in layer]}"


def _chunk(tensor: Tensor, paged: PagedCache) -> list[Tensor]:
    """View each array ``[layers, tokens, heads * dim]`` as ``[heads, layers, tokens, dim]``."""
    heads = paged.layout.heads
    return [array.unflatten(2, (heads, -1)).permute(2, 0, 1, 3) for array in tensor]
