"""Prefixes of prompts for `generate`: load stored ones, save computed ones.

A loaded cache holds exactly what was saved for the same tokens and the same model, or nothing; the
model is checked before each load and each save. Several threads and processes may use it at once;
each returned cache is for one call of `generate`, which changes it.

Batches are padded on the left, as `generate` requires.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from transformers import DynamicCache

from vua.connector.config import ConnectorConfig
from vua.core import VUAConfig
from vua.errors import ConfigError, InputError, VUAError
from vua.format.identity import Identity
from vua.format.layout import KVLayout
from vua.serdes import DTYPE_NAMES, DTYPES
from vua.store.identified import LazyStore
from vua.store.place import locate
from vua.transformers.layers import LayerCache, StoredLayers, groups_of
from vua.transformers.model import (
    LAYERS,
    NoIdentityError,
    described_model,
    layout_of,
    windows_of,
)
from vua.transformers.watch import ModelWatch


class Row(NamedTuple):
    """One row of a batch."""

    ids: torch.Tensor
    """(T,), without padding."""
    padding: int
    """Columns of padding before them."""


def rows_of(
    input_ids: torch.Tensor | Sequence[int], attention_mask: torch.Tensor | None
) -> list[Row]:
    """Return the sequences of a batch without their padding.

    Args:
        input_ids: (T,) or (B, T).
        attention_mask: 0 for padding, of the shape of ``input_ids`` or shorter, as generated tokens
            are never padding. None: no padding.

    Raises:
        InputError: other shapes, or padding that is not on the left.
    """
    ids = torch.as_tensor(input_ids)
    if ids.ndim == 1:
        ids = ids[None]
    if ids.ndim != 2 or not len(ids):
        raise InputError(
            f"input_ids of shape {tuple(ids.shape)}; expected one sequence, (T,), or a batch of "
            "them, (B, T)"
        )
    if attention_mask is None:
        return [Row(row, 0) for row in ids]
    mask = torch.as_tensor(attention_mask).bool()
    mask = mask[None] if mask.ndim == 1 else mask
    if mask.ndim != 2 or len(mask) != len(ids) or mask.shape[1] > ids.shape[1]:
        raise InputError(
            f"an attention_mask of shape {tuple(mask.shape)} for input_ids of shape "
            f"{tuple(ids.shape)}; expected the same shape"
        )
    paddings = [int(count) for count in (~mask).sum(dim=1)]
    if any(bool(row[:count].any()) for row, count in zip(mask, paddings, strict=True)):
        raise InputError(
            "the attention_mask hides tokens that are not at the left end; pad on the left "
            "(tokenizer.padding_side = 'left')"
        )
    return [Row(row[count:], count) for row, count in zip(ids, paddings, strict=True)]


log = logging.getLogger(__name__)

_START_WAIT_S: Final = 1.0
_ROUNDING: Final = {"F64": 1e-3, "F32": 1e-3, "F16": 0.05, "BF16": 0.1}
"""Relative difference of K in a dtype between two orders of sums; another token's is about 1."""
_TRIES: Final = 8
"""Attempts per load: missing or damaged chunks leave a shorter prefix for the next one."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The stored beginning of a prompt, ready for `generate`."""

    cache: DynamicCache
    """To be passed as `past_key_values`; empty if nothing is stored."""
    num_tokens: int
    """Tokens that the cache holds; for a batch with padding: columns."""


