"""The library without an engine: put KV caches of token prefixes, get the longest one back.

``VUA(config, path)`` keeps caches in a directory that any process may share. Tokens are split into
chunks of ``split_factor``; each chunk is one file named by the hash of all tokens up to its end, so
two prompts share whatever prefix they share. What comes back is verified; what is damaged or
missing is a shorter prefix, never an error and never other bytes.
"""

from __future__ import annotations

import difflib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, overload

import numpy as np
import torch

from vua.directory import check_root, create_store, open_store
from vua.errors import ConfigError, InputError, LayoutError
from vua.identity import Identity
from vua.keys import KeyChain, token_ids
from vua.layout import KVLayout, MemoryMap
from vua.serdes import DTYPES
from vua.store import Store

__all__ = ["VUA", "ClosestKV", "VUAConfig"]

log = logging.getLogger(__name__)

KVCache = Sequence[Sequence[torch.Tensor]]
"""``[layer][0: K, 1: V]``, each ``(batch, heads, tokens, head_dim)``."""

_DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


class _OnClassOrInstance:
    """A method that sees the instance when there is one and the class when there is not."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: object, owner: type) -> Callable[..., torch.Tensor]:
        target = owner if instance is None else instance
        return lambda tokens: self._function(target, tokens)


class VUAConfig:
    """Settings of a :class:`VUA`; pass the class for the defaults, or an instance.

    A subclass may set the attributes instead. Caches stored with different ``split_factor``,
    ``model`` or ``epoch`` do not see each other.

    >>> VUAConfig(split_factor=16).trim_to_split_factor(torch.arange(40)).shape
    torch.Size([32])
    """

    split_factor: int = 64
    """Tokens per chunk, 1..65536: the granularity of reuse."""
    model: str = "default"
    """Label of whatever the K/V depend on: caches of different models must not share one."""
    epoch: str = ""
    """Change it to leave everything stored so far unused, e.g. after new weights."""
    durable: bool = False
    """fsync each file. Without it a power cut may cost recent chunks (never wrong bytes)."""
    threads: int = min(4, os.cpu_count() or 1)
    """Sequences of a batch that are worked on at the same time."""

    _FIELDS = ("split_factor", "model", "epoch", "durable", "threads")

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401
        """Set fields by name. Raises ConfigError for an unknown one, naming the nearest."""
        for name, value in settings.items():
            if name not in self._FIELDS:
                near = difflib.get_close_matches(name, self._FIELDS, n=1, cutoff=0.0)[0]
                msg = f"VUAConfig has no setting {name!r}; the nearest is {near!r}"
                raise ConfigError(msg)
            setattr(self, name, value)
        for name in ("split_factor", "threads"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                msg = f"VUAConfig.{name} must be a positive int, found {value!r}"
                raise ConfigError(msg)

    def __repr__(self) -> str:
        """Return the call that makes an equal config."""
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._FIELDS)
        return f"{type(self).__name__}({shown})"

    @_OnClassOrInstance
    def trim_to_split_factor(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return ``tokens`` (T,) or (B, T) cut to a whole number of chunks. Works on the class too."""
        length = tokens.shape[-1]
        return tokens[..., : length - length % self.split_factor]


class ClosestKV(NamedTuple):
    """The longest stored prefix of a sequence. Empty (and false) when nothing is stored."""

    tokens: torch.Tensor
    """The prefix, cut from the tokens asked for (same dtype and dimensions): (n,) or (1, n)."""
    data: list[list[torch.Tensor]]
    """``[layer][0: K, 1: V]``, each ``(1, heads, n, head_dim)``; an empty list when n is 0."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the prefix."""
        return self.tokens.shape[-1]

    def __bool__(self) -> bool:
        """Whether anything was found."""
        return self.num_tokens > 0


