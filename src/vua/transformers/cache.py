"""Prefixes of prompts for `generate`: load what is stored, save what was computed.

Promises that a loaded cache holds exactly what was saved for the same tokens and the same model,
or nothing. May be used by several threads and processes at once; each cache it returns is for one
call of `generate`, which changes it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from transformers import DynamicCache

from vua.core import VUAConfig
from vua.errors import ConfigError, InputError
from vua.format.identity import Identity
from vua.format.layout import KVLayout
from vua.serdes import DTYPES
from vua.store.identified import Identified
from vua.store.opening import locate
from vua.transformers.batch import Row, rows_of
from vua.transformers.layers import LayerCache, StoredLayers, groups_of
from vua.transformers.model import DTYPE_NAMES, LAYERS, described_model, layout_of, windows_of

__all__ = ["Prefix", "PrefixCache"]

log = logging.getLogger(__name__)

_START_WAIT_S: Final = 1.0
_TRIES: Final = 8
"""Looks per load: what is missing or damaged leaves a shorter prefix for the next one."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The stored beginning of a prompt, ready for `generate`."""

    cache: DynamicCache
    """To be passed as `past_key_values`; empty where nothing is stored."""
    num_tokens: int
    """Tokens that the cache holds; of a batch with padding: columns."""


class PrefixCache:
    """Keeps prefixes of one model in a directory, and gives them back to `generate`.

    >>> with PrefixCache(model, "/mnt/kv") as prefixes:  # doctest: +SKIP
    ...     prefix = prefixes.load(ids)
    ...     output = model.generate(ids, past_key_values=prefix.cache)
    ...     prefixes.save(output, prefix.cache)
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401
        path: str | os.PathLike[str] | Sequence[str],
        *,
        chunk_tokens: int = 64,
        epoch: str = "",
        durable: bool = False,
    ) -> None:
        """Use the directory ``path``, which is created (mode 0700) when missing.

        Computes one token, to see what caches the model makes. Which weights it has is found out
        from every byte of its files, once, on threads beside this one, and then remembered
        (`vua.weights`). The constructor waits for it up to a second; until it is known nothing is
        loaded or saved, see `ready`.

        Args:
            model: a causal language model that `from_pretrained` made.
            path: the directory, the URL of a place in a bucket (``s3://bucket/prefix``), or a list:
                a directory and the places behind it. Other models and engines may use it too.
            chunk_tokens: tokens per chunk, the granularity of reuse.
            epoch: change it to leave everything stored so far unused.
            durable: fsync each file. Without it a power cut may cost recent chunks.

        Raises:
            ConfigError: the model's caches cannot be stored or identified, or ``path`` is a file.
            StorageError: the directory cannot be created.
        """
        VUAConfig(split_factor=chunk_tokens, epoch=epoch, durable=durable)  # checks them
        self.layout = _tried(model, layout_of(model, chunk_tokens=chunk_tokens))
        self._groups = groups_of(self.layout, windows_of(model))
        self._described = described_model(model, chunk_tokens=chunk_tokens, epoch=epoch)
        self._model = model
        place, groups = locate(path), self._groups
        self._stored = Identified(
            self._described,
            lambda identity: StoredLayers(place, identity, groups, durable=durable),
            log,
        )
        self._stored.ready(_START_WAIT_S)

    def __enter__(self) -> PrefixCache:  # noqa: PYI034 - Python 3.10 has no Self
        """Return the object itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Wait for running work and release the threads."""
        self._stored.close()

    def ready(self, timeout_s: float | None = None) -> bool:
        """Wait until the model is identified; return whether it is. None: for as long as it takes.

        Raises:
            ConfigError, StorageError, OSError: it cannot be, so nothing is ever loaded or saved.
        """
        return self._stored.ready(timeout_s)

    @property
    def identity(self) -> Identity:
        """Whose caches these are; waits and raises as `ready` without a limit."""
        return self._stored.identity

    def load(
        self,
        input_ids: torch.Tensor | Sequence[int],
        cache: DynamicCache | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
    ) -> Prefix:
        """Return the longest stored prefix, in whole chunks.

        At least one token of each sequence is left over, because `generate` has to compute one.
        Before the model is identified nothing is found. Of a batch so many columns are filled as
        all of its sequences have; a sequence that begins with padding is stored without it.

        Args:
            input_ids: one sequence, (T,), or a batch, (B, T), padded on the left.
            cache: an empty cache to fill. By default `DynamicCache()`, which keeps every token, so
                that it can be saved again. `DynamicCache(config=model.config)` holds less where
                the model has sliding windows, but then only the first chunks can be saved.
            attention_mask: of the shape of ``input_ids``, 0 where there is padding. Without it
                there is none.

        Raises:
            InputError: other shapes, padding that is not on the left, or the cache is not empty.
                Never for the state of the directory: what is damaged or missing is a shorter
                prefix.
        """
        rows = rows_of(input_ids, attention_mask)
        filled = DynamicCache() if cache is None else cache
        if not isinstance(filled, DynamicCache) or filled.get_seq_length():
            raise InputError(
                f"{type(filled).__name__} given to fill; expected an empty DynamicCache"
            )
        if (stored := self._stored.usable()) is None:
            return Prefix(filled, 0)
        found, columns = self._read(stored, rows)
        if not columns:
            return Prefix(filled, 0)
        for number in range(self.layout.layers):
            mine = [layers[number] if layers else None for layers in found]
            filled.update(*self._joined(rows, mine, columns), number)
        return Prefix(filled, columns)

    def _read(
        self, stored: StoredLayers, rows: Sequence[Row]
    ) -> tuple[list[Sequence[LayerCache]], int]:
        """Return the layers of each row, and how many columns all rows have; 0 where one has none.

        A row that is padding up to there has no layers.
        """
        most = [len(row.ids) - 1 for row in rows]
        for _ in range(_TRIES):
            ends = [stored.longest(row.ids[:end]) for row, end in zip(rows, most, strict=True)]
            columns = min(row.padding + end for row, end in zip(rows, ends, strict=True))
            if columns <= min(row.padding for row in rows):
                break
            found: list[Sequence[LayerCache]] = []
            for number, row in enumerate(rows):
                wanted = max(0, columns - row.padding)
                layers, most[number] = stored.read(row.ids, wanted, self._model.device)
                found.append(layers)
                if most[number] < wanted:
                    break
            else:
                return found, columns
        return [], 0

    def _joined(
        self, rows: Sequence[Row], layers: Sequence[LayerCache | None], columns: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of one layer, [rows, heads, columns, dim]; zeros for padding."""
        if len(rows) == 1 and layers[0]:
            return layers[0].k[None], layers[0].v[None]
        layout = self.layout
        shape = (len(rows), layout.kv_heads, columns, layout.k_dim)
        dtype, device = DTYPES[layout.dtype], self._model.device
        k, v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        for number, (row, layer) in enumerate(zip(rows, layers, strict=True)):
            if layer:
                k[number, :, row.padding :], v[number, :, row.padding :] = layer.k, layer.v
        return k, v

    def save(
        self,
        input_ids: torch.Tensor | Sequence[int],
        cache: DynamicCache,
        *,
        attention_mask: torch.Tensor | None = None,
    ) -> int:
        """Store the whole chunks that ``cache`` holds, except those stored already.

        Args:
            input_ids: what the cache was computed for: one sequence, (T,), or a batch, (B, T),
                padded on the left; the prompt, or all of what `generate` returned. The shorter of
                ids and cache counts.
            cache: what was passed to `generate` as `past_key_values`, or came back from it.
            attention_mask: 0 where there is padding, (B, T) or shorter, as it was passed to
                `generate`. Without it there is none.

        Returns:
            How many chunks were written; none before the model is identified, since `generate`
            does not wait for its cache. Call `ready` first where that matters.

        Raises:
            InputError: other shapes, padding that is not on the left, or a cache that does not
                hold every token.
            LayoutError: the directory holds other shapes for this model.
            NotWritableError, StorageFullError, StorageError: the directory refuses.
        """
        rows = rows_of(input_ids, attention_mask)
        layers = self._layers(cache, len(rows))
        if not layers or (stored := self._stored.usable()) is None:
            return 0
        written, held = 0, min(layer.start + layer.k.shape[2] for layer in layers)
        for number, row in enumerate(rows):
            length = min(len(row.ids), held - row.padding)
            length -= length % self.layout.chunk_tokens
            if length <= 0:
                continue
            mine = []
            for layer in layers:
                first = max(layer.start, row.padding)
                k, v = (array[number, :, first - layer.start :] for array in (layer.k, layer.v))
                mine.append(LayerCache(k, v, first - row.padding))
            written += stored.save(row.ids[:length], mine)
        return written

    def _layers(self, cache: DynamicCache, rows: int) -> list[LayerCache]:
        """Return K and V of every layer, [rows, heads, columns, dim], and its first column."""
        if not isinstance(cache, DynamicCache):
            raise InputError(
                f"a {type(cache).__name__} cannot be stored; pass past_key_values=DynamicCache() "
                "to generate() and save that"
            )
        if not cache.get_seq_length():
            return []
        layout = self.layout
        if len(cache.layers) != layout.layers:
            raise InputError(
                f"a cache of {len(cache.layers)} layers; the model has {layout.layers}"
            )
        layers = []
        for number, layer in enumerate(cache.layers):
            if type(layer) not in LAYERS:
                raise InputError(
                    f"layer {number} is a {type(layer).__name__}: no K and V per token"
                )
            length = layer.get_seq_length()
            kept = min(length, layer.keys.shape[2]) if layer.is_initialized else 0
            expected = ((rows, layout.kv_heads, kept, layout.k_dim), layout.dtype)
            for array, tensor in (("K", layer.keys), ("V", layer.values)):
                found = (tuple(tensor.shape), DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)))
                if found != expected:
                    raise InputError(f"{array} of layer {number} is {found}, expected {expected}")
            layers.append(LayerCache(layer.keys, layer.values, length - kept))
        return layers


