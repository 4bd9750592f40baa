"""The names of a loaded model's caches, besides what it computes (`vua.transformers.probe`).

A model that holds what its files hold is named by every byte of the files, as in every engine; any
other one, such as one with an adapter, by every byte of its tensors. The comparison is element by
element and names the first tensor that differs. A tensor of another dtype than its file's is
compared with what `from_pretrained` makes of the file: the same values, cast.

Caches lie in namespaces of transformers' own. A model that holds what its files hold may also load
what other engines have stored for these, after a comparison, see :class:`Engine`.

The namespaces of one model: its own, named by what it computes, and that of engines.

A namespace beside them, of the same identity without the probe's name, holds the probes: K and V of
the prompt of `vua.transformers.probe`, each as one chunk. A model whose probe agrees with a stored
one uses the namespace of that one's digest; else it stores its own. So models that compute the same
meet, also where another kernel rounds otherwise, and no other model is among them. If a probe is
evicted, the next model that opens stores its own: on the same hardware it has the same name, else
the chunks of the other name are misses.

Each engine has a namespace of its own for the same files. vLLM's and SGLang's are read, and each
load is compared. Only where the operator says so is something stored for vLLM.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.core_model_loading import revert_weight_conversion

from vua.connector.cache_spec import Group, division, local_directory
from vua.connector.load_policy import PrefillSpeed, Replies, Savings
from vua.connector.setup import devices, setting_form
from vua.errors import ConfigError, VUAError
from vua.format.identity import Identity, config_digest, named_by, rope_order, varies_with_length
from vua.format.layout import KVLayout
from vua.security.settings import Security
from vua.storage.location import Location
from vua.store.identified import LazyStore, ModelDescription
from vua.transformers.layers import LayerCache, StoredLayers, groups_of
from vua.transformers.probe import (
    PIECE_NBYTES,
    TOKENS,
    Mark,
    Probe,
    device_of,
    digest,
    digest_of,
    layers_of,
    named_tensors,
    run,
    same_bytes,
    sums,
    tensor_mark,
)
from vua.weights import Weights, checkpoint_files
from vua.weights.content import State
from vua.weights.fingerprint import code_digest


def difference_from_files(model: Any, files: Sequence[Path], stop: threading.Event) -> str:
    """Return which parameter or persistent buffer differs from the files; "" if none does.

    Reads every byte of the files' tensors that the model has. Memory: 64 MiB, and one tensor if
    transformers keeps several of the file's tensors as one.

    Args:
        model: a model in memory.
        files: the checkpoint's weight files.
        stop: once set, the call ends with CancelledError.

    Raises:
        OSError: a file cannot be read.
        CancelledError: ``stop`` was set.
    """
    with ExitStack() as stack:
        stored: dict[str, Any] = {}
        try:
            for path in files:
                file = stack.enter_context(safe_open(path, framework="pt"))
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
                if both := stored.keys() & slices:
                    return f"the files cannot be read as tensors ({min(both)} is in two of them)"
                stored |= slices
        except SafetensorError as error:
            return f"the files cannot be read as tensors ({error})"
        names: dict[tuple[object, ...], list[str]] = {}
        tensors = dict(named_tensors(model))
        for name, tensor in tensors.items():  # tied ones are one tensor with several names
            place = (tensor.data_ptr(), tensor.shape, tensor.stride())
            names.setdefault(place if tensor.nbytes else (name,), []).append(name)
        for group in names.values():
            # tied ones need not all be in the files
            kept = [name for name in group if not stored.keys().isdisjoint(_names(model, name))]
            for name in kept or group[:1]:
                if problem := _difference(model, name, tensors[name], stored, stop):
                    return problem
    return ""


def _difference(
    model: Any,
    name: str,
    tensor: torch.Tensor,
    stored: Mapping[str, Any],
    stop: threading.Event,
) -> str:
    for same in _names(model, name):
        if same in stored and tuple(stored[same].get_shape()) == tuple(tensor.shape):
            return _compared(name, tensor, stored[same], stop)
    try:
        parts = revert_weight_conversion(model, {name: tensor.detach()})
    except Exception as error:  # noqa: BLE001 - it needs other tensors, too, or finds no rule
        return f"{name} is in the files under no known name ({error})"
    for same, part in parts.items():
        if same not in stored or tuple(stored[same].get_shape()) != tuple(part.shape):
            return f"{name} is of shape {tuple(tensor.shape)}; the files hold no such tensor"
        if problem := _compared(name, part, stored[same], stop):
            return problem
    return ""


def _names(model: Any, name: str) -> tuple[str, ...]:
    prefix = f"{model.base_model_prefix}."
    return name, prefix + name, name.removeprefix(prefix)


def _compared(name: str, tensor: torch.Tensor, stored: Any, stop: threading.Event) -> str:
    tensor = tensor.detach()
    length = len(tensor) if tensor.ndim else 1
    rows = max(1, PIECE_NBYTES * length // max(1, tensor.nbytes))
    for at in range(0, length, rows):
        if stop.is_set():
            raise CancelledError
        part = slice(at, at + rows) if tensor.ndim else ...
        expected, found = stored[part].to(tensor.device), tensor[part]
        if expected.is_floating_point() and found.is_floating_point():
            expected = expected.to(found.dtype)
        if not same_bytes(expected, found):
            return f"{name} differs from what the files hold"
    return ""


log = logging.getLogger(__name__)

LAYERS: Final = (DynamicLayer, DynamicSlidingWindowLayer)
"""Cache layers that hold K and V of single tokens, and nothing else."""
_REMEDY: Final = "load the model with from_pretrained() from a local directory or the hub's cache"


class NoIdentityError(ConfigError):
    """The model has no lasting identity: nothing is loaded or stored for it."""


def unwrapped(model: Any) -> Any:
    """Return the model whose `generate` runs: without torch.compile's wrapper, or PEFT's."""
    if (inner := vars(model).get("_modules", {}).get("_orig_mod")) is not None:
        return unwrapped(inner)
    return unwrapped(model.get_base_model()) if hasattr(model, "get_base_model") else model


class Description:
    """A model in one state: what it computes, and what names its caches."""

    mark: Mark = ()
    """Of the model when it was last found in this state."""
    stored: LazyStore[Any]
    """Where its caches are kept, once somebody wants to."""

    def __init__(self, model: Any, *, chunk_tokens: int, epoch: str) -> None:
        """Compute the probe; read no file.

        Raises:
            ConfigError: no prefix of this model can be reused.
        """
        self.model = model
        text = model.config.get_text_config()
        if reason := _unsupported(model, text):
            raise ConfigError(f"caches of a {text.model_type} model cannot be stored: {reason}")
        try:
            self.probe = Probe(model)
        except ConfigError as problem:
            raise ConfigError(
                f"caches of a {text.model_type} model cannot be stored: {problem}"
            ) from problem
        self.layout = KVLayout(
            layers=len(self.probe.layers),
            kv_heads=self.probe.kv_heads,
            k_dim=self.probe.k_dim,
            v_dim=self.probe.v_dim,
            dtype=self.probe.dtype,
            chunk_tokens=chunk_tokens,
        )
        self.groups = groups_of(self.layout, windows_of(model, self.layout.layers))
        self.of_files = False
        """Whether it was found to hold what its files hold."""
        self.sums = b""
        """The digest of all bytes, once they are identified."""
        self._tensors = tensor_mark(model)
        self._folder, self._files, self._apart = _checkpoint(model)
        self._states = [State.of(file) for file in self._files]
        config = setting_form(text.to_dict(), "config")
        self._common = Identity(
            model="",
            kv_dtype=self.layout.dtype,
            rope=rope_order(text.model_type),
            epoch=epoch,
            chunk_tokens=chunk_tokens,
            name=_name(model, self._folder),
        )
        self._as_loaded = config | division(self.groups)
        attention = str(getattr(text, "_attn_implementation", None) or "eager")
        self.fields = self._as_loaded | {
            "vua_stored_by": f"transformers {transformers.__version__}",
            "vua.class": f"{type(model).__module__}.{type(model).__qualname__}",
            "vua.code": _code(model),
            "vua.attention": attention,
            "vua.experts": str(getattr(text, "_experts_implementation", None) or ""),
        }
        self.others = self.named(self._common, "")

    def named(self, identity: Identity, probe: str) -> Identity:
        """Return the identity of what agrees with the probe of that name."""
        return _of(identity, self.fields | {"vua.probe": probe})

    def by_engine(self, engine: str, weights: str) -> Identity | None:
        """Return the identity under which another engine stores for these files, by its defaults.

        None: the model is not as it was loaded, takes more than text, or keeps K and V where other
        engines keep a latent.
        """
        text = self.model.config.get_text_config()
        of_text = text is self.model.config and not getattr(text, "kv_lora_rank", None)
        if not self.of_files or not of_text:
            return None
        return replace(_of(self._common, named_by(engine, self._as_loaded)), weights=weights)

    def is_also(self, other: Description, contents: bytes) -> bool:
        """Whether ``other``, a model with these bytes, is in this state."""
        return (
            contents == self.sums
            and self.fields == other.fields
            and not self.probe.unlike(other.probe.layers, self.probe.layers, each=True)
        )

    def change(self, *, whole: bool) -> str:
        """Return how the model differs from this state; "" if it does not.

        Computes 16 tokens; reads all bytes if ``whole``: about as long as generating one token.
        """
        if difference := self.probe.change():
            self.mark = ()  # the mark has not shown it: the next look computes the whole prompt
            return f"the model computes something else than when it was identified: {difference}"
        if whole and sums(self.model) != self.sums:
            return "the model's tensors hold other values than were identified"
        return ""

    def weights(self) -> ModelDescription:
        """Return what is identified in the background: the files, and whether they hold it."""

        def check(weights: Weights | None, stop: threading.Event) -> Weights:
            before, unlike = sums(self.model), self._apart
            if weights is not None:
                unlike = difference_from_files(self.model, self._files, stop)
                if self._states != [State.of(file) for file in self._files]:
                    unlike = unlike or "a file of the model changed since it was loaded"
            found = self._own(unlike, stop) if unlike or weights is None else weights
            if sums(self.model) != before or tensor_mark(self.model) != self._tensors:
                raise NoIdentityError("its tensors changed while they were identified")
            self.sums, self.of_files = before, found is weights
            return found

        return ModelDescription(self._files, self.others, check)

    def _own(self, difference: str, stop: threading.Event) -> Weights:
        began = time.monotonic()
        name = self.model.config.name_or_path or type(self.model).__name__
        log.info("%s: named by its tensors in memory, because %s", name, difference)
        try:
            found = digest(self.model, stop)
        except CancelledError:
            raise
        except Exception as problem:  # a tensor's own, of any kind
            raise NoIdentityError(
                f"its tensors have no bytes to digest ({type(problem).__name__}: {problem})"
            ) from problem
        nbytes = sum(tensor.nbytes for tensor in self.model.parameters())
        return Weights(found, (), nbytes, nbytes, time.monotonic() - began, time.time())


def _of(identity: Identity, fields: dict[str, Any]) -> Identity:
    return replace(identity, model=config_digest(fields), counted=fields)


def identity_of(
    model: Any, *, chunk_tokens: int = 64, epoch: str = "", engine: str = "vllm"
) -> Identity:
    """Return the identity under which an engine stores for a model's files: for your own programs.

    A model that does not hold what its files hold has its own. Reads the files, unless their
    digests are remembered (`vua.weights`). `PrefixCache` names its own caches.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        chunk_tokens: tokens per chunk.
        epoch: change it to ignore everything stored so far.
        engine: "vllm", whose engines compare what they load, or "sglang".

    Raises:
        ConfigError: the model's caches cannot be stored.
        OSError: a file cannot be read.
    """
    found = Description(unwrapped(model), chunk_tokens=chunk_tokens, epoch=epoch)
    weights = found.weights().identify(threading.Event()).fingerprint
    return found.by_engine(engine, weights) or replace(found.others, weights=weights)


def windows_of(model: Any, layers: int) -> list[int | None]:
    """Return the tokens of each layer's sliding window; None: it attends to everything.

    Raises ConfigError if the config has not so many layers with K and V.
    """
    made = DynamicCache(config=model.config.get_text_config()).layers
    if len(made) != layers:
        raise ConfigError(f"it keeps K and V for {layers} layers, its config says {len(made)}")
    return [getattr(layer, "sliding_window", None) for layer in made]


def _unsupported(model: Any, text: Any) -> str:
    """Return why a prefix of this model cannot be reused; "" if it can."""
    if text.is_encoder_decoder or model.config.is_encoder_decoder:
        return "they depend on an encoder's input, not on token ids alone"
    if varies_with_length(text.to_dict()):
        return "its rotary embedding changes with the prompt's length, so no prefix is shared"
    others = {type(layer).__name__ for layer in DynamicCache(config=text).layers}
    others -= {layer.__name__ for layer in LAYERS}
    if others:
        return f"it has layers without K and V per token ({', '.join(sorted(others))})"
    if model.training:
        return "it is in training mode, expected model.eval()"
    return ""


def _code(model: Any) -> list[str]:
    modules = [sys.modules[kind.__module__] for kind in (type(model), type(model.config))]
    folders = {
        Path(str(module.__file__)).parent
        for module in modules
        if module.__name__.startswith("transformers_modules.")
    }
    return [code_digest(folder) for folder in sorted(folders)]


def _checkpoint(model: Any) -> tuple[Path | None, list[Path], str]:
    """Return a model's folder and weight files, or why no files name its caches."""
    name, folder = str(model.config.name_or_path or ""), None
    if not name:
        return None, [], f"the model names no files, so no files name its caches; {_REMEDY}"
    try:  # transformers notes the commit that it has read
        folder = local_directory(name, getattr(model.config, "_commit_hash", None), None)
        whole = folder / "model.safetensors"  # comes before an index, as from_pretrained reads
        return folder, [whole] if whole.is_file() else checkpoint_files(folder), ""
    except ConfigError as problem:
        nowhere = (
            f"{name!r}, which the model names, is neither a directory nor in the hub's cache, so "
            f"no files name its caches; {_REMEDY}"
        )
        return folder, [], str(problem) if folder else nowhere


