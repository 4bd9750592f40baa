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

from vua.device.copy import gather, scatter, synchronize
from vua.device.paged import PagedCache

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


def has_format(memory_obj: MemoryObj, fmt: MemoryFormat) -> bool:
    """Whether an object, VUA's or LMCache's, has a format."""
    found = memory_obj.metadata.fmt
    return bool(getattr(found, "value", found) == fmt.value)


def set_format(memory_obj: MemoryObj, fmt: MemoryFormat) -> None:
    """Mark an object with a format, as an enum of its own library."""
    kind = type(memory_obj.metadata.fmt)
    memory_obj.metadata.fmt = kind(fmt.value)


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


class KVBlobConnector(GPUConnectorInterface):
    """Base of connectors of KV_BLOB objects."""

    def __init__(self, hidden_dim_size: int, num_layers: int) -> None:
        """Serve caches of ``num_layers`` layers with ``hidden_dim_size`` = heads * head size."""
        if hidden_dim_size < 1 or num_layers < 1:
            raise InputError(
                f"hidden_dim_size {hidden_dim_size}, num_layers {num_layers}: expected at least 1"
            )
        self.hidden_dim_size, self.num_layers = hidden_dim_size, num_layers

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return ``[2, num_layers, num_tokens, hidden_dim_size]``."""
        return torch.Size([2, self.num_layers, num_tokens, self.hidden_dim_size])

    def blob_of(
        self, memory_obj: MemoryObj, start: int, end: int, *, fmt: MemoryFormat | None
    ) -> Tensor:
        """Return an object's tensor, checked for a range of tokens and, if given, a format.

        Raises AssertionError or ValueError, see `vua.lmcache.gpu_connector`.
        """
        tensor = memory_obj.tensor
        if tensor is None:
            raise AssertionError("the memory object has no tensor: its memory was taken back")
        if fmt is not None and not has_format(memory_obj, fmt):
            raise InputError(
                f"the memory object's format is {memory_obj.metadata.fmt}; expected {fmt.name}"
            )
        if not 0 <= start <= end or tensor.shape != self.get_shape(end - start):
            raise InputError(
                f"the memory object is {tuple(tensor.shape)} for tokens {start}..{end}; expected "
                f"{tuple(self.get_shape(end - start))}"
            )
        return tensor

    def kvcaches_of(self, kwargs: dict[str, Any]) -> Sequence[Any]:
        """Return the layers of ``kvcaches``. Raises ValueError if it is missing or too short."""
        found = kwargs.get("kvcaches")
        if found is None:
            raise InputError("'kvcaches' is missing; pass kvcaches=<the engine's KV cache>")
        if len(found) != self.num_layers:
            raise InputError(f"kvcaches of {len(found)} layers; expected {self.num_layers}")
        return list(found)


class VLLMNestedTupleGPUConnector(KVBlobConnector):
    """For contiguous caches: ``kvcaches[layer]`` is a pair (K, V) of ``[num_tokens, ...]``.

    The pairs hold the whole sequence; the axes after the token axis have ``hidden_dim_size``
    elements.
    """

    @torch.inference_mode()
    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Copy tokens ``start`` to ``end`` of ``kvcaches`` into the KV_BLOB object.

        Raises:
            ValueError: ``kvcaches`` is missing or has another shape; the format is another one.
            AssertionError: The memory object has no tensor.
        """
        blob = self.blob_of(memory_obj, start, end, fmt=MemoryFormat.KV_BLOB)
        for row, line in self._rows(blob, start, end, kwargs):
            line.copy_(row.reshape(line.shape))
        synchronize(row.device)

    @torch.inference_mode()
    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Copy the KV_BLOB object into tokens ``start`` to ``end`` of ``kvcaches``.

        Raises as :meth:`from_gpu` does.
        """
        blob = self.blob_of(memory_obj, start, end, fmt=MemoryFormat.KV_BLOB)
        for row, line in self._rows(blob, start, end, kwargs):
            row.copy_(line.reshape(row.shape))
        synchronize(row.device)

    def _rows(
        self, blob: Tensor, start: int, end: int, kwargs: dict[str, Any]
    ) -> list[tuple[Tensor, Tensor]]:
        caches = self.kvcaches_of(kwargs)
        for layer, pair in enumerate(caches):
            found = [(tuple(t.shape), t.dtype) for t in pair]
            fits = len(pair) == 2 and all(
                t.shape[0] >= end
                and t[:1].numel() == min(1, t.shape[0]) * self.hidden_dim_size
                and t.dtype == blob.dtype
                for t in pair
            )
            if not fits:
                raise InputError(
                    f"layer {layer} is {found}; expected (K, V), each [{end} tokens or more, ...] "
                    f"of {self.hidden_dim_size} elements per token in {blob.dtype}"
                )
        return [
            (tensor[start:end], blob[array, layer])
            for layer, pair in enumerate(caches)
            for array, tensor in enumerate(pair)
        ]


class _PagedConnector(KVBlobConnector):
    """Base of connectors of paged caches; a subclass defines the layouts."""

    def __init__(self, hidden_dim_size: int, num_layers: int) -> None:
        super().__init__(hidden_dim_size, num_layers)
        self._known: tuple[object, PagedCache] | None = None

    def _axes(self, layer: Any) -> str:
        """Return the axes of a layer's tensor or pair, see `vua.device.paged.KNOWN_AXES`."""
        if isinstance(layer, Tensor) or len(layer) != 2 or layer[0].dim() != 4:
            raise InputError(
                f"a layer of kvcaches is {_kind(layer)}; expected a pair (K, V) of "
                "[num_blocks, block_size, num_heads, head_size]"
            )
        return "BNHD"

    def _paged(self, kwargs: dict[str, Any], tensor: Tensor) -> PagedCache:
        layers = self.kvcaches_of(kwargs)
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

    def _bounce(self, tensor: Tensor, device: torch.device) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    def _from(self, tensor: Tensor, paged: PagedCache, slots: Tensor) -> None:
        near = tensor if tensor.device == paged.device else self._bounce(tensor, paged.device)
        if near is not tensor and bool((slots < 0).any()):
            near.copy_(tensor)  # what has no slot keeps its bytes
        gather(paged, slots, *_chunk(near, paged))
        if near is not tensor:
            tensor.copy_(near)
        synchronize(paged.device)

    def _to(self, tensor: Tensor, paged: PagedCache, slots: Tensor) -> None:
        near = tensor
        if tensor.device != paged.device:
            near = self._bounce(tensor, paged.device)
            near.copy_(tensor, non_blocking=True)
        scatter(paged, slots, *_chunk(near, paged))
        synchronize(paged.device)


