"""The identity and layout of a loaded model.

Two models get one identity only if their K and V mean the same; if that cannot be determined, the
model is refused. A model that matches its files and its configuration is identified by every byte
of the files, as in every engine; any other one by every byte of its tensors and all that computes
with them, or not at all.

The comparison with the files is element by element and names the first tensor that differs. A
tensor of another dtype than its file's is compared with what `from_pretrained` makes of the file:
the same values, cast.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.file_download import repo_folder_name
from safetensors import SafetensorError, safe_open
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import load_state_dict

from vua.connector.cache_spec import division
from vua.errors import ConfigError
from vua.format.identity import Identity, rope_order, varies_with_length
from vua.format.layout import KVLayout
from vua.format.shared_config import unshared
from vua.serdes import DTYPE_NAMES
from vua.store.identified import ModelDescription
from vua.transformers.layers import groups_of
from vua.transformers.tensors import PIECE_NBYTES, Contents, same_bytes
from vua.transformers.watch import ModelWatch, attention_of, is_compared
from vua.weights import Weights, checkpoint_files
from vua.weights.content import State
from vua.weights.fingerprint import code_digest

_TORCH: Final = (".bin", ".pt", ".pth")


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
        try:
            stored = _CheckpointTensors(files, stack)
        except (ValueError, RuntimeError, TypeError, LookupError, SafetensorError) as error:
            return f"the files cannot be read as tensors ({error})"
        names: dict[tuple[object, ...], list[str]] = {}
        tensors = dict(_persistent(model))
        for name, tensor in tensors.items():  # tied ones are one tensor with several names
            place = (tensor.data_ptr(), tensor.shape, tensor.stride())
            names.setdefault(place if tensor.nbytes else (name,), []).append(name)
        for group in names.values():
            problems = [
                (_difference(model, name, tensors[name], stored, stop), stored.has(model, name))
                for name in group
            ]
            found = [problem for problem, has in problems if has]
            if problem := next(filter(None, found or [problem for problem, _ in problems]), ""):
                return problem
    return ""


def may_be_of_files(model: Any, files: Sequence[Path]) -> bool:
    """Whether three rows of each tensor match the files' rows, if they name the tensor.

    Reads little: it tells checkpoints of one model apart, and proves nothing.
    """
    with ExitStack() as stack:
        try:
            stored = _CheckpointTensors(files, stack)
        except (OSError, ValueError, RuntimeError, TypeError, LookupError, SafetensorError):
            return False
        for name, tensor in _persistent(model):
            for same in _names(model, name):
                if same not in stored or stored.shape(same) != tuple(tensor.shape):
                    continue
                last = len(tensor) - 1 if tensor.ndim else 0
                for at in sorted({0, last // 2, last}):
                    row = tensor.detach()[at : at + 1] if tensor.ndim else tensor.detach()
                    expected = stored.rows(same, at, at + 1).to(row.device, row.dtype)
                    if not same_bytes(expected, row):
                        return False
    return True


def _persistent(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    passing = {name for name, _ in model.named_non_persistent_buffers(remove_duplicate=False)}
    yield from model.named_parameters(remove_duplicate=False)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name not in passing:
            yield name, buffer


class _CheckpointTensors:
    """The tensors of a checkpoint's files, by name."""

    def __init__(self, files: Sequence[Path], stack: ExitStack) -> None:
        """Open them. Raises OSError, ValueError, RuntimeError."""
        self._slices: dict[str, Any] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        for path in files:
            if path.suffix == ".safetensors":
                file = stack.enter_context(safe_open(path, framework="pt"))
                for name in file.keys():  # noqa: SIM118 - no mapping
                    self._add(self._slices, name, file)
            elif path.suffix in _TORCH:
                for name, tensor in _loaded(path).items():
                    self._add(self._tensors, name, tensor)
            else:
                raise ValueError(f"{path.name}: no safetensors and no file of torch's")

    def _add(self, where: dict[str, Any], name: str, value: object) -> None:
        if name in self._slices or name in self._tensors:
            raise ValueError(f"{name} is in two files")
        where[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self._slices or name in self._tensors

    def has(self, model: Any, name: str) -> bool:
        """Whether a parameter is here under its own name; tied ones need not be."""
        return any(same in self for same in _names(model, name))

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._tensors:
            return tuple(self._tensors[name].shape)
        return tuple(self._slices[name].get_slice(name).get_shape())

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return part of a tensor along its first dimension; all of a scalar."""
        if name in self._tensors:
            tensor = self._tensors[name]
            return tensor[start:stop] if tensor.ndim else tensor
        if not self.shape(name):
            return self._slices[name].get_tensor(name)
        return self._slices[name].get_slice(name)[start:stop]


def _loaded(path: Path) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a torch file. Raises OSError, RuntimeError, ValueError."""
    found = load_state_dict(str(path))  # transformers' own: tensors only, mapped where it can be
    if not isinstance(found, Mapping):
        raise TypeError(f"{path.name} holds a {type(found).__name__}, expected tensors by name")
    return {str(name): value for name, value in found.items() if isinstance(value, torch.Tensor)}


def _difference(
    model: Any,
    name: str,
    tensor: torch.Tensor,
    stored: _CheckpointTensors,
    stop: threading.Event,
) -> str:
    """Return how one tensor differs from the file's, under any name."""
    if stop.is_set():
        raise CancelledError
    for same in _names(model, name):
        if same in stored and stored.shape(same) == tuple(tensor.shape):
            return _compared(name, tensor, same, stored, stop)
    try:
        parts = revert_weight_conversion(model, {name: tensor.detach()})
    except Exception as error:  # noqa: BLE001 - it needs other tensors, too, or finds no rule
        return f"{name} is in the files under no known name ({error})"
    for same, part in parts.items():
        if same not in stored or stored.shape(same) != tuple(part.shape):
            return f"{name} is of shape {tuple(tensor.shape)}; the files hold no such tensor"
        if problem := _compared(name, part, same, stored, stop):
            return problem
    return ""


def _names(model: Any, name: str) -> tuple[str, ...]:
    prefix = f"{model.base_model_prefix}."
    return name, prefix + name, name.removeprefix(prefix)


def _compared(
    name: str, tensor: torch.Tensor, same: str, stored: _CheckpointTensors, stop: threading.Event
) -> str:
    tensor = tensor.detach()
    length = len(tensor) if tensor.ndim else 1
    rows = max(1, PIECE_NBYTES * length // max(1, tensor.nbytes))
    for at in range(0, length, rows):
        if stop.is_set():
            raise CancelledError
        expected = stored.rows(same, at, at + rows).to(tensor.device)
        found = tensor[at : at + rows] if tensor.ndim else tensor
        if expected.is_floating_point() and found.is_floating_point():
            expected = expected.to(found.dtype)
        if not same_bytes(expected, found):
            return f"{name} differs from what the files hold"
    return ""


log = logging.getLogger(__name__)

LAYERS: Final = (DynamicLayer, DynamicSlidingWindowLayer)
"""Cache layers that hold K and V of single tokens, and nothing else."""

_AS_EVER: Final = "it computes normally, and nothing is loaded or stored"
_REMEDY: Final = "load the model with from_pretrained() from a local directory or the hub's cache"


class NoIdentityError(ConfigError):
    """The model has no lasting identity: nothing is loaded or stored for it."""


def identity_of(
    model: Any,
    *,
    chunk_tokens: int = 64,
    epoch: str = "",
) -> Identity:
    """Return the identity of the caches that ``model`` computes; the same as vLLM's for that model.

    Reads the weights' files, unless their digests are remembered (`vua.weights`), and compares the
    model in memory with them. A model that differs has its own identity, by everything that it is
    in memory.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        chunk_tokens: tokens per chunk.
        epoch: change it to ignore everything stored so far.

    Raises:
        ConfigError: the model has hooks, foreign code or something else without a digest, or
            changes meanwhile.
        OSError: a file cannot be read.
    """
    described = described_model(model, ModelWatch(model), chunk_tokens=chunk_tokens, epoch=epoch)
    return described.identity(described.identify(threading.Event()))


def described_model(
    model: Any,
    watch: ModelWatch,
    *,
    chunk_tokens: int,
    epoch: str,
) -> ModelDescription:
    """Return what `identity_of` returns, without the weights; raises ConfigError.

    Whether the weights are the files' is found by comparing the model in memory with them.
    """
    _check_class(model)
    text = model.config.get_text_config()
    described = text.to_dict()
    folder, files, apart = _checkpoint(model)
    rope = rope_order(text.model_type)
    obstacle = watch.obstacle
    try:
        if code := _code(model, folder):
            described["vua.code"] = code
    except ConfigError as problem:
        obstacle = obstacle or str(problem)
    if unshared(described):  # another engine may compute something else: keep apart
        described["vua_stored_by"] = "transformers"
    if not is_compared(model):
        described["vua.attention"] = [*attention_of(model)]
    layout = layout_of(model, chunk_tokens=chunk_tokens)
    described |= division(groups_of(layout, windows_of(model)))
    others = Identity.of_config(
        described,
        kv_dtype=_dtype_name(model),
        rope=rope,
        epoch=epoch,
        chunk_tokens=chunk_tokens,
        name=_name(model, folder),
    )

    difference = apart or watch.difference
    if obstacle or difference:
        files = []
    states = [State.of(file) for file in files]

    def check(weights: Weights | None, stop: threading.Event) -> Weights:
        if obstacle:
            raise NoIdentityError(f"{obstacle}; {_AS_EVER}")
        contents = watch.read()
        unlike = difference or difference_from_files(model, files, stop)
        if states != [State.of(file) for file in files]:
            raise NoIdentityError(f"a file of the model changed since it was loaded; {_AS_EVER}")
        if unlike or weights is None:
            weights = _own_weights(watch, unlike, stop)
        return _still(watch, contents, weights)

    return ModelDescription(files, others, check)


def _own_weights(watch: ModelWatch, difference: str, stop: threading.Event) -> Weights:
    """Return the fingerprint of a model that differs from its files. Raises CancelledError."""
    began = time.monotonic()
    log.info(
        "%s: its caches are its own and no other engine's, because %s",
        watch.model.config.name_or_path or type(watch.model).__name__,
        difference,
    )
    nbytes = sum(tensor.nbytes for tensor in watch.model.parameters())
    digest = watch.digest(stop)
    return Weights(digest, (), nbytes, nbytes, time.monotonic() - began, time.time())


def _still(watch: ModelWatch, contents: Contents, weights: Weights) -> Weights:
    """Return the weights, if the model has not changed since it was first looked at.

    Raises NoIdentityError.
    """
    change = watch.change() or watch.change_of_versions(watch.versions) or watch.keep(contents)
    if change:
        raise NoIdentityError(f"while the model was identified {change}; {_AS_EVER}")
    return weights


def layout_of(model: Any, *, chunk_tokens: int = 64) -> KVLayout:
    """Return the layout of the caches that ``model`` computes.

    Raises:
        ConfigError: its caches are not K and V of one text's tokens, layer by layer, or it is
            wrapped in a class that is not transformers'.
    """
    _check_class(model)
    text = model.config.get_text_config()
    reason = _unsupported(model, text)
    if reason:
        raise ConfigError(f"caches of a {text.model_type} model cannot be stored: {reason}")
    heads = text.num_attention_heads
    try:
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    except Exception as problem:  # transformers' own, of no public class: it differs by layer
        raise ConfigError(
            f"caches of a {text.model_type} model cannot be stored: its layers' K and V have "
            f"different shapes ({type(problem).__name__}: head_dim)"
        ) from problem
    return KVLayout(
        layers=text.num_hidden_layers,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        k_dim=head_dim,
        v_dim=head_dim,
        dtype=_dtype_name(model),
        chunk_tokens=chunk_tokens,
    )


def windows_of(model: Any) -> list[int | None]:
    """Return the tokens of each layer's sliding window; None: it attends to everything.

    Args:
        model: one with a `layout_of`.
    """
    layers = DynamicCache(config=model.config.get_text_config()).layers
    return [getattr(layer, "sliding_window", None) for layer in layers]


def _check_class(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"the model is a {type(model).__module__}.{type(model).__qualname__}, expected one of "
            "transformers; store an adapter's merged model with save_pretrained() and load that"
        )


def _unsupported(model: Any, text: Any) -> str:
    """Return why a prefix of this model cannot be reused; "" if it can."""
    if text is not model.config or text.is_encoder_decoder:
        return "they depend on more than token ids (an image, a sound, an encoder's input)"
    if getattr(text, "kv_lora_rank", None):
        return "latent attention (MLA) has another form in each engine"
    if varies_with_length(text.to_dict()):
        return "its rotary embedding changes with the prompt's length, so no prefix is shared"
    others = {type(layer).__name__ for layer in DynamicCache(config=text).layers}
    others -= {layer.__name__ for layer in LAYERS}
    if others:
        return f"it has layers without K and V per token ({', '.join(sorted(others))})"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "it is spread over several devices; load it on one"
    return ""


def _dtype_name(model: Any) -> str:
    name = DTYPE_NAMES.get(model.dtype)
    if name is None:
        raise ConfigError(
            f"a model of {model.dtype} is not supported; use one of {[*DTYPE_NAMES.values()]}"
        )
    return name


def _checkpoint(model: Any) -> tuple[Path | None, list[Path], str]:
    """Return the model's directory and weight files; and why it has none, if it has none."""
    try:
        folder = _weights_folder(model)
    except ConfigError as problem:
        return None, [], str(problem)
    try:
        return folder, _weight_files(folder), ""
    except ConfigError as problem:
        return folder, [], str(problem)


def _weights_folder(model: Any) -> Path:
    name = str(model.config.name_or_path or "")
    if not name:
        raise ConfigError(f"the model names no files, so its caches have no identity; {_REMEDY}")
    if Path(name).is_dir():
        return Path(name)
    if not (folders := _snapshots(model, name)):
        raise ConfigError(
            f"{name!r}, which the model names, is neither a directory nor in the hub's cache, so "
            f"its caches have no identity; {_REMEDY}"
        )
    if len(folders) == 1:
        return folders[0]
    return next((folder for folder in folders if _may_come_from(model, folder)), folders[0])


def _snapshots(model: Any, name: str) -> list[Path]:
    """Return the directories of the hub's cache that a model may come from, the likeliest first.

    A model does not name its revision, but its code does, if it came with the files.
    """
    try:
        place = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"))
        main = try_to_load_from_cache(name, "config.json")
        found = sorted(file.parent for file in place.glob("snapshots/*/config.json"))
    except (ValueError, OSError):  # no hub id
        return []
    if isinstance(main, str):
        found.sort(key=lambda folder: folder != Path(main).parent)
    revision = getattr(model.config, "_commit_hash", None)
    of_code = [folder for folder in found if folder.name in type(model).__module__.split(".")]
    return of_code or [folder for folder in found if revision in {None, folder.name}]


def _may_come_from(model: Any, folder: Path) -> bool:
    try:
        return may_be_of_files(model, _weight_files(folder))
    except ConfigError:  # it has none
        return False


def _code(model: Any, folder: Path | None) -> list[str]:
    """Return digests of running Python code that came with the model's files."""
    classes = {type(model).__module__, type(model.config).__module__}
    if not any(name.startswith("transformers_modules.") for name in classes):
        return []
    named = getattr(model.config, "auto_map", None) or {}
    elsewhere = sorted({str(each) for each in named.values() if "--" in str(each)})
    if elsewhere:
        raise ConfigError(
            f"the model runs code of another repository ({elsewhere[0]}), of which its files do "
            "not tell the revision; copy the code beside the weights"
        )
    if folder is None:
        raise ConfigError("the model runs code of its checkpoint, which is not found")
    return [code_digest(folder)]


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that `from_pretrained` reads: a single file comes before an index."""
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else checkpoint_files(folder)


def _name(model: Any, folder: Path | None) -> str:
    name = str(model.config.name_or_path or type(model).__name__)
    if folder is None:
        return name
    return folder.resolve().name if Path(name).is_dir() else name