class _Note:
    """State of a cache that `PrefixCache.load` returned; copies of the cache share it."""

    def __init__(
        self,
        watch: ModelWatch,
        ids: torch.Tensor,
        dtype: torch.dtype,
        computed: Callable[[int, int, int, float], None],
    ) -> None:
        """``computed`` is told of each prefill, see `StoredLayers.computed`."""
        self.watch, self.ids, self._dtype = watch, ids, dtype
        self._computed = computed
        self.versions = watch.versions_now()
        self.paddings: list[int] = []
        """Of the rows of ``ids``."""
        self.loaded = 0
        """Columns that the cache was filled with."""
        self._prefill: tuple[int, int, int, float] | None = None
        """The rows, columns before, columns and beginning of the last one, while it may run."""
        self.problem = ""
        """What happened while the cache was filled that forbids storing it."""
        self.reordered = False
        """Whether beams have changed places in it."""
        self.began_s = watch.clock()
        """When the model began to compute with it, or since when that has not been counted."""

    def __deepcopy__(self, memo: dict[int, object]) -> _Note:
        """Return itself: the model must not be copied with it."""
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()

    def earn(self) -> None:
        """Count the time since then as generating."""
        self._prefill_ended()
        began_s, self.began_s = self.began_s, self.watch.clock()
        self.watch.earn(self.began_s - began_s)

    def _prefill_ended(self) -> None:
        if self._prefill is not None:
            rows, before, columns, began_s = self._prefill
            self._prefill = None
            self._computed(rows, before, columns, self.watch.clock() - began_s)

    def check_model(self, k: torch.Tensor, before: int) -> None:
        """Check the model that computes ``k``, [rows, heads, columns, dim], after other columns.

        Thoroughly if it computes several columns. Never raises: `generate` is running.
        """
        try:
            self._check(k, before)
        except Exception as problem:  # noqa: BLE001 - as when it is described
            self.problem = f"the model cannot be looked at ({reason_of(problem)})"

    def _check(self, k: torch.Tensor, before: int) -> None:
        self._prefill_ended()
        rows, columns = k.shape[0], k.shape[2]
        if columns > 1:
            self._prefill = (rows, before, columns, self.watch.clock())
        if self.problem:
            return
        if k.dtype != self._dtype:
            self.problem = f"K was computed as {k.dtype}, expected {self._dtype}"
        elif columns > 1:
            self.problem = self.watch.change()
        else:
            self.problem = self.watch.change_of_modes()


def reason_of(problem: Exception) -> str:
    """Return an exception in one line; VUA's own speak for themselves."""
    text = str(problem) if isinstance(problem, VUAError) else f"{type(problem).__name__}: {problem}"
    return " ".join(text.split())


@contextmanager
def _describing() -> Iterator[None]:
    """Turn whatever a model, its config or torch raises into NoIdentityError, but for OSError."""
    try:
        yield
    except (NoIdentityError, OSError):
        raise
    except Exception as problem:
        raise NoIdentityError(reason_of(problem)) from problem


class _NotedCache(DynamicCache):
    """A `DynamicCache` that checks the model whenever its first layer gets K and V."""

    vua_note: _Note | None = None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.vua_note is not None and layer_idx == 0:
            self.vua_note.check_model(key_states, self.get_seq_length())
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.vua_note is not None:
            self.vua_note.reordered = True
        super().reorder_cache(beam_idx)


class _FirstLayer(DynamicCache):
    """Captures K of the first layer and ends the forward pass."""

    class Taken(Exception):  # noqa: N818 - no error
        """K was captured."""

    k: torch.Tensor

    def update(self, key_states: torch.Tensor, *_: object, **__: object) -> Any:
        self.k = key_states
        raise self.Taken