class VLLMPagedMemGPUConnector(_PagedConnector):
    """For paged caches: ``kvcaches[layer]`` is (K, V), ``[blocks, block_size, heads, head_size]``.

    ``slot_mapping``, int64, has one slot per token of the whole sequence. A token with a negative
    slot is skipped on both sides; callers keep [start, end) clear of such.
    """

    @torch.inference_mode()
    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Copy the slots of tokens ``start`` to ``end`` into the KV_BLOB object.

        Raises:
            ValueError: ``kvcaches`` or ``slot_mapping`` is missing or does not fit; the format is
                not KV_BLOB.
            AssertionError: The memory object has no tensor.
        """
        blob = self.blob_of(memory_obj, start, end, fmt=MemoryFormat.KV_BLOB)
        self._from(blob, self._paged(kwargs, blob), self._slots(kwargs, start, end))

    @torch.inference_mode()
    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Copy the KV_BLOB object into the slots of tokens ``start`` to ``end`` alone.

        Raises as :meth:`from_gpu` does.
        """
        blob = self.blob_of(memory_obj, start, end, fmt=MemoryFormat.KV_BLOB)
        self._to(blob, self._paged(kwargs, blob), self._slots(kwargs, start, end))


class VLLMPagedMemGPUConnectorV2(_PagedConnector):
    """For paged caches in any layout that vLLM has had: one tensor or one (K, V) pair per layer.

    Beside the pairs of :class:`VLLMPagedMemGPUConnector`: ``[2, blocks, block_size, heads, size]``,
    ``[blocks, 2, block_size, heads, size]``, ``[blocks, heads, block_size, 2 * size]``, and for MLA
    ``[blocks, block_size, latent]`` (then with ``use_mla=True``, and memory objects of one array in
    the format KV_MLA_FMT). ``slot_mapping`` is the same, -1 for a prefix that must not be touched.
    """

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
            use_gpu: keep a buffer for one chunk on the engine's device; whole chunks to and from
                other devices pass through it. Needs ``chunk_size``, ``dtype`` and ``device``.
            kwargs: ``chunk_size`` (tokens), ``dtype``, ``device``; ``use_mla``; ``axes``, to name
                the cache's layout (`vua.device.paged.KNOWN_AXES`) instead of having it recognised.

        Raises ValueError on bad sizes, or if ``use_gpu`` lacks one of its three.
        """
        super().__init__(hidden_dim_size, num_layers)
        self.use_mla = bool(kwargs.get("use_mla", False))
        self._named_axes: str | None = kwargs.get("axes")
        self._remembered: Any = None
        self._buffer: Tensor | None = None
        if use_gpu:
            missing = [n for n in ("chunk_size", "dtype", "device") if kwargs.get(n) is None]
            if missing:
                raise InputError(f"use_gpu=True needs {', '.join(missing)}")
            shape = self.get_shape(kwargs["chunk_size"])
            self._buffer = torch.empty(shape, dtype=kwargs["dtype"], device=kwargs["device"])

    @property
    def _format(self) -> MemoryFormat:
        return MemoryFormat.KV_MLA_FMT if self.use_mla else MemoryFormat.KV_BLOB

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return ``[2, num_layers, num_tokens, hidden_dim_size]``; 1 instead of 2 for MLA."""
        arrays = 1 if self.use_mla else 2
        return torch.Size([arrays, self.num_layers, num_tokens, self.hidden_dim_size])

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        """Remember ``kvcaches``, if given, for calls that do not pass it."""
        if kwargs.get("kvcaches") is not None:
            self._remembered = kwargs["kvcaches"]

    @torch.inference_mode()
    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Copy the slots of tokens ``start`` to ``end`` into the object and mark it as KV_BLOB.

        Rows of tokens with a negative slot keep their bytes.

        Raises:
            ValueError: ``kvcaches`` or ``slot_mapping`` is missing or does not fit.
            AssertionError: The memory object has no tensor.
        """
        tensor = self.blob_of(memory_obj, start, end, fmt=None)
        self._from(tensor, self._paged(kwargs, tensor), self._slots(kwargs, start, end))
        set_format(memory_obj, self._format)

    @torch.inference_mode()
    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Copy the object into the slots of tokens ``start`` to ``end`` alone.

        ``vllm_cached_tokens`` (0 by default): so many leading tokens are already in the cache,
        maybe in shared blocks, and are not written.

        Raises:
            ValueError: ``kvcaches`` or ``slot_mapping`` is missing or does not fit; the format is
                not KV_BLOB (MLA: KV_MLA_FMT).
            AssertionError: The memory object has no tensor.
        """
        tensor = self.blob_of(memory_obj, start, end, fmt=self._format)
        paged, slots = self._paged(kwargs, tensor), self._slots(kwargs, start, end)
        cached = min(end - start, max(0, int(kwargs.get("vllm_cached_tokens") or 0) - start))
        if cached:
            slots = slots.clone()
            slots[:cached] = -1
        self._to(tensor, paged, slots)

    def kvcaches_of(self, kwargs: dict[str, Any]) -> Sequence[Any]:
        """Return the layers of ``kvcaches``, given or remembered. Raises ValueError if neither."""
        if kwargs.get("kvcaches") is None and self._remembered is not None:
            kwargs = {**kwargs, "kvcaches": self._remembered}
        return super().kvcaches_of(kwargs)

    def _bounce(self, tensor: Tensor, device: torch.device) -> Tensor:
        buffer = self._buffer
        if buffer is None or buffer.device != device:
            return super()._bounce(tensor, device)
        same = (tensor.shape, tensor.dtype) == (buffer.shape, buffer.dtype)
        return buffer if same else super()._bounce(tensor, device)

    def _axes(self, layer: Any) -> str:
        if self._named_axes is not None:
            return self._named_axes
        if not isinstance(layer, Tensor):
            return super()._axes(layer)
        axes = _recognised(tuple(layer.shape), self.hidden_dim_size, latent=self.use_mla)
        if axes is None:
            raise InputError(
                f"a layer of kvcaches is {_kind(layer)}, which is an unknown layout, or could be "
                f"more than one, for {self.hidden_dim_size} elements per token; name it with axes="
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