def _tried(model: Any, layout: KVLayout) -> KVLayout:  # noqa: ANN401
    """Return the layout with the KV heads that the model has when it computes a token.

    Raises ConfigError when what comes out are not K and V of each layer, all of one shape.
    """
    cache, ids = DynamicCache(), torch.zeros((1, 1), dtype=torch.long, device=model.device)
    kind = f"caches of a {model.config.get_text_config().model_type} model cannot be stored"
    try:
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache, use_cache=True)
    except Exception as problem:  # the model's own, of any kind
        raise ConfigError(
            f"{kind}: it computes nothing with an empty DynamicCache() "
            f"({type(problem).__name__}: {problem})"
        ) from problem
    if (layers := len(cache.layers)) != layout.layers:
        raise ConfigError(
            f"{kind}: it keeps K and V for {layers} of its {layout.layers} layers, the others "
            "keep none or share them"
        )
    if others := {type(layer).__name__ for layer in cache.layers if type(layer) not in LAYERS}:
        raise ConfigError(f"{kind}: it has layers without K and V per token ({', '.join(others)})")
    found = {
        (tuple(tensor.shape), DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)))
        for layer in cache.layers
        for tensor in (layer.keys, layer.values)
    }
    heads = next(iter(found))[0][1]
    if found != {((1, heads, 1, layout.k_dim), layout.dtype)}:
        raise ConfigError(
            f"{kind}: K and V of a token are {sorted(found)}; expected one shape in all layers, "
            f"(1, heads, 1, {layout.k_dim}), and {layout.dtype}"
        )
    return replace(layout, kv_heads=heads)
