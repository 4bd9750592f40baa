"""The library without an engine: put KV caches of token prefixes, get the longest one back.

``VUA(config, path)`` keeps caches in a directory that any process may share. Tokens are split into
chunks of ``split_factor``; each chunk is one file named by the hash of all tokens up to its end, so
two prompts share the chunks of their common prefix. Everything returned is verified. Damaged or
missing chunks shorten the prefix; they never cause an error or wrong bytes.
"""

from __future__ import annotations

import difflib
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

from vua.errors import ConfigError, InputError, LayoutError, how_to_get

try:
    import torch
except ModuleNotFoundError as problem:
    raise how_to_get(problem) from None

from vua.capacity.limits import Limits, nbytes_of
from vua.connector.load_policy import savings_at
from vua.format.entry import EntryCodec
from vua.format.identity import Identity
from vua.format.keys import KeyChain
from vua.io.memory import BufferPool
from vua.io.pool import Job, Pool
from vua.security.keyring import NoKeyError, check_keys
from vua.security.settings import Security
from vua.storage.location import Location, nearest
from vua.store.agreement import Label
from vua.store.namespace import Access, Namespace
from vua.store.place import LazyNamespace, locate
from vua.store.store import Store
from vua.store.tensors import Cache, KVCache, allocate, memory_map, sequences, sequences_with_caches
from vua.store.writer import EntryWriter

__all__ = ["VUA", "ClosestKV", "VUAConfig"]

log = logging.getLogger(__name__)


class _OnClassOrInstance:
    """A method that receives the instance if there is one, else the class."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: object, owner: type) -> Callable[..., torch.Tensor]:
        target = owner if instance is None else instance
        return lambda tokens: self._function(target, tokens)


_OFTEN = {
    "chunk_tokens": "split_factor",
    "chunk_size": "split_factor",
    "key_file": "security",
    "tenant_keys": "security",
    "trusted_uids": "security",
    "capacity_bytes": "max_bytes",
}


class VUAConfig:
    """Settings of a :class:`vua.core.VUA`; pass the class for the defaults, or an instance.

    A subclass may set the attributes instead. Caches stored with different ``split_factor``,
    ``model`` or ``epoch`` do not see each other.

    >>> import torch
    >>> VUAConfig(split_factor=16).trim_to_split_factor(torch.arange(40)).shape
    torch.Size([32])
    """

    split_factor: int = 64
    """Tokens per chunk, 1..65536: the granularity of reuse."""
    model: str = "default"
    """Name of the weights and settings that K and V depend on: give each its own."""
    epoch: str = ""
    """Change it to leave everything stored so far unused, e.g. after new weights."""
    durable: bool = False
    """fsync each file. Without it a power cut may cost recent chunks (never wrong bytes)."""
    threads: int = min(4, os.cpu_count() or 1)
    """Sequences of a batch that are worked on at the same time."""
    buffer_bytes: int = 1 << 30
    """Bytes of freed result buffers to keep for reuse. 0 disables reuse."""

    max_bytes: int | str | None = None
    """Size of the whole directory: bytes, ``"500G"`` or ``"80%"`` of the file system."""
    min_free_bytes: int | str | None = None
    """Bytes of the file system that are left free, in the same forms."""
    ttl_s: float | None = None
    """Seconds without use after which a chunk is deleted; by default none."""
    security: Security = Security()
    """Whose files are read, who may read what is stored, and the keys."""

    _FIELDS = (
        *("split_factor", "model", "epoch", "durable", "threads", "buffer_bytes"),
        *("max_bytes", "min_free_bytes", "ttl_s", "security"),
    )

    def __init__(self, **settings: Any) -> None:
        """Set fields by name. Raises ConfigError for an unknown one, naming the nearest."""
        for name, value in settings.items():
            if name not in self._FIELDS:
                near = difflib.get_close_matches(name, self._FIELDS, n=1, cutoff=0.6)
                meant = _OFTEN.get(name) or (near[0] if near else None)
                hint = f"the nearest is {meant!r}" if meant else f"it has {', '.join(self._FIELDS)}"
                raise ConfigError(f"VUAConfig has no setting {name!r}; {hint}")
            setattr(self, name, value)
        for name in ("split_factor", "threads"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"VUAConfig.{name} must be a positive int, found {value!r}")

        _ = self.bounds  # raises for unusable ones

    @property
    def bounds(self) -> Limits:
        """The limits on the directory's size in these settings."""
        return Limits(
            max_bytes=self.max_bytes, min_free_bytes=self.min_free_bytes, ttl_s=self.ttl_s
        )

    def check_room(self, path: Location, chunk_nbytes: int) -> None:
        """Refuse a `max_bytes` that is smaller than a chunk's file of ``chunk_nbytes``.

        Raises ConfigError, and OSError if the file system of ``path`` cannot be asked.
        """
        near = nearest(path)
        if self.max_bytes is None or near is None:
            return
        try:
            system = os.statvfs(near)
        except FileNotFoundError:
            return  # it is made with the first chunk, or that says why not
        limit = nbytes_of(self.max_bytes, system.f_blocks * system.f_frsize)
        if chunk_nbytes > limit:
            raise ConfigError(
                f"VUAConfig.max_bytes is {self.max_bytes!r}, {limit:,} bytes; one chunk of "
                f"{self.split_factor} tokens of this model takes {chunk_nbytes:,}, so nothing "
                "would ever be stored. Set more, or a smaller split_factor"
            )

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._FIELDS)
        return f"{type(self).__name__}({shown})"

    @_OnClassOrInstance
    def trim_to_split_factor(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return ``tokens`` (T,) or (B, T) cut to whole chunks. Works on the class too."""
        length = tokens.shape[-1]
        return tokens[..., : length - length % self.split_factor]


class ClosestKV(NamedTuple):
    """The longest stored prefix of a sequence. Empty (and false) if nothing is stored."""

    tokens: torch.Tensor
    """The prefix, cut from the given tokens (same dtype and dimensions): (n,) or (1, n)."""
    data: list[list[torch.Tensor]]
    """``[layer][0: K, 1: V]``, each ``(1, heads, n, head_dim)``; an empty list when n is 0."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the prefix."""
        return self.tokens.shape[-1]

    def __bool__(self) -> bool:
        """Whether anything was found."""
        return self.num_tokens > 0


def _device(wanted: str | torch.device) -> torch.device:
    """Return torch's device. Raises InputError where torch does not know it, or has no GPU."""
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError) as problem:
        msg = f"device: torch has no {wanted!r}; give 'cpu', 'cuda' or 'cuda:1'"
        raise InputError(msg) from problem
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"device {str(device)!r}: torch {torch.__version__} finds no GPU; give "
            "device='cpu', or install torch for CUDA (https://pytorch.org) and look at `nvidia-smi`"
        )
    return device


