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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, overload

import torch

from vua.bounds import Bounds
from vua.directory import check_root, create_store, open_store
from vua.errors import ConfigError, InputError, LayoutError
from vua.identity import Identity
from vua.keyring import Keyring, NoKeyError, check_keys
from vua.keys import KeyChain
from vua.security import Security
from vua.store import Store
from vua.tensors import Cache, OnClassOrInstance, allocate, memory_map, sequences

__all__ = ["VUA", "ClosestKV", "VUAConfig"]

log = logging.getLogger(__name__)

KVCache = Sequence[Sequence[torch.Tensor]]
"""``[layer][0: K, 1: V]``, each ``(batch, heads, tokens, head_dim)``."""


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
    max_bytes: int | str | None = None
    """Size of the whole directory: bytes, ``"500G"`` or a share of the file system. See Bounds."""
    min_free_bytes: int | str | None = None
    """Bytes of the file system that are left free, in the same forms."""
    ttl_s: float | None = None
    """Seconds without use after which a chunk is deleted; by default none."""
    security: Security = Security()
    """Whose files are read, who may read what is stored, and the keys."""

    _FIELDS = (
        *("split_factor", "model", "epoch", "durable", "threads"),
        *("max_bytes", "min_free_bytes", "ttl_s", "security"),
    )

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
        _ = self.bounds  # raises for unusable ones

    @property
    def bounds(self) -> Bounds:
        """What the settings say about the directory's size."""
        return Bounds(
            max_bytes=self.max_bytes, min_free_bytes=self.min_free_bytes, ttl_s=self.ttl_s
        )

    def __repr__(self) -> str:
        """Return the call that makes an equal config."""
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._FIELDS)
        return f"{type(self).__name__}({shown})"

    @OnClassOrInstance
    def trim_to_split_factor(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return ``tokens`` (T,) or (B, T) cut to whole chunks. Works on the class too."""
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
        self,
        config: VUAConfig | type[VUAConfig],
        path: str | os.PathLike[str],
        *,
        identity: Identity | None = None,
    ) -> None:
        """Use the directory ``path``, which is created (mode 0700) when missing.

        Args:
            config: settings.
            path: the directory.
            identity: what the K/V depend on, in place of the config's ``model`` and ``epoch``.

        Raises:
            ConfigError: a setting is unusable, ``path`` is a file, or others could replace what
                lies in it.
            StorageError: the directory cannot be created.
        """
        self.config = config() if isinstance(config, type) else config
        check_keys(self.config.security)
        self.path = check_root(path, security=self.config.security)
        self._identity = identity or Identity(
            model=self.config.model,
            epoch=self.config.epoch,
            chunk_tokens=self.config.split_factor,
            name=self.config.model,
        )
        if self._identity.chunk_tokens != self.config.split_factor:
            msg = (
                f"the identity has {self._identity.chunk_tokens} tokens per chunk, split_factor is "
                f"{self.config.split_factor}; they must be equal"
            )
            raise ConfigError(msg)
        self._keyring = Keyring(self._identity.namespace, self.config.security)
        self._reader: Store | None = None
        self._writer: Store | None = None
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(self.config.threads, thread_name_prefix="vua")
        log.debug("open %s, namespace %s", self.path, self._identity.namespace[:12])

    def __enter__(self) -> VUA:  # noqa: PYI034 - typing.Self needs Python 3.11
        """Return the object itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Wait for running work and release the threads."""
        self._pool.shutdown()
        for store in filter(None, (self._reader, self._writer)):
            store.close()

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
        batch = sequences(tokens)
        if isinstance(tokens, torch.Tensor) or not batch.listed:
            caches = [Cache(kvcache, row, len(batch.ids)) for row in range(len(batch.ids))]
        else:
            if len(kvcache) != len(batch.ids):
                msg = f"{len(batch.ids)} sequences need as many KV caches, found {len(kvcache)}"
                raise InputError(msg)
            caches = [Cache(one, 0, 1) for one in kvcache]
        for ids, cache in zip(batch.ids, caches, strict=True):
            self._check(len(ids) // 4, cache)
        if not any(batch.ids):
            return 0
        store = self._store_for(caches)
        pairs = zip(batch.ids, caches, strict=True)
        return sum(self._pool.map(lambda pair: self._put(store, *pair), pairs))

    def _check(self, length: int, cache: Cache) -> None:
        if length % self.config.split_factor:
            msg = (
                f"{length} tokens are no multiple of split_factor {self.config.split_factor}; "
                "use VUAConfig.trim_to_split_factor() and cut the KV cache to the same length"
            )
            raise InputError(msg)
        if cache.length != length:
            msg = f"{length} tokens need K and V of {length} tokens, found {cache.length}"
            raise InputError(msg)

    def _store_for(self, caches: Sequence[Cache]) -> Store:
        layouts = {cache.layout(self.config.split_factor) for cache in caches}
        if len(layouts) != 1:
            msg = f"the sequences' KV caches differ in shape or dtype: {layouts}"
            raise LayoutError(msg)
        layout = layouts.pop()
        with self._lock:
            if self._writer is None or self._writer.layout != layout:
                self._writer = create_store(  # raises for another layout, unless it was emptied
                    self.path,
                    self._identity,
                    layout,
                    durable=self.config.durable,
                    bounds=self.config.bounds,
                    security=self.config.security,
                )
                self._reader = self._writer
            return self._writer

    def _put(self, store: Store, ids: bytes, cache: Cache) -> int:
        keys = KeyChain(ids, self.config.split_factor, naming=self._keyring.naming())
        saver, written = store.saver(cache.memory(self.config.split_factor)), 0
        stored = store.lookup(keys)
        store.used(keys, stored, wait=stored < len(keys))  # before it makes room for the rest
        for place in range(len(keys)):
            written += saver.save(keys[place], place=place)
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
        batch = sequences(tokens)
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
            if self._reader is None or self._reader.storage.gone:
                try:
                    self._reader = self._writer or open_store(
                        self.path, self._identity, security=self.config.security
                    )
                except OSError as problem:
                    log.warning("%s cannot be read, all misses: %s", self.path, problem)
            return self._reader

    def _get(
        self, store: Store | None, ids: bytes, row: torch.Tensor, device: torch.device
    ) -> ClosestKV:
        try:
            keys = KeyChain(ids, self.config.split_factor, naming=self._keyring.naming())
            found = store.lookup(keys) if store is not None else 0
        except NoKeyError as problem:
            log.warning("all misses: %s", problem)
            found = 0
        if store is None or found == 0:
            log.debug("get %d tokens: nothing stored", len(ids) // 4)
            return ClosestKV(row[..., :0], [])
        layout = store.layout
        arrays = allocate(layout, found, pinned=device.type == "cuda")
        loaded = store.load(keys.first(found), memory_map(arrays, layout.chunk_tokens))
        length = loaded.chunks * layout.chunk_tokens
        store.used(keys, loaded.chunks)
        log.debug("get %d tokens: %d found (%s)", len(ids) // 4, length, loaded.reason or "whole")
        if length == 0:
            return ClosestKV(row[..., :0], [])
        if loaded.chunks < found:
            arrays = [[t[:, :length].contiguous() for t in layers] for layers in arrays]
        data = [[t[None].to(device) for t in pair] for pair in zip(*arrays, strict=True)]
        if not layout.v_dim:
            data = [[k, k.new_empty((*k.shape[:-1], 0))] for (k,) in data]
        return ClosestKV(row[..., :length], data)
