"""Prefixes of prompts for `generate`: load stored ones, save computed ones.

A loaded cache holds exactly what was saved for the same tokens and the same model, or nothing. The
model is looked at before each load and each save, and computes 16 known tokens again; K of the
first layer is compared with the ids that it is loaded or saved for. Several threads and processes
may use it at once; each returned cache is for one call of `generate`, which changes it.

Batches are padded on the left, as `generate` requires.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch.nn.functional import pad
from transformers import DynamicCache

from vua.core import VUAConfig
from vua.errors import InputError, VUAError
from vua.format.identity import Identity
from vua.format.layout import KVLayout
from vua.io.forks import new_lock
from vua.serdes import DTYPE_NAMES
from vua.store.agreement import distances
from vua.store.identified import LazyStore
from vua.store.place import locate
from vua.transformers.layers import LayerCache, StoredLayers, first_filled
from vua.transformers.model import Description, Engine, NoIdentityError, Stores, unwrapped
from vua.transformers.probe import Mark, device_of, first_keys, light_mark, mark_of, sums


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
_ROUNDING: Final = {"F64": 1e-3, "F32": 1e-2, "F16": 0.05, "BF16": 0.1}
"""Relative difference of K in a dtype between two orders of sums; another token's is about 1."""
_MOST_STATES: Final = 4
"""States of a model, such as its adapters, whose namespaces stay open."""
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
        model: Any,
        state: Description | None,
        rows: Sequence[Row],
        measured: Callable[[int, int, int, float], None],
    ) -> None:
        """``measured``: is told how long each prefill took; its object's `load` makes this."""
        self._model, self.state, self.rows, self.measured = model, state, rows, measured
        self._light = light_mark(model)
        self.tensors = () if state is None else state.mark[1:2]
        """Their mark."""
        self.loaded = 0
        """Columns that the cache was filled with."""
        self._prefill: tuple[int, int, int, float] | None = None
        """The rows, columns before, columns and beginning of the last one, while it may run."""
        self.problem = ""
        """What happened while the cache was filled that forbids storing it."""

    def __deepcopy__(self, memo: dict[int, object]) -> _Note:
        """Return itself: the model must not be copied with it."""
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()

    def prefill_ended(self, k: torch.Tensor | None = None) -> None:
        """Measure the prefill that may run, once its device has computed ``k``."""
        if k is not None and k.is_cuda:
            torch.cuda.current_stream(k.device).synchronize()
        if self._prefill is not None:
            rows, before, columns, began_s = self._prefill
            self._prefill = None
            self.measured(rows, before, columns, time.monotonic() - began_s)

    def check_model(self, k: torch.Tensor, before: int) -> None:
        """Check the model that computes ``k``, [rows, heads, columns, dim], after other columns.

        Never raises: `generate` is running.
        """
        try:
            self.prefill_ended()
            rows, columns = k.shape[0], k.shape[2]
            if columns > 1:
                self._prefill = (rows, before, columns, time.monotonic())
            if not self.problem and light_mark(self._model) != self._light:
                self.problem = "a hook, a mode or a module changed while the model computed"
        except Exception as problem:  # noqa: BLE001 - the model's own, of any kind
            self.problem = f"the model cannot be looked at ({reason_of(problem)})"


