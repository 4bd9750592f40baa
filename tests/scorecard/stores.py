"""Subjects of the scorecard: VUA's own store, and any storage that follows `Storage`.

::

    def make(root, nbytes, **options):          # in mine.py
        return StoreSubject("mine 1.0", MyStorage, root, nbytes, **options)

    python3 dev.py scorecard --subject mine.py:make
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

import vua
from scorecard.subject import Key, NotApplicableError, Subject
from vua.capacity.gc import collect
from vua.capacity.limits import Limits, ResolvedLimits
from vua.capacity.removal import GRACE_S
from vua.errors import StorageError
from vua.format.identity import Identity
from vua.format.keys import ChunkKey, KeyChain
from vua.format.layout import KVLayout
from vua.native import MemoryMap
from vua.security.settings import Security
from vua.storage.base import Batch, Entry, ReadResult, Storage, WriteResult
from vua.storage.names import TEMPORARY
from vua.store.namespace import Namespace
from vua.store.store import Store
from vua.store.writer import EntryWriter
from vua.testing.faulty import FaultyStorage

_TOKENS: Final = 4
_LAYERS: Final = 2
_HEADS: Final = 2


def layout_of(nbytes: int) -> KVLayout:
    """Return a layout whose chunks have ``nbytes`` bytes of payload, a multiple of 32."""
    dim, rest = divmod(nbytes, _LAYERS * _HEADS * _TOKENS * 2)
    if rest:
        raise ValueError(f"{nbytes} bytes are no multiple of 32")
    return KVLayout(_LAYERS, _HEADS, dim, dim, "U8", _TOKENS)


def memory_of(layout: KVLayout, buffer: memoryview) -> MemoryMap:
    """Return the map of one chunk that lies in ``buffer`` as it does in a file."""
    data = np.frombuffer(buffer, dtype=np.uint8)
    extent = layout.extent_nbytes[0]
    array = layout.kv_heads * layout.layers * extent
    layers = np.arange(layout.layers, dtype=np.uint64) * np.uint64(extent)
    bases = [np.uint64(data.ctypes.data + place * array) + layers for place in range(2)]
    zero = np.zeros(1, dtype=np.uint64)
    stride = layout.layers * extent
    return MemoryMap(tuple(bases), (stride, stride), (zero, zero), layout.chunk_tokens, data)


class _ShortNames(FaultyStorage):
    """A storage that knows only the first bits of a chunk's name."""

    def __init__(self, inner: Storage, bits: int) -> None:
        super().__init__(inner, {})
        self._digits = bits // 4

    def _short(self, chunk: str) -> str:
        return chunk[: self._digits] + "0" * (64 - self._digits) + chunk[64:]

    def write(self, batch: Batch) -> WriteResult:
        return self.inner.write(dataclasses.replace(batch, names=[*map(self._short, batch.names)]))

    def read(self, batch: Batch) -> ReadResult:
        return self.inner.read(dataclasses.replace(batch, names=[*map(self._short, batch.names)]))

    def exists(self, names: Sequence[str], nbytes: int | None = None) -> Sequence[bool]:
        return self.inner.exists([*map(self._short, names)], nbytes)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        return self.inner.list(self._short(prefix))

    def delete(self, name: str, if_version: bytes | None = None) -> bool:
        return self.inner.delete(self._short(name), if_version)