class PrefixCache:
    """Keeps prefixes of one model in a directory, and returns them for `generate`.

    >>> with PrefixCache(model, "/mnt/kv") as prefixes:  # doctest: +SKIP
    ...     prefix = prefixes.load(ids)
    ...     output = model.generate(ids, past_key_values=prefix.cache)
    ...     prefixes.save(output, prefix.cache)
    """

    def __init__(
        self,
        model: Any,
        path: str | os.PathLike[str] | Sequence[str],
        *,
        chunk_tokens: int = 64,
        epoch: str = "",
        durable: bool = False,
        load_policy: str | float = "faster",
    ) -> None:
        """Use the directory ``path``, which is created (mode 0700) if missing.

        Computes one token, to see what caches the model makes, and compares the model with what its
        configuration makes. Background threads identify its weights: from every byte of its files,
        which is remembered (`vua.weights`), and by comparing the model in memory with them. The
        constructor waits for that up to a second; until then nothing is loaded or saved, see
        `ready`. A model that differs from its files has its own caches. A model without a digest
        (hooks, code that is not transformers') has none, and the log says why.

        Args:
            model: a causal language model of transformers, in evaluation mode.
            path: the directory, a URL in a bucket (``s3://bucket/prefix``), or a list: a directory
                and slower tiers. Other models and engines may use it, too.
            chunk_tokens: tokens per chunk, the granularity of reuse.
            epoch: change it to ignore everything stored so far.
            durable: fsync each file. Without it a power cut may cost recent chunks.
            load_policy: ``"faster"``: load a stored prefix unless computing it is predicted to take
                less time. Both are measured: each load, and each prefill with a cache that `load`
                returned. Until there are three of each, all that is stored is loaded.
                ``"always"``: load it in any case. A number: skip a load that is predicted to take
                more than this many times the compute time.

        Raises:
            NoIdentityError: the model's caches cannot be stored; whatever describing it raises.
            ConfigError: a setting is wrong, or ``path`` is a file.
            StorageError: the directory cannot be created.
        """
        VUAConfig(split_factor=chunk_tokens, epoch=epoch, durable=durable)  # checks them
        policy = 1.0 if load_policy == "faster" else load_policy
        try:
            ConnectorConfig(shared_storage_path=str(path), load_policy=policy)  # checks it
        except ConfigError as problem:
            text = str(problem).removeprefix("kv_connector_extra_config: ")  # vLLM's
            raise ConfigError(text) from problem
        with _describing():
            self.layout = _tried(model, layout_of(model, chunk_tokens=chunk_tokens))
            self._groups = groups_of(self.layout, windows_of(model))
            self._watch = ModelWatch(model)
            described = described_model(model, self._watch, chunk_tokens=chunk_tokens, epoch=epoch)
        self._model, self._said = model, set[str]()
        place, groups = locate(path), self._groups
        self._notes = weakref.WeakKeyDictionary[DynamicCache, _Note]()
        self._stored = LazyStore(
            described,
            lambda identity: StoredLayers(
                place,
                identity,
                groups,
                durable=durable,
                load_policy=policy,
                clock=self._watch.clock,
            ),
            log,
        )
        with _describing():
            if self.ready(_START_WAIT_S):
                self._stored.usable()  # says why nothing is loaded or saved, where that is known

    def __enter__(self) -> PrefixCache:  # noqa: PYI034 - Python 3.10 has no Self
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for running work and release the threads."""
        self._stored.close()

    def ready(self, timeout_s: float | None = None) -> bool:
        """Wait until the model is identified; return whether it can be cached.

        A model that cannot be identified is never loaded or saved: the log says why, and `identity`
        raises it.

        Args:
            timeout_s: None: no limit.

        Raises:
            ConfigError, StorageError, OSError: its files cannot be read, or the directory is
                unusable, so nothing is ever loaded or saved.
        """
        try:
            return self._stored.ready(timeout_s)
        except NoIdentityError:
            return True

    @property
    def identity(self) -> Identity:
        """Identity of these caches; waits without a limit.

        Raises:
            ConfigError, OSError: the model cannot be identified.
        """
        return self._stored.identity

    def load(
        self,
        input_ids: torch.Tensor | Sequence[int],
        cache: DynamicCache | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
    ) -> Prefix:
        """Return the longest stored prefix, in whole chunks, if that is worth it (``load_policy``).

        At least one token of each sequence is left, because `generate` must compute one. Before the
        model is identified nothing is found. For a batch, as many columns are filled as all of its
        sequences have; a sequence that begins with padding is stored without it.

        Args:
            input_ids: one sequence, (T,), or a batch, (B, T), padded on the left.
            cache: an empty cache to fill. By default a `DynamicCache()`, which keeps every token,
                so that it can be saved again, and which checks the model each time it is filled.
                `DynamicCache(config=model.config)` holds less if the model has sliding windows, but
                then only the first chunks can be saved.
            attention_mask: of the shape of ``input_ids``, 0 for padding. By default no padding.

        Raises:
            InputError: other shapes, padding that is not on the left, or the cache is not empty.
                Never for the state of the directory: damage or a missing chunk shortens the prefix.
        """
        rows = rows_of(input_ids, attention_mask)
        filled = _NotedCache() if cache is None else cache
        if not isinstance(filled, DynamicCache) or filled.get_seq_length():
            raise InputError(
                f"{type(filled).__name__} given to fill; expected an empty DynamicCache"
            )
        dtype = DTYPES[self.layout.dtype]
        note = _Note(self._watch, torch.as_tensor(input_ids), dtype, self._computed)
        columns = note.loaded = self._fill(filled, rows)
        note.paddings = [row.padding for row in rows]
        note.began_s = self._watch.clock()
        if isinstance(filled, _NotedCache):
            filled.vua_note = note
        else:
            self._notes[filled] = note
        return Prefix(filled, columns)

    def _fill(self, filled: DynamicCache, rows: Sequence[Row]) -> int:
        """Load what is stored, if it is this model's, and return the number of columns."""
        if (stored := self._stored.usable()) is None or self._is_changed():
            return 0
        began_s = self._watch.clock()
        found, columns = self._read(stored, rows)
        # Versions and modes do not show writes through `.data`; the bytes do: checked before use.
        if not columns or self._is_changed(self._watch.change_of_bytes()):
            return 0
        for number in range(self.layout.layers):
            mine = [layers[number] if layers else None for layers in found]
            filled.update(*self._joined(rows, mine, columns), number)
        tokens = columns - min(row.padding for row in rows)
        stored.loaded(len(rows), tokens, self._watch.clock() - began_s)
        return columns

    def _computed(self, rows: int, before: int, columns: int, took_s: float) -> None:
        """Learn how long a prefill took; where it is still unknown what is stored, nothing."""
        if (stored := self._stored.usable()) is not None:
            stored.computed(rows, before, columns, took_s)

    def _is_changed(self, change: str | None = None) -> bool:
        """Whether the model differs from the identified one, now or as said; logged once."""
        if change := self._watch.change() if change is None else change:
            if change not in self._said:
                self._said.add(change)
                log.warning("%s; nothing is loaded or stored while that is so", change)
            return True
        return False

    def _read(
        self, stored: StoredLayers, rows: Sequence[Row]
    ) -> tuple[list[Sequence[LayerCache]], int]:
        """Return the layers of each row, and how many columns all rows have; 0 if one has none.

        A row that is padding up to there has no layers.
        """
        most = [len(row.ids) - 1 for row in rows]
        padding, worth = min(row.padding for row in rows), None
        for _ in range(_TRIES):
            ends = [stored.longest(row.ids[:end]) for row, end in zip(rows, most, strict=True)]
            columns = min(row.padding + end for row, end in zip(rows, ends, strict=True))
            if columns > padding and worth is None:
                worth = padding + stored.worth_loading(len(rows), columns - padding)
            columns = min(columns, columns if worth is None else worth)
            if columns <= padding:
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
        if len(rows) == 1 and layers[0] and not rows[0].padding:
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
        """Store the whole chunks that ``cache`` holds, except those already stored.

        Args:
            input_ids: what the cache was computed for: one sequence, (T,), or a batch, (B, T),
                padded on the left; the prompt, or everything that `generate` returned. The shorter
                of ids and cache counts.
            cache: what was passed to `generate` as `past_key_values`, or returned by it. Each of
                its rows must belong to the same row of ``input_ids``: true for the prompts of
                beams, not for what beams generated.
            attention_mask: 0 for padding, (B, T) or shorter, as passed to `generate`. By default no
                padding.

        Returns:
            How many chunks were written; none before the model is identified, since `generate` does
                not wait for its cache. Call `ready` first if that matters.

        Raises:
            InputError: other shapes, padding that is not on the left, a cache that does not hold
                every token, or one of other tokens (those of beams).
            LayoutError: the directory holds other shapes for this model.
            NotWritableError, StorageFullError, StorageError: the directory refuses.
        """
        rows = rows_of(input_ids, attention_mask)
        layers = self._layers(cache, len(rows))
        if not layers or (stored := self._stored.usable()) is None:
            return 0
        note = cache.vua_note if isinstance(cache, _NotedCache) else self._notes.get(cache)
        if note is not None and note.reordered:
            _check_reordered(rows, note.ids)
        elif len(rows) > 1 and not isinstance(cache, _NotedCache):
            self._check_rows(rows, layers[0])
        if note is not None:
            if layers[0].k.is_cuda:
                torch.cuda.current_stream(layers[0].k.device).synchronize()
            note.earn()
        may = _Once(lambda: self._is_unchanged_since(note))
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
            known = 0 if note is None else _loaded_of(note, row, number, len(rows))
            written += stored.save(row.ids[:length], mine, may, known)
        return written

    def _is_unchanged_since(self, note: _Note | None) -> bool:
        return not (
            self._is_changed()
            or self._is_changed(self._change_since(note))
            or self._is_changed(self._watch.change_of_bytes())
        )

    def _change_since(self, note: _Note | None) -> str:
        """Return what happened to the model while a cache was filled; "" if nothing did."""
        versions = self._watch.versions if note is None else note.versions
        seen = "" if note is None else note.problem
        return seen or self._watch.change_of_versions(versions)

    def _check_rows(self, rows: Sequence[Row], first: LayerCache) -> None:
        """Refuse a cache whose first layer has K of other tokens, as beams return it."""
        width = max(row.padding + len(row.ids) for row in rows)
        ids = torch.zeros((len(rows), width), dtype=torch.long, device=self._model.device)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, row.padding :] = row.ids.to(ids.device)
            mask[number, row.padding :] = 1
        cache = _FirstLayer()
        with torch.no_grad(), suppress(_FirstLayer.Taken):
            self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
                past_key_values=cache,
                use_cache=True,
            )
        held = min(width, first.start + first.k.shape[2])
        expected = cache.k[:, :, first.start : held].float()
        found = first.k[:, :, : held - first.start].float()
        apart = (found - expected).norm(dim=-1) > _ROUNDING[self.layout.dtype] * (
            expected.norm(dim=-1) + 1e-6
        )
        apart &= mask[:, None, first.start : held].bool()
        if bool(apart.any()):
            number = int(apart.any(dim=2).any(dim=1).int().argmax())
            raise InputError(
                f"row {number} of the cache holds K of other tokens than row {number} of "
                "input_ids; what beams return is such: save the prompts, repeated for each beam"
            )

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


