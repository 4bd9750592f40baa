"""The names of a loaded model's caches, besides what it computes (`vua.transformers.probe`).

A model that holds what its files hold is named by every byte of the files, as in every engine; any
other one, such as one with an adapter, by every byte of its tensors. The comparison is element by
element and names the first tensor that differs. A tensor of another dtype than its file's is
compared with what `from_pretrained` makes of the file: the same values, cast.

Caches lie in namespaces of transformers' own. A model that holds what its files hold may also load
what other engines have stored for these, after a comparison, see `vua.transformers.stores`.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.core_model_loading import revert_weight_conversion

from vua.connector.cache_spec import division, local_directory
from vua.connector.setup import setting_form
from vua.errors import ConfigError
from vua.format.identity import (
    Identity,
    config_digest,
    named_by,
    rope_order,
    varies_with_length,
)
from vua.format.layout import KVLayout
from vua.store.identified import LazyStore, ModelDescription
from vua.transformers.layers import groups_of
from vua.transformers.probe import Probe
from vua.transformers.tensors import (
    PIECE_NBYTES,
    Mark,
    digest,
    named_tensors,
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
