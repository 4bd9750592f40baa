"""The stored caches of a model whose layers are of one kind or of several.

Layers that attend to everything are one group, those with a sliding window of n tokens another, as
in every engine (docs/format.md). As in :mod:`vua.core`, what is loaded is what was saved, or
nothing. Safe for threads, processes and forks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from vua.connector.cache_spec import Group, Model
from vua.connector.load_policy import Replies
from vua.connector.lookup import find
from vua.core import VUAConfig
from vua.format.identity import Identity
from vua.format.keys import token_ids
from vua.format.layout import KVLayout
from vua.io.memory import BufferPool
from vua.storage.location import Location
from vua.store.namespace import Access, Namespace
from vua.store.place import LazyNamespace
from vua.store.tensors import Cache, allocate, memory_map
from vua.store.writer import EntryWriter, process_writer

log = logging.getLogger(__name__)


class LayerCache(NamedTuple):
    """K and V of one layer, [heads, tokens, dim] each."""

    k: torch.Tensor
    v: torch.Tensor


def groups_of(layout: KVLayout, windows: Sequence[int | None]) -> tuple[Group, ...]:
    """Return the groups of a model's layers, those that attend to everything first.

    Args:
        layout: of all layers.
        windows: per layer, the tokens of its sliding window; None: it attends to everything.
    """
    kinds: dict[str, list[int]] = {}
    for number, window in enumerate(windows):
        kinds.setdefault("" if window is None else f"w{window}", []).append(number)
    groups = []
    for table, kind in enumerate(sorted(kinds)):
        own = replace(layout, layers=len(kinds[kind]), group=kind)
        groups.append(Group(own, tuple(kinds[kind]), ((own.full,),), (table,)))
    return tuple(groups)


class StoredLayers:
    """A model's caches under one name in a directory."""

    def __init__(
        self,
        root: Location,
        identity: Identity,
        groups: Sequence[Group],
        replies: Replies,
        *,
        durable: bool,
    ) -> None:
        """Use ``root``, as `vua.store.place.locate` returns it; nothing is opened yet."""
        self._root, self.identity, self._replies = root, identity, replies
        self._layouts = tuple(group.layout for group in groups)
        blocks = (identity.chunk_tokens,) * len(groups)
        self._model = Model(identity, tuple(groups), blocks)
        self._layers = sum(len(group.layers) for group in groups)
        self._buffers = BufferPool(VUAConfig.buffer_bytes)
        self._opened = LazyNamespace(root, identity, Access(durable=durable))
        self.close = self._opened.close
        self.misfits = False
        """Whether something of another shape was found there."""

    # -- load ---------------------------------------------------------------------------------

    def longest(self, ids: torch.Tensor) -> int:
        """Return the tokens of the longest stored prefix of ``ids``, (T,), in whole chunks.

        A hint: only reading tells what can be loaded. Never raises for the state of the directory.
        """
        model = self._model
        try:
            if (namespace := self._to_read()) is None:
                return 0
            keys = namespace.keys(token_ids(ids))
            self._replies.asked(keys.run(0, len(keys)).prefix_hashes)
            tokens = len(keys) * model.chunk_tokens
            return find(
                *(model, namespace.stores, keys, tokens + 1), window_every_tokens=None
            ).tokens
        except OSError as problem:
            log.warning("%s cannot be read, a miss: %s", self._root, problem)
            return 0

    def read(
        self, ids: torch.Tensor, tokens: int, device: torch.device
    ) -> tuple[Sequence[LayerCache], int]:
        """Return K and V of the first ``tokens`` tokens of ``ids``, (T,), and their number.

        Layers with a sliding window hold what a window that ends there needs, and zeros before it.
        If something is missing or damaged: no layers, and how many tokens may be there at most.
        """
        size, layers = self._model.chunk_tokens, dict[int, LayerCache]()
        namespace, stop = self._opened.reading, -(-tokens // size)
        if namespace is None or not tokens:
            return [], 0
        keys = namespace.keys(token_ids(ids))
        for group, store in zip(self._model.groups, namespace.stores, strict=True):
            first = group.first_needed(tokens) // size
            arrays = allocate(group.layout, stop, self._buffers, pinned=device.type == "cuda")
            for tensor in (tensor for array in arrays for tensor in array if first):
                tensor[:, : first * size] = 0
            wanted = [[tensor[:, first * size :] for tensor in array] for array in arrays]
            loaded = store.load(keys.run(first, stop), memory_map(wanted, size), weed=True)
            if loaded.chunks < stop - first:
                return [], (first + loaded.chunks) * size
            for number, *pair in zip(group.layers, *arrays, strict=True):
                k, v = (tensor[:, :tokens].to(device) for tensor in pair)
                layers[number] = LayerCache(k, v)
        namespace.stores[0].used(keys, stop)
        return [layers[number] for number in range(self._layers)], tokens

    def _to_read(self) -> Namespace | None:
        """Return the open namespace, or open it if possible. Raises OSError."""
        namespace = self._opened.to_read(self._layouts)
        if namespace is not None and namespace.layouts != self._layouts:
            if not self.misfits:
                log.warning("stored caches of %s do not fit the model", self.identity.name)
            self.misfits = True
            namespace = self._opened.reading = None
        return namespace

    # -- save ---------------------------------------------------------------------------------

    def save(
        self,
        ids: torch.Tensor,
        layers: Sequence[LayerCache],
        may: Callable[[], bool],
        loaded: int = 0,
        prompt: int | None = None,
    ) -> int:
        """Store whole chunks that are not stored yet; return for how many something was written.

        Args:
            ids: whole chunks, (T,).
            layers: K and V of every layer, at least up to token T. A sliding window's may begin
                with zeros, as :meth:`read` returns them; earlier chunks stay as they are stored, or
                not.
            may: asked before something is written; False: nothing is.
            loaded: tokens that :meth:`read` returned. They are stored if a lookup finds them, too;
                what is computed after a hole is stored from the hole on.
            prompt: tokens of the prompt; what follows was generated, and is stored as long as
                later prompts begin with such tokens (`vua.connector.load_policy`). None: all of it.

        Raises:
            LayoutError: the directory holds other shapes for this model.
            NotWritableError, StorageFullError, StorageError: the directory refuses.
        """
        if self._opened.reading is None and not may():
            return 0
        namespace = self._opened.to_write(self._layouts)
        keys, size, written = namespace.keys(token_ids(ids)), self._model.chunk_tokens, 0
        groups = self._model.groups
        leading = [
            store
            for group, store in zip(groups, namespace.stores, strict=True)
            if group in self._model.leading
        ]
        stored = min(store.lookup(keys) for store in leading)
        if prompt is not None and len(keys) > (reply := prompt // size):
            new = len(keys) - max(reply, stored)
            if new > 0 and not self._replies.wanted(keys[reply].prefix_hash, new):
                ids, stored = ids[: reply * size], min(stored, reply)
                keys = namespace.keys(token_ids(ids))
        # Before anything is evicted for the rest.
        namespace.stores[0].used(keys, stored, wait=stored < len(keys), storing=True)
        known = held = min(stored, loaded // size)
        # One after the other: the lookup above passes over holes, which are to be filled.
        while held < stored and all(one.lookup(keys.run(held, held + 1)) for one in leading):
            held += 1
        firsts = [
            max(
                held if group in self._model.leading else known,
                self._first_to_store(group, layers, len(ids), stored),
            )
            for group in groups
        ]
        if min(firsts) >= len(keys) or not may():
            return 0
        for group, store, first in zip(groups, namespace.stores, firsts, strict=True):
            if first >= len(keys):
                continue
            cut = [_cut(layers[number], first * size, len(ids)) for number in group.layers]
            memory = Cache(cut, 0, 1).memory(size)
            writer = EntryWriter(store, memory, writer=process_writer("transformers"))
            written = max(written, writer.save_all(keys.run(first, len(keys))))
            if writer.refused:
                break
        return written

    def _first_to_store(
        self, group: Group, layers: Sequence[LayerCache], tokens: int, stored: int
    ) -> int:
        """Return the first chunk that a group's layers hold completely.

        Windows that were loaded from another engine hold too little for a place that has nothing.
        """
        if group.layout.window is None:
            return 0
        size = self._model.chunk_tokens
        first = -(-max(first_filled(layers[number]) for number in group.layers) // size)
        of_use = stored if group in self._model.leading else group.first_needed(tokens) // size
        return tokens // size if first > of_use else first


def first_filled(layer: LayerCache) -> int:
    """Return the first token with K or V in a layer: a window leaves zeros before it."""
    if bool(layer.k[:, :1].any()) or bool(layer.v[:, :1].any()):
        return 0
    filled = layer.k.any(dim=2).any(dim=0) | layer.v.any(dim=2).any(dim=0)
    return int(filled.int().argmax()) if bool(filled.any()) else len(filled)


def _cut(layer: LayerCache, start: int, stop: int) -> list[torch.Tensor]:
    """Return K and V of tokens ``start`` to ``stop``, [1, heads, tokens, dim] each."""
    return [array[None, :, start:stop] for array in layer]