class NoPrefixes(PrefixCache):
    """Stands for the cache of a model that has none: finds and stores nothing, never raises."""

    def __init__(self, problem: Exception) -> None:
        self._problem = problem

    def close(self) -> None:
        pass

    def ready(self, timeout_s: float | None = None) -> bool:
        return True

    @property
    def identity(self) -> Identity:
        raise self._problem

    def load(
        self,
        input_ids: torch.Tensor | Sequence[int],
        cache: DynamicCache | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
    ) -> Prefix:
        return Prefix(DynamicCache() if cache is None else cache, 0)

    def save(
        self,
        input_ids: torch.Tensor | Sequence[int],
        cache: DynamicCache,
        *,
        attention_mask: torch.Tensor | None = None,
    ) -> int:
        return 0


class _Once:
    """A value that is computed at first use."""

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask = ask
        self._answer: bool | None = None

    def __call__(self) -> bool:
        if self._answer is None:
            self._answer = self._ask()
        return self._answer


def _loaded_of(note: _Note, row: Row, number: int, rows: int) -> int:
    """Return how many tokens of a row, one of so many, its cache was filled with."""
    prompts = note.ids[None] if note.ids.ndim == 1 else note.ids
    at = min(number // max(1, rows // len(prompts)), len(prompts) - 1)
    loaded = note.loaded - row.padding
    given = prompts[at][row.padding : note.loaded].to(row.ids)
    same = note.paddings[at] == row.padding and torch.equal(given, row.ids[:loaded])
    return loaded if same and loaded > 0 else 0


def _check_reordered(rows: Sequence[Row], prompts: torch.Tensor) -> None:
    """Refuse the output of beams: only the prompts are still in their rows."""
    prompts = prompts[None] if prompts.ndim == 1 else prompts
    repeats = max(1, len(rows) // len(prompts))
    for number, row in enumerate(rows):
        columns = row.padding + len(row.ids)
        prompt = prompts[min(number // repeats, len(prompts) - 1)]
        same = columns <= len(prompt) and torch.equal(
            prompt[row.padding : columns].to(row.ids.device), row.ids
        )
        if not same:
            raise InputError(
                "beams have changed places in the cache, so its rows are not those of input_ids; "
                "save the prompts, repeated for each beam"
            )


def _tried(model: Any, layout: KVLayout) -> KVLayout:
    """Return the layout with the KV heads that the model has when it computes a token.

    Raises ConfigError if the results are not K and V of each layer, all of one shape.
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