def reason_of(problem: Exception) -> str:
    """Return an exception in one line; VUA's own speak for themselves."""
    text = str(problem) if isinstance(problem, VUAError) else f"{type(problem).__name__}: {problem}"
    return " ".join(text.split())


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
        share: bool = False,
    ) -> None:
        """Use the directory ``path``, which is created (mode 0700) if missing.

        Computes some 250 tokens of a fixed prompt, and one layer of up to 4,096. They name the
        model's caches, beside its weights: what computes otherwise finds nothing. Background
        threads identify the weights, from every byte of the files, which is remembered
        (`vua.weights`), and by comparing the model in memory with them. The constructor waits for
        that up to a second; until then nothing is loaded or saved, see `ready`.

        Args:
            model: a causal language model of transformers, in evaluation mode.
            path: the directory, a URL in a bucket (``s3://bucket/prefix``), or a list: a directory
                and slower tiers. Other models and engines may use it, too.
            chunk_tokens: tokens per chunk, the granularity of reuse.
            epoch: change it to ignore everything stored so far.
            durable: fsync each file. Without it a power cut may cost recent chunks.
            share: store where vLLM's engines store for this checkpoint, so that they load it. For a
                model that holds what its files hold, and is as it was loaded: vLLM compares, but
                what differs little or seldom it may load before it finds that. Once something that
                is stored there differs from what this model computes, it stores for itself; so it
                does after a change.

        Raises:
            NoIdentityError: the model's caches cannot be stored; for all that describing it raises.
            ConfigError: a setting is wrong, or ``path`` is a file.
            StorageError: the directory cannot be created.
        """
        VUAConfig(split_factor=chunk_tokens, epoch=epoch, durable=durable)  # checks them
        self._model, self._said = unwrapped(model), set[str]()
        self._settings: dict[str, Any] = {"chunk_tokens": chunk_tokens, "epoch": epoch}
        self._lock, place = new_lock(), locate(path)

        def use(state: Description, mark: Mark) -> Description:
            def opened(identity: Identity) -> Stores:
                # a model that changed is not the checkpoint's
                sharing = share and state is first
                return Stores(place, identity, state, durable=durable, share=sharing)

            state.mark, state.stored = mark, LazyStore(state.weights(), opened, log)
            return state

        self._use = use
        try:
            mark = mark_of(self._model)
            first = self._state = Description(self._model, **self._settings)
            self._states, self._refused = [self._state], Mark()
            use(self._state, mark)
            if self.ready(_START_WAIT_S):
                self._state.stored.usable()  # says why nothing is loaded or saved
        except (NoIdentityError, OSError):
            raise
        except Exception as problem:  # the model's, its config's or torch's, of any kind
            raise NoIdentityError(reason_of(problem)) from problem

    def __enter__(self) -> PrefixCache:  # noqa: PYI034 - Python 3.10 has no Self
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for running work and release the threads."""
        for state in self._states:
            state.stored.close()

    @property
    def layout(self) -> KVLayout:
        """The layout of these caches."""
        return self._state.layout

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
            return self._state.stored.ready(timeout_s)
        except NoIdentityError:
            return True

    @property
    def identity(self) -> Identity:
        """Identity of these caches; waits without a limit.

        Raises:
            ConfigError, OSError: the model cannot be identified.
        """
        stored = self._state.stored
        stored.ready()
        opened = stored.usable()
        return stored.identity if opened is None else opened.identity

    def load(
        self,
        input_ids: torch.Tensor | Sequence[int],
        *,
        attention_mask: torch.Tensor | None = None,
    ) -> Prefix:
        """Return the longest stored prefix, in whole chunks.

        At least one token of each sequence is left, because `generate` must compute one. Before the
        model is identified nothing is found. For a batch, as many columns are filled as all of its
        sequences have; a sequence that begins with padding is stored without it. The cache keeps
        every token, also of sliding windows, and checks the model each time it is filled.

        Args:
            input_ids: one sequence, (T,), or a batch, (B, T), padded on the left.
            attention_mask: of the shape of ``input_ids``, 0 for padding. By default no padding.

        Raises:
            InputError: other shapes, or padding that is not on the left. Never for the state of the
                directory: damage or a missing chunk shortens the prefix.
        """
        rows = rows_of(input_ids, attention_mask)
        filled, state = _NotedCache(), self._current()
        note = _Note(self._model, state, rows, self._computed)
        columns = note.loaded = 0 if state is None else self._fill(filled, rows, state)
        filled.vua_note = note
        return Prefix(filled, columns)

    def _current(self) -> Description | None:
        """Return the state that the model is in; None, logged once, if it has no identity (yet).

        Where its mark is another one, the model computes the probe again: it is in a known state,
        or a new one is identified from here on.
        """
        model = self._model
        with self._lock:
            try:
                mark = mark_of(model)
                if mark == self._state.mark:
                    return self._state
                if mark == self._refused or any(not state.sums for state in self._states):
                    return None
                self._refused = mark
                new, contents = Description(model, **self._settings), sums(model)
                found = next((one for one in self._states if one.is_also(new, contents)), None)
                if found is None:
                    found = self._use(new, mark)
                    self._states.append(found)
                    if len(self._states) > _MOST_STATES:
                        self._states.pop(0).stored.close()
                    found.stored.ready(_START_WAIT_S)
                found.mark, self._state = mark, found
                self._refused = Mark()
            except Exception as problem:  # noqa: BLE001 - the model's own, of any kind
                self._say(reason_of(problem))
                return None
            return self._state

    def _fill(self, filled: DynamicCache, rows: Sequence[Row], state: Description) -> int:
        """Load what is stored, if it is this model's, and return the number of columns."""
        stores: Stores | None = state.stored.usable()
        if stores is None:
            return 0
        began_s = time.monotonic()
        found, columns, longest = list[Sequence[LayerCache]](), 0, [0] * len(rows)
        for place in stores.places:
            longer, more = self._read(place, rows, columns, longest)
            if more and (not isinstance(place, Engine) or place.agrees(rows, longer, more)):
                found, columns = longer, more
        for row, stored in zip(rows, longest, strict=True):
            stores.looked_up(stored, len(row.ids))
        if not columns or self._say(state.change(whole=False)):
            return 0
        for row, layers in zip(rows, found, strict=True):
            held = columns - row.padding
            if layers and self._say(self._other_ids(row.ids[:held], layers[0])):
                return 0
        for number in range(self.layout.layers):
            mine = [layers[number] if layers else None for layers in found]
            filled.update(*self._joined(rows, mine, columns, number), number)
        tokens = columns - min(row.padding for row in rows)
        stores.savings.loaded(tokens, 0, time.monotonic() - began_s, len(rows))
        return columns

    def _other_ids(self, ids: torch.Tensor, first: LayerCache, known: int = 0) -> str:
        """Return that K of the first layer is not that of ``ids`` from ``known`` on; "" if it is.

        K of the first layer depends on the token and its position alone.
        """
        start = max(known, first_filled(first))
        if start >= len(ids):
            return ""
        expected = first_keys(self._model, ids, start)
        found = first.k[:, start : len(ids)]
        apart = distances(found.to(expected.device), expected)
        wrong = apart > _ROUNDING.get(self.layout.dtype, 0.1)
        if not bool(wrong.any()):
            return ""
        at = start + int(wrong.int().argmax())
        return f"the cache holds K of other tokens than input_ids, from token {at} on"

    def _computed(self, rows: int, before: int, columns: int, took_s: float) -> None:
        """Learn how long a prefill took; where it is still unknown what is stored, nothing."""
        if (stores := self._state.stored.usable()) is not None:
            together = rows * columns
            stores.prefill.measured(together, together * (before + columns / 2), took_s)

    def _say(self, reason: str) -> bool:
        if reason and reason not in self._said:
            self._said.add(reason)
            log.warning("%s; nothing is loaded or stored while that is so", reason)
        return bool(reason)

    def _read(
        self, place: StoredLayers, rows: Sequence[Row], least: int, longest: list[int]
    ) -> tuple[list[Sequence[LayerCache]], int]:
        """Return the layers of each row, and how many columns all rows have; 0 if one has none.

        Or if all together have ``least`` at most. Raises ``longest``: the tokens stored of each.

        A row that is padding up to there has no layers.
        """
        most, size = [len(row.ids) - 1 for row in rows], self.layout.chunk_tokens
        padding = min(row.padding for row in rows)
        if least >= min(
            row.padding + end // size * size for row, end in zip(rows, most, strict=True)
        ):
            return [], 0
        for _ in range(_TRIES):
            ends = [place.longest(row.ids[:end]) for row, end in zip(rows, most, strict=True)]
            longest[:] = map(max, longest, ends)
            columns = min(row.padding + end for row, end in zip(rows, ends, strict=True))
            if columns <= max(padding, least):
                break
            found: list[Sequence[LayerCache]] = []
            for number, row in enumerate(rows):
                wanted = max(0, columns - row.padding)
                layers, most[number] = place.read(row.ids, wanted, device_of(self._model))
                found.append(layers)
                if most[number] < wanted:
                    break
            else:
                return found, columns
        return [], 0

    def _joined(
        self, rows: Sequence[Row], layers: Sequence[LayerCache | None], columns: int, number: int
    ) -> list[torch.Tensor]:
        """Return K and V of one layer, [rows, heads, columns, dim]; zeros for padding."""
        probe = self._state.probe
        device, none = probe.devices[number], [part[:, :0] for part in probe.layers[number]]
        if len(rows) == 1 and layers[0] and not rows[0].padding:
            return [part[None].to(device) for part in layers[0]]
        return [
            torch.stack([pad(one.to(device), (0, 0, columns - one.shape[1], 0)) for one in part])
            for part in zip(*(layer or none for layer in layers), strict=True)
        ]

    def save(
        self,
        input_ids: torch.Tensor | Sequence[int],
        cache: DynamicCache,
        *,
        attention_mask: torch.Tensor | None = None,
        prompt_columns: int | None = None,
    ) -> int:
        """Store the whole chunks that ``cache`` holds, except those already stored.

        Args:
            input_ids: what the cache was computed for: one sequence, (T,), or a batch, (B, T),
                padded on the left; the prompt, or everything that `generate` returned. The shorter
                of ids and cache counts.
            cache: what `load` of this object returned, and what `generate` has filled. Each of its
                rows must belong to the same row of ``input_ids``: true for the prompts of beams,
                not for what beams generated.
            attention_mask: 0 for padding, (B, T) or shorter, as passed to `generate`. By default no
                padding.
            prompt_columns: of ``input_ids``; what follows was generated, and is stored as long as
                later prompts begin with what was. By default all is stored.

        Returns:
            How many chunks were written; none before the model is identified, since `generate` does
                not wait for its cache: a copy is kept in memory, 512 MiB at most of all, and stored
                then. Call `ready` first if that matters.

        Raises:
            InputError: other shapes, padding that is not on the left, a cache that `load` did not
                return, or one of other tokens (those of beams).
            LayoutError: the directory holds other shapes for this model.
            NotWritableError, StorageFullError, StorageError: the directory refuses.
        """
        rows, note = rows_of(input_ids, attention_mask), getattr(cache, "vua_note", None)
        if not isinstance(note, _Note) or note.measured != self._computed:
            raise InputError(
                f"a {type(cache).__name__} that load() of this PrefixCache did not return cannot "
                "be stored; pass load(ids).cache to generate() as past_key_values, and save that"
            )
        state, layers = self._current(), self._layers(cache, len(rows))
        if not layers or state is None:
            return 0
        early, stores = state.stored.identifying, state.stored.usable()
        if stores is None and not early:
            return 0
        note.prefill_ended(layers[0].k)
        unchanged = functools.cache(lambda: self._is_unchanged_since(note, state))
        written, held = 0, layers[0].k.shape[2]
        for number, row in enumerate(rows):
            length = min(len(row.ids), held - row.padding)
            length -= length % self.layout.chunk_tokens
            if length <= 0:
                continue
            mine = [
                LayerCache(*(tensor[number, :, row.padding :][:, :length] for tensor in layer))
                for layer in layers
            ]
            known = _loaded_of(note, row, number, len(rows))
            ids = row.ids[:length]

            @functools.cache
            def may(
                ids: torch.Tensor = ids, mine: list[LayerCache] = mine, known: int = known
            ) -> bool:
                if not unchanged():
                    return False
                if problem := self._other_ids(ids, mine[0], known):
                    raise InputError(
                        f"{problem}; save the ids that the cache was computed for (of beams: the "
                        "prompts)"
                    )
                return True

            prompt = None if prompt_columns is None else prompt_columns - row.padding
            if stores is None:
                self._keep(state, ids, mine, may, prompt)
            else:
                written += stores.save(ids, mine, may, known, prompt)
        return written

    def _keep(
        self,
        state: Description,
        ids: torch.Tensor,
        layers: Sequence[LayerCache],
        may: Callable[[], bool],
        prompt: int | None,
    ) -> None:
        if not may():
            return

        def copy() -> Callable[[Stores], object]:
            held, contents = ids.clone(), sums(self._model)
            copied = [LayerCache(k.to("cpu", copy=True), v.to("cpu", copy=True)) for k, v in layers]

            def same() -> bool:
                return contents == state.sums

            return lambda stores: stores.save(held, copied, same, 0, prompt)

        state.stored.keep(sum(layer.k.nbytes + layer.v.nbytes for layer in layers), copy)

    def _is_unchanged_since(self, note: _Note, state: Description) -> bool:
        same = note.state is state and note.tensors == state.mark[1:2]
        changed = note.problem or ("" if same else "the model changed since the load")
        return not self._say(changed or state.change(whole=bool(state.sums)))

    def _layers(self, cache: DynamicCache, rows: int) -> list[LayerCache]:
        """Return K and V of every layer, [rows, heads, columns, dim]."""
        if not (columns := cache.get_seq_length()):
            return []
        layout = self.layout
        layers = [LayerCache(layer.keys, layer.values) for layer in cache.layers]
        expected = [
            ((rows, layout.kv_heads, columns, dim), layout.dtype)
            for dim in (layout.k_dim, layout.v_dim)
        ]
        for number, layer in enumerate(layers):
            found = [
                (tuple(one.shape), DTYPE_NAMES.get(one.dtype, str(one.dtype))) for one in layer
            ]
            if found != expected or len(layers) != layout.layers:
                raise InputError(
                    f"K and V of layer {number} of {len(layers)} are {found}; expected {expected} "
                    f"of {layout.layers} layers"
                )
        return layers


class NoPrefixes(PrefixCache):
    """Stands for the cache of a model that has none: finds and stores nothing, never raises."""

    def __init__(self, problem: Exception) -> None:
        self._problem, self._states = problem, []

    def ready(self, timeout_s: float | None = None) -> bool:
        return True

    @property
    def identity(self) -> Identity:
        raise self._problem

    def load(self, input_ids: Any, **_: Any) -> Prefix:
        return Prefix(DynamicCache(), 0)

    def save(self, input_ids: Any, cache: DynamicCache, **_: Any) -> int:
        return 0


def _loaded_of(note: _Note, row: Row, number: int, rows: int) -> int:
    given = note.rows[min(number // max(1, rows // len(note.rows)), len(note.rows) - 1)]
    loaded = note.loaded - row.padding
    same = given.padding == row.padding and torch.equal(
        given.ids[:loaded].to(row.ids), row.ids[:loaded]
    )
    return loaded if same and loaded > 0 else 0