class VUA:
    """KV caches of token prefixes in a directory. Safe for threads, processes and hosts.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as path, VUA(VUAConfig(split_factor=4), path) as vua:
    ...     kv = [[torch.ones(1, 2, 8, 16), torch.zeros(1, 2, 8, 16)]]
    ...     stored = vua.put(torch.arange(8), kv)
    ...     stored, vua.get_closest(torch.tensor([0, 1, 2, 3, 9, 9, 9, 9])).num_tokens
    (2, 4)
    """

    def __init__(
        self, config: VUAConfig | type[VUAConfig], path: str | os.PathLike[str]
    ) -> None:
        """Use the directory ``path``, which is created (mode 0700) when missing.

        Raises:
            ConfigError: a setting is unusable, or ``path`` is a file.
            StorageError: the directory cannot be created.
        """
        self.config = config() if isinstance(config, type) else config
        self.path = check_root(path)
        self._identity = Identity(
            model=self.config.model,
            epoch=self.config.epoch,
            chunk_tokens=self.config.split_factor,
            name=self.config.model,
        )
        self._reader: Store | None = None
        self._writer: Store | None = None
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(self.config.threads, thread_name_prefix="vua")
        log.debug("open %s, namespace %s", self.path, self._identity.namespace[:12])

    def __enter__(self) -> VUA:
        """Return the object itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Wait for running work and release the threads."""
        self._pool.shutdown()

    # -- put ----------------------------------------------------------------------------------

    def put(
        self,
        tokens: torch.Tensor | Sequence[torch.Tensor] | Sequence[int],
        kvcache: KVCache | Sequence[KVCache],
    ) -> int:
        """Store the KV cache of ``tokens``, except chunks that are stored already.

        Args:
            tokens: (T,), (1, T) or (B, T) integer token ids, T a multiple of ``split_factor``
                (see :meth:`VUAConfig.trim_to_split_factor`); or a list of B such sequences.
            kvcache: ``[layer][K, V]``, each ``(B, heads, T, head_dim)`` on any device; for a list
                of sequences a list of such caches.

        Returns:
            How many chunks were written.

        Raises:
            InputError: tokens or tensors are unusable (untrimmed, ragged, mixed dtypes...).
            LayoutError: they differ from what the directory holds for this model.
            NotWritableError, StorageFullError, StorageError: the directory refuses.

        A chunk is visible to others only when it is whole. An error, or a crash at any moment,
        leaves what was stored before as it was.
        """
        batch = _sequences(tokens)
        if isinstance(tokens, torch.Tensor) or not batch.listed:
            caches = [_Cache(kvcache, row, len(batch.ids)) for row in range(len(batch.ids))]
        else:
            if len(kvcache) != len(batch.ids):
                msg = f"{len(batch.ids)} sequences need as many KV caches, found {len(kvcache)}"
                raise InputError(msg)
            caches = [_Cache(one, 0, 1) for one in kvcache]  # type: ignore[arg-type]
        for ids, cache in zip(batch.ids, caches, strict=True):
            self._check(len(ids) // 4, cache)
        if not any(batch.ids):
            return 0
        store = self._store_for(caches)
        return sum(self._pool.map(lambda pair: self._put(store, *pair), zip(batch.ids, caches, strict=True)))

    def _check(self, length: int, cache: _Cache) -> None:
        if length % self.config.split_factor:
            msg = (
                f"{length} tokens are no multiple of split_factor {self.config.split_factor}; "
                "use VUAConfig.trim_to_split_factor() and cut the KV cache to the same length"
            )
            raise InputError(msg)
        if cache.length != length:
            msg = f"{length} tokens need K and V of {length} tokens, found {cache.length}"
            raise InputError(msg)

    def _store_for(self, caches: Sequence[_Cache]) -> Store:
        layouts = {cache.layout(self.config.split_factor) for cache in caches}
        if len(layouts) != 1:
            msg = f"the sequences' KV caches differ in shape or dtype: {layouts}"
            raise LayoutError(msg)
        layout = layouts.pop()
        with self._lock:
            if self._writer is None:
                self._writer = create_store(
                    self.path, self._identity, layout, durable=self.config.durable
                )
            elif self._writer.layout != layout:
                create_store(self.path, self._identity, layout)  # raises, saying what differs
            return self._writer

    def _put(self, store: Store, ids: bytes, cache: _Cache) -> int:
        keys = KeyChain(ids, self.config.split_factor)
        memory, written = cache.memory(self.config.split_factor), 0
        for place in range(len(keys)):
            written += store.save(keys[place], memory, place=place)
        log.debug("put %d tokens: %d of %d chunks written", len(ids) // 4, written, len(keys))
        return written

    # -- get ----------------------------------------------------------------------------------

    @overload
    def get_closest(
        self, tokens: Sequence[torch.Tensor], device: str | torch.device = "cpu"
    ) -> list[ClosestKV]: ...

    @overload
    def get_closest(
        self, tokens: torch.Tensor | Sequence[int], device: str | torch.device = "cpu"
    ) -> ClosestKV: ...

    def get_closest(
        self,
        tokens: torch.Tensor | Sequence[torch.Tensor] | Sequence[int],
        device: str | torch.device = "cpu",
    ) -> ClosestKV | list[ClosestKV]:
        """Return the KV cache of the longest stored prefix, in whole chunks.

        Args:
            tokens: (T,) or (1, T) token ids for one answer; (B, T) with B > 1, or a list of
                sequences, for a list of answers. T need not be a multiple of ``split_factor``.
            device: where the tensors shall be.

        Returns:
            A :class:`ClosestKV`, or a list of them. Nothing stored: one with 0 tokens, no layers.
            The tensors are the caller's own.

        Raises:
            InputError: the tokens are unusable. Never for the state of the directory.
        """
        batch = _sequences(tokens)
        store = self._store_to_read()
        answers = list(
            self._pool.map(
                lambda pair: self._get(store, pair[0], pair[1], torch.device(device)),
                zip(batch.ids, batch.rows, strict=True),
            )
        )
        return answers if batch.listed else answers[0]

    def _store_to_read(self) -> Store | None:
        with self._lock:
            if self._reader is None:
                self._reader = self._writer or open_store(self.path, self._identity)
            return self._reader

    def _get(
        self, store: Store | None, ids: bytes, row: torch.Tensor, device: torch.device
    ) -> ClosestKV:
        keys = KeyChain(ids, self.config.split_factor)
        found = store.lookup(keys) if store is not None else 0
        if store is None or found == 0:
            log.debug("get %d tokens: nothing stored", len(ids) // 4)
            return ClosestKV(row[..., :0], [])
        layout = store.layout
        arrays = _allocate(layout, found, pinned=device.type == "cuda")
        loaded = store.load(keys.first(found), _memory_map(arrays, layout.chunk_tokens))
        length = loaded.chunks * layout.chunk_tokens
        log.debug("get %d tokens: %d found (%s)", len(ids) // 4, length, loaded.reason or "whole")
        if length == 0:
            return ClosestKV(row[..., :0], [])
        if loaded.chunks < found:
            arrays = [[t[:, :length].contiguous() for t in layers] for layers in arrays]
        data = [[t[None].to(device) for t in pair] for pair in zip(*arrays, strict=True)]
        if not layout.v_dim:
            data = [[k, k.new_empty((*k.shape[:-1], 0))] for (k,) in data]
        return ClosestKV(row[..., :length], data)


class _Batch(NamedTuple):
    """Sequences taken apart: their ids as u32 bytes, and the tensors answers are cut from."""

    ids: list[bytes]
    rows: list[torch.Tensor]
    listed: bool
    """Whether the answer is a list."""


def _sequences(tokens: torch.Tensor | Sequence[torch.Tensor] | Sequence[int]) -> _Batch:
    if isinstance(tokens, torch.Tensor):
        if tokens.ndim not in (1, 2):
            msg = f"tokens of shape {tuple(tokens.shape)}; expected (T,), (1, T) or (B, T)"
            raise InputError(msg)
        if tokens.ndim == 2 and tokens.shape[0] != 1:
            rows = list(tokens)
            return _Batch([token_ids(row) for row in rows], rows, listed=True)
        return _Batch([token_ids(tokens)], [tokens], listed=False)
    if len(tokens) and isinstance(tokens[0], int):
        ids = token_ids(tokens)  # type: ignore[arg-type]
        row = torch.from_numpy(np.frombuffer(ids, dtype="<u4").astype(np.int64))
        return _Batch([ids], [row], listed=False)
    parts = [_sequences(row) for row in tokens]  # type: ignore[arg-type]
    if any(part.listed for part in parts):
        msg = "a list of sequences must hold one sequence per item, found a batch inside it"
        raise InputError(msg)
    return _Batch([part.ids[0] for part in parts], [part.rows[0] for part in parts], listed=True)


class _Cache:
    """One sequence's KV cache as it was given: checked, and addressed."""

    def __init__(self, kvcache: Any, row: int, rows: int) -> None:  # noqa: ANN401
        layers = [list(pair) for pair in kvcache]
        if not layers or any(len(pair) != 2 for pair in layers):
            msg = "a KV cache is a list of layers, each [K, V]; found " + (
                f"layers of {sorted({len(pair) for pair in layers})} tensors" if layers else "none"
            )
            raise InputError(msg)
        for number, (k, v) in enumerate(layers):
            for name, tensor in (("K", k), ("V", v)):
                if not isinstance(tensor, torch.Tensor) or tensor.ndim != 4:
                    shape = tuple(getattr(tensor, "shape", ()))
                    msg = (
                        f"{name} of layer {number} is a {type(tensor).__name__} of shape {shape}; "
                        "expected a tensor (batch, heads, tokens, head_dim)"
                    )
                    raise InputError(msg)
                if tensor.shape[0] != rows:
                    msg = f"{name} of layer {number}: batch {tensor.shape[0]}, tokens have {rows}"
                    raise InputError(msg)
        self.arrays = [[pair[array].detach()[row] for pair in layers] for array in (0, 1)]
        for array, name in zip(self.arrays, "KV", strict=True):
            if len({(t.shape, t.dtype) for t in array}) != 1:
                seen = sorted({f"{tuple(t.shape)} {t.dtype}" for t in array})
                msg = f"{name} differs between layers: {', '.join(seen)}; expected one shape"
                raise InputError(msg)
        k, v = self.arrays[0][0], self.arrays[1][0]
        if k.shape[:2] != v.shape[:2] or k.dtype != v.dtype:
            msg = (
                f"K {tuple(k.shape)} {k.dtype} and V {tuple(v.shape)} {v.dtype} differ in heads, "
                "tokens or dtype"
            )
            raise InputError(msg)
        self.length: int = k.shape[1]

    def layout(self, chunk_tokens: int) -> KVLayout:
        """Return the layout that these tensors have."""
        k, v = self.arrays[0][0], self.arrays[1][0]
        if k.dtype not in _DTYPE_NAMES:
            msg = f"KV caches of {k.dtype} are not supported; expected one of {list(_DTYPE_NAMES)}"
            raise InputError(msg)
        return KVLayout(
            layers=len(self.arrays[0]),
            kv_heads=k.shape[0],
            k_dim=k.shape[2],
            v_dim=v.shape[2],
            dtype=_DTYPE_NAMES[k.dtype],
            chunk_tokens=chunk_tokens,
        )

    def memory(self, chunk_tokens: int) -> MemoryMap:
        """Return where the bytes lie: in the tensors themselves where their rows are plain."""
        arrays = [[t.cpu() for t in array] for array in self.arrays if array[0].shape[2]]
        for array in arrays:
            strides = {t.stride() for t in array}
            dim = array[0].shape[2]
            if len(strides) != 1 or array[0].stride()[1:] != (dim, 1):
                array[:] = [t.contiguous() for t in array]
        return _memory_map(arrays, chunk_tokens)


def _allocate(layout: KVLayout, chunks: int, *, pinned: bool) -> list[list[torch.Tensor]]:
    """New tensors ``[K, V][layer]``, each (heads, tokens, head_dim)."""
    shape = (layout.layers, layout.kv_heads, chunks * layout.chunk_tokens)
    return [
        list(torch.empty((*shape, dim), dtype=DTYPES[layout.dtype], pin_memory=pinned))
        for dim in layout.dims
    ]


def _memory_map(arrays: list[list[torch.Tensor]], piece_tokens: int) -> MemoryMap:
    """Describe tensors ``[K, V][layer]``, each (heads, tokens, head_dim) with plain rows."""
    tokens = arrays[0][0].shape[1]
    pieces = np.arange(max(tokens // max(piece_tokens, 1), 1), dtype=np.uint64)
    return MemoryMap(
        base=tuple(np.array([t.data_ptr() for t in array], dtype=np.uint64) for array in arrays),
        head_stride=tuple(array[0].stride(0) * array[0].element_size() for array in arrays),
        piece_offset=tuple(
            pieces * np.uint64(piece_tokens * array[0].shape[2] * array[0].element_size())
            for array in arrays
        ),
        piece_tokens=piece_tokens,
        owner=arrays,
    )