class VUA:
    """KV caches of token prefixes in a directory. Safe for threads, processes, hosts and forks.

    If an exception from a signal (Ctrl-C) ends a call, it is raised once the caller's tensors are
    no longer read; a second signal does not wait for that.

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
        path: str | os.PathLike[str] | Sequence[str],
        *,
        identity: Identity | None = None,
    ) -> None:
        """Use the directory ``path``, which is created (mode 0700) when missing.

        Args:
            config: settings.
            path: the directory, the URL of a place in a bucket (``s3://bucket/prefix``), or a list:
                a directory and slower tiers, see `vua.store.tiered`.
            identity: what the K/V depend on, in place of the config's ``model`` and ``epoch``.

        Raises:
            ConfigError: a setting is unusable, ``path`` is a file, or other users could
                replace its files.
            StorageError: the directory cannot be created.
        """
        self.config = config() if isinstance(config, type) else config
        if not isinstance(self.config, VUAConfig):
            msg = f"VUA(config, path): expected a VUAConfig first, found {config!r:.80}"
            raise ConfigError(msg)
        if not isinstance(path, str | os.PathLike | list | tuple) or not path:
            raise ConfigError(f"VUA(config, path): expected a path second, found {path!r:.80}")
        check_keys(self.config.security)
        self.path = locate(path, security=self.config.security)
        self._identity = identity or Identity(
            model=self.config.model,
            epoch=self.config.epoch,
            chunk_tokens=self.config.split_factor,
            name=self.config.model,
        )
        if self._identity.chunk_tokens != self.config.split_factor:
            raise ConfigError(
                f"the identity has {self._identity.chunk_tokens} tokens per chunk, split_factor is "
                f"{self.config.split_factor}; they must be equal"
            )
        config = self.config
        access = Access(config.durable, config.bounds, config.security)
        self._opened = LazyNamespace(self.path, self._identity, access)
        unnamed = self.config.model == VUAConfig.model
        self._label = None if identity else Label(self.path, self.config.model, default=unnamed)
        self._buffers = BufferPool(self.config.buffer_bytes)
        self._threads = Pool[None](self.config.threads, "vua")
        self.savings = savings_at(nearest(self.path), config.security)
        log.debug("open %s, namespace %s", self.path, self._identity.namespace[:12])

    def __enter__(self) -> VUA:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for running work and release the threads."""
        self._threads.close()
        self.savings.close()
        self._opened.close()

    # -- put ----------------------------------------------------------------------------------

    def put(
        self,
        tokens: torch.Tensor | Sequence[torch.Tensor] | Sequence[int],
        kvcache: KVCache | Sequence[KVCache],
    ) -> int:
        """Store the KV cache of ``tokens``, except chunks that are already stored.

        Args:
            tokens: (T,), (1, T) or (B, T) integer token ids, T a multiple of ``split_factor`` (see
                :meth:`VUAConfig.trim_to_split_factor`); or a list of B such sequences.
            kvcache: ``[layer][K, V]``, each ``(B, heads, T, head_dim)`` on any device; for a list
                of sequences a list of such caches.

        Returns:
            How many chunks were written.

        Raises:
            InputError: tokens or tensors are unusable (untrimmed, ragged, mixed dtypes...).
            LayoutError: they differ from what the directory holds for this model.
            ConfigError: another model's caches are stored under this label, as one stored chunk
                shows; or `max_bytes` is smaller than one chunk.
            NotWritableError, StorageFullError, StorageError: the directory refuses.

        Other readers see a chunk only once it is whole. An error, or a crash at any moment, leaves
        everything stored before unchanged.
        """
        ids, caches = sequences_with_caches(tokens, kvcache, self.config.split_factor)
        if not any(ids):
            return 0
        namespace = self._namespace_for(caches)
        store, chains = namespace.stores[0], [namespace.keys(one) for one in ids]
        pairs = list(zip(chains, caches, strict=True))
        met = self._threads.map(lambda job: self._stored_chunks(store, *job.what), pairs)
        return sum(
            self._threads.map(
                lambda job: self._put(job, store, *job.what[0], job.what[1]),
                zip(pairs, met, strict=True),
            )
        )

    def _namespace_for(self, caches: Sequence[Cache]) -> Namespace:
        layouts = {cache.layout(self.config.split_factor) for cache in caches}
        if len(layouts) != 1:
            raise LayoutError(f"the sequences' KV caches differ in shape or dtype: {layouts}")
        layout = layouts.pop()
        if self._opened.writing is None or self._opened.writing.layouts != (layout,):
            codec = EntryCodec(self._identity.namespace, layout, layout.full)
            self.config.check_room(self.path, codec.file_nbytes)
        return self._opened.to_write([layout])  # raises for another one, unless it was emptied

    def _stored_chunks(self, store: Store, keys: KeyChain, cache: Cache) -> int:
        stored = store.lookup(keys)
        if self._label is not None:
            self._label.compare(store, keys[stored - 1] if stored else None, cache)
        return stored

    def _put(
        self, job: Job[tuple[Any, int]], store: Store, keys: KeyChain, cache: Cache, stored: int
    ) -> int:
        saver = EntryWriter(store, cache.memory(self.config.split_factor))
        saver.wanted = lambda: job.wanted
        # Before evicting anything for the rest.
        store.used(keys, stored, wait=stored < len(keys), storing=True)
        written = saver.save_all(keys)
        log.debug("put %d tokens: %d of %d chunks written", cache.length, written, len(keys))
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
            device: device of the returned tensors.

        Returns:
            A :class:`ClosestKV`, or a list of them. If nothing is stored it has 0 tokens and no
                layers. The tensors are the caller's own, to keep and to change; their memory is
                reused for a later answer once all of them, and all views of them, are gone.

        Raises:
            InputError: the tokens are unusable. Never for the state of the directory.
        """
        batch, place = sequences(tokens), _device(device)
        namespace = self.namespace()
        answers = self._threads.map(
            lambda job: self._get(namespace, *job.what, place),
            zip(batch.ids, batch.rows, strict=True),
        )
        return answers if batch.listed else answers[0]

    def lookup(self, tokens: torch.Tensor | Sequence[torch.Tensor] | Sequence[int]) -> list[int]:
        """Return how many leading tokens of each sequence are stored, in whole chunks.

        Checks names only: a hint, because only a load verifies. O(log n) probes per sequence.

        Args:
            tokens: as for :meth:`get_closest`.

        Raises:
            InputError: the tokens are unusable. Never for the state of the directory.
        """
        namespace = self.namespace()
        found = [self._stored(namespace, ids)[1] for ids in sequences(tokens).ids]
        return [chunks * self.config.split_factor for chunks in found]

    def namespace(self) -> Namespace | None:
        """Return the namespace that is read, with its counts; None if there is nothing to read."""
        try:
            return self._opened.to_read()
        except OSError as problem:
            log.warning("%s cannot be read, all misses: %s", self.path, problem)
            return self._opened.reading

    def _get(
        self, namespace: Namespace | None, ids: bytes, row: torch.Tensor, device: torch.device
    ) -> ClosestKV:
        (keys, found), began_s = self._stored(namespace, ids), time.monotonic()
        if found and self._label is not None and not self._label.trusted():
            found = 0
        size = self.config.split_factor
        self.savings.looked_up(self._identity.namespace, found, len(ids) // 4 // size, size)
        if namespace is None or keys is None or not found:
            log.debug("get %d tokens: nothing stored", len(ids) // 4)
            return ClosestKV(row[..., :0], [])
        store = namespace.stores[0]
        layout = store.layout
        try:
            arrays = allocate(layout, found, self._buffers, pinned=device.type == "cuda")
        except (MemoryError, RuntimeError) as problem:
            log.warning("no memory for %d chunks of %s, a miss: %s", found, layout, problem)
            return ClosestKV(row[..., :0], [])
        memory = memory_map(arrays, layout.chunk_tokens)
        loaded = store.load(keys.first(found), memory, weed=True)
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
        self.savings.loaded(length, 0, time.monotonic() - began_s)
        return ClosestKV(row[..., :length], data)

    @staticmethod
    def _stored(namespace: Namespace | None, ids: bytes) -> tuple[KeyChain | None, int]:
        if namespace is None:
            return None, 0
        try:
            keys = namespace.keys(ids)
        except NoKeyError as problem:
            namespace.keyring.faults.tell(problem, "nothing is found")
            return None, 0
        return keys, namespace.stores[0].lookup(keys)

    # -- keep ---------------------------------------------------------------------------------

    def pin(self, tokens: torch.Tensor | Sequence[torch.Tensor] | Sequence[int]) -> list[int]:
        """Protect the stored chunks of these prefixes from eviction.

        Args:
            tokens: as for :meth:`get_closest`.

        Returns:
            For each sequence how many of its tokens are held, in whole chunks: all that are stored,
                0 if the directory refuses. Pins survive restarts, `vua pin` lists them; chunks
                stored later are not held. Reads one header per chunk.

        Raises:
            InputError: the tokens are unusable. Never for the state of the directory.
        """
        return self._hold(tokens, pin=True)

    def unpin(self, tokens: torch.Tensor | Sequence[torch.Tensor] | Sequence[int]) -> list[int]:
        """Undo :meth:`pin` of these sequences and of prefixes of them.

        Returns for each sequence how many tokens were released; chunks held by other pins stay
        held. Raises as :meth:`pin` does.
        """
        return self._hold(tokens, pin=False)

    def _hold(
        self, tokens: torch.Tensor | Sequence[torch.Tensor] | Sequence[int], *, pin: bool
    ) -> list[int]:
        batch, namespace, held = sequences(tokens), self.namespace(), []
        for ids in batch.ids:
            keys, stored = self._stored(namespace, ids)
            chunks = 0
            if namespace and keys:
                names = [key.name for key in keys.first(stored)]
                capacity = namespace.capacity
                chunks = capacity.pin_prefix(names) if pin else capacity.unpin_prefix(names)
            held.append(chunks * self.config.split_factor)
        return held