def _name(model: Any, folder: Path | None) -> str:
    name = str(model.config.name_or_path or type(model).__name__)
    if folder is None:
        return name
    return folder.resolve().name if Path(name).is_dir() else name


_Stored = TypeVar("_Stored", bound=StoredLayers)

_MOST_PROBES = 4
"""Probes stored beside each other: models with the same files and config that compute otherwise."""
_MOST_DIFFERING = 3
"""Comparisons in a row after which another engine's chunks are left alone: each costs a load."""


class Engine(StoredLayers):
    """What another engine has stored for the model's files: compared before it is used.

    Engines read the same config differently, so each load is judged: the model computes the last
    chunk after what is stored before it. K and V of that chunk depend on all chunks.
    """

    name = ""
    """The engine's."""
    described: Description
    """The model of transformers that reads it."""
    differed = False
    """Whether a comparison has found so."""
    _agreed, _in_a_row = False, 0

    def longest(self, ids: torch.Tensor) -> int:
        """As `StoredLayers.longest`; 0 where so much differed that nothing is compared any more."""
        left = self.misfits or self._in_a_row >= _MOST_DIFFERING
        return 0 if left else super().longest(ids)

    def agrees(
        self,
        rows: Sequence[tuple[torch.Tensor, int]],
        found: Sequence[Sequence[LayerCache]],
        columns: int,
    ) -> bool:
        """Whether the model computes the last chunk of each row as it was stored.

        Args:
            rows: ids without padding, (T,), and columns of padding before them.
            found: what was read of each row, up to a column; nothing for one of padding.
            columns: up to which.
        """
        size, device = self.described.layout.chunk_tokens, device_of(self.described.model)
        problem = ""
        for (ids, padding), layers in zip(rows, found, strict=True):
            tokens = columns - padding
            start = max(0, (tokens - 1) // size * size)
            before, _ = self.read(ids, start, device)  # windows end there
            if start and not before:
                return False
            if tokens > 0 and not problem:
                problem = self._difference(ids, before, layers, start)
        return self._judged(problem)

    def _difference(
        self,
        ids: torch.Tensor,
        before: Sequence[LayerCache],
        layers: Sequence[LayerCache],
        start: int,
    ) -> str:
        past, probe, tokens = DynamicCache(), self.described.probe, layers[0].k.shape[1]
        for number, (device, (k, v)) in enumerate(zip(probe.devices, before, strict=False)):
            past.update(k[None].to(device), v[None].to(device), number)
        run(self.described.model, ids[start:tokens], past, start)
        stored = [LayerCache(k[:, start:], v[:, start:]) for k, v in layers]
        return probe.unlike(layers_of(past, start, tokens), stored)

    def takes(self, ids: torch.Tensor) -> bool:
        """Whether what was computed for ``ids``, (T,), may be stored beside what is there.

        Only beside what has been compared: by a load.
        """
        compared = self._agreed or not super().longest(ids)
        return compared and not self.differed and not self.misfits

    def _judged(self, problem: str) -> bool:
        if problem and not self.differed:
            log.warning(
                "%s: what %s has stored for its files is not what this model computes: %s. It is "
                "not loaded, and nothing is stored beside it",
                *(self.described.others.name, self.name, problem),
            )
        self._agreed, self.differed = self._agreed or not problem, self.differed or bool(problem)
        self._in_a_row = self._in_a_row + 1 if problem else 0
        return not problem


class Stores:
    """Where a model's caches are kept, and what loads and prefills take."""

    def __init__(
        self,
        place: Location,
        identity: Identity,
        described: Description,
        *,
        durable: bool,
        share: bool,
    ) -> None:
        """Find or store the probe, and name the namespaces; nothing else is opened yet.

        Args:
            place: the cache's location, as `vua.store.place.locate` returns it.
            identity: with the weights.
            described: the model in this state.
            durable: fsync each file.
            share: store for vLLM.
        """
        self._place, self._durable, self._replies = place, durable, Replies()
        self._identity, self._described = identity, described
        self.prefill = PrefillSpeed(identity.chunk_tokens)
        self.savings = Savings(self.prefill)
        self.savings.keep_at(str(place), f"{identity.namespace} {devices()}", Security())
        named = described.named(identity, self._probe_name())
        self._own = self._at(named, described.groups, StoredLayers)
        engines = list[Engine]()
        for name, engine in (("vLLM", "vllm"), ("SGLang", "sglang")):
            if (theirs := described.by_engine(engine, identity.weights)) is not None:
                found = self._at(theirs, described.groups, Engine)
                found.name, found.described = name, described
                engines.append(found)
        self.places: Sequence[StoredLayers] = self._own, *engines
        """Where something may be stored, its own first."""
        self._shared = engines[0] if share and engines else None
        """Where it stores for vLLM."""
        if share and self._shared is None:
            log.warning(
                "%s: stored for itself: its tensors are not those of its files, or its K and V "
                "have no form that is the same in vLLM",
                identity.name,
            )

    def _at(self, identity: Identity, groups: Sequence[Group], kind: type[_Stored]) -> _Stored:
        return kind(self._place, identity, groups, self._replies, durable=self._durable)

    @property
    def identity(self) -> Identity:
        """Under which it stores."""
        shared = self._shared
        return (self._own if shared is None or shared.differed else shared).identity

    def save(
        self,
        ids: torch.Tensor,
        layers: Sequence[LayerCache],
        may: Callable[[], bool],
        loaded: int = 0,
        prompt: int | None = None,
    ) -> int:
        """As `StoredLayers.save`, where what was computed is stored, see `Engine.takes`."""
        shared = self._shared
        where = shared if shared is not None and shared.takes(ids) else self._own
        return where.save(ids, layers, may, loaded, prompt)

    def close(self) -> None:
        self.savings.close()
        for stored in self.places:
            stored.close()

    def looked_up(self, stored: int, tokens: int) -> None:
        """Note that so many of a row's tokens are stored."""
        name, size = self.identity.namespace, self._identity.chunk_tokens
        self.savings.looked_up(name, stored // size, (tokens - 1) // size, size)  # one is computed

    def _probe_name(self) -> str:
        """Return the name of the stored probe that agrees with the model's, or store its own."""
        probe, layout = self._described.probe, self._described.layout
        named = self._described.named(self._identity, "probes")
        stored = self._at(
            replace(named, chunk_tokens=TOKENS),
            groups_of(replace(layout, chunk_tokens=TOKENS), [None] * layout.layers),
            StoredLayers,
        )
        device = device_of(self._described.model)

        def read(ids: torch.Tensor) -> list[LayerCache]:
            return [*stored.read(ids, TOKENS, device)[0]] if stored.longest(ids) else []

        def agrees(layers: list[LayerCache]) -> bool:
            return bool(layers) and not probe.unlike(probe.layers, layers, each=True)

        try:
            prompts = [torch.full((TOKENS,), number) for number in range(_MOST_PROBES)]
            held = [read(ids) for ids in prompts]
            if not any(map(agrees, held)) and [] in held:
                free = prompts[held.index([])]
                with suppress(VUAError, OSError):  # read-only or full: named by its own bytes
                    stored.save(free, probe.layers, lambda: True)
                held.append(read(free))  # another process may have been first
            return digest_of(next((one for one in held if agrees(one)), probe.layers))
        finally:
            stored.close()