class StoreSubject(Subject):
    """A :class:`vua.store.store.Store` over a storage of any kind, one namespace per model."""

    has_salts = has_models = True

    def __init__(
        self,
        name: str,
        open_storage: Callable[[Path], Storage],
        root: Path,
        nbytes: int,
        *,
        max_bytes: int | None = None,
        durable: bool = False,
    ) -> None:
        """Use ``open_storage(directory)`` for the storage of each namespace's directory."""
        if max_bytes is not None or durable:
            raise NotApplicableError("a bare storage has neither limits nor durability")
        self.name, self.root, self.nbytes = name, root, nbytes
        self.layout = layout_of(nbytes)
        self._open = open_storage
        self._stores: dict[str, Store] = {}

    def identity(self, model: str) -> Identity:
        return Identity(model=model, kv_dtype="uint8", chunk_tokens=_TOKENS, name=model)

    def store(self, model: str = "model") -> Store:
        store = self._stores.get(model)
        if store is None:
            store = self._stores[model] = self.make_store(model)
        return store

    def make_store(self, model: str) -> Store:
        namespace = self.identity(model).namespace
        directory = self.root / namespace
        directory.mkdir(mode=0o700, exist_ok=True)
        return Store(self._open(directory), namespace, self.layout)

    def chunk(self, key: Key) -> ChunkKey:
        """Return the key of the chunk that stands for ``key``: the first one of a prompt."""
        low, high = key.number & 0xFFFFFFFF, key.number >> 32
        ids = np.array([low, high, 0, 0], dtype="<u4").tobytes()
        extras = [("salt", key.salt.encode(errors="surrogatepass"))]
        naming = self.store(key.model).keyring.naming(extras[0][1])
        return KeyChain(ids, _TOKENS, {0: extras} if key.salt else None, naming)[0]

    def _cut(self, key: Key) -> None:
        """Let names collide, in front of the storage: what files say of themselves stays whole."""
        store = self.store(key.model)
        if self.name_bits < 256 and not isinstance(store.storage, _ShortNames):
            store.storage = _ShortNames(store.storage, self.name_bits)
            store.capacity = None

    def put(self, key: Key, data: bytes) -> bool:
        """Save; a storage that refuses has not stored, which is no error."""
        self._cut(key)
        store, chunk = self.store(key.model), self.chunk(key)
        try:
            EntryWriter(store, memory_of(self.layout, memoryview(data))).save([chunk])
        except StorageError:
            return False
        return store.lookup([chunk]) == 1

    def get(self, key: Key, into: memoryview) -> bool:
        self._cut(key)
        loaded = self.store(key.model).load([self.chunk(key)], memory_of(self.layout, into))
        return loaded.chunks == 1

    def holds(self, key: Key) -> bool:
        return self.store(key.model).lookup([self.chunk(key)]) == 1

    def files(self, key: Key) -> list[Path]:
        """Find the files in directories that are named after the chunk."""
        directory = self.root / self.identity(key.model).namespace
        name = self.chunk(key).name
        found = (directory / name[:2] / name).glob("*")
        return sorted(path for path in found if not path.name.startswith((".", "after-", "pin-")))

    def close(self) -> None:
        for store in self._stores.values():
            store.close()
        self._stores.clear()


class VuaSubject(StoreSubject):
    """VUA as it is used: files in a directory, a capacity that bounds them, `vua gc`."""

    has_gc = True

    def __init__(
        self,
        root: Path,
        nbytes: int,
        *,
        max_bytes: int | None = None,
        durable: bool = False,
        security: Security | None = None,
    ) -> None:
        super().__init__(f"VUA {vua.__version__}", self._no_storage, root, nbytes)
        self._bounds = (
            Limits() if max_bytes is None else Limits(max_bytes=max_bytes, min_free_bytes=0)
        )
        self.floor = ResolvedLimits.of(root, self._bounds).min_free_bytes
        self._durable, self._security = durable, security

    @staticmethod
    def _no_storage(directory: Path) -> Storage:
        raise NotImplementedError(directory)

    def make_store(self, model: str) -> Store:
        """Open the namespace of a model, with its capacity."""
        identity = self.identity(model)
        bounds, durable = self._bounds, self._durable
        return Namespace.create(
            self.root,
            identity,
            [self.layout],
            durable=durable,
            bounds=bounds,
            security=self._security,
        ).stores[0]

    def sweep(self) -> None:
        """Age what writers have left, then do what `vua gc` does."""
        old_s = time.time() - 2 * GRACE_S
        for directory, _, names in os.walk(self.root):  # unlike rglob, skips what is deleted
            for name in names:
                if name.startswith(TEMPORARY):
                    with contextlib.suppress(FileNotFoundError):  # stored or deleted by now
                        os.utime(f"{directory}/{name}", (old_s, old_s))
        collect(self.root, ResolvedLimits.of(self.root, self._bounds))


def make_vua(
    root: Path, nbytes: int, *, max_bytes: int | None = None, durable: bool = False
) -> Subject:
    return VuaSubject(root, nbytes, max_bytes=max_bytes, durable=durable)
