"""What a loaded model is, in VUA's terms: whose caches it may use, and their layout.

Promises that two models get one identity only if their K and V mean the same, and refuses a model
of which that cannot be told. Weights are identified by every byte of their files; what is in memory
is compared with these only in samples, and what changes there afterwards goes unseen.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from vua.connector.cache_spec import division
from vua.errors import ConfigError
from vua.format.config_digest import config_digest
from vua.format.identity import Identity
from vua.format.layout import KVLayout
from vua.format.rope import rope_order, varies_with_length
from vua.format.shared_config import unshared
from vua.serdes import DTYPES
from vua.store.identified import Described
from vua.transformers.layers import groups_of
from vua.weights import checkpoint_files, identify_weights
from vua.weights.model_files import code_digest

__all__ = [
    "DTYPE_NAMES",
    "LAYERS",
    "described_model",
    "identity_of",
    "layout_of",
    "windows_of",
]

DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
LAYERS: Final = (DynamicLayer, DynamicSlidingWindowLayer)
"""The cache layers that hold K and V of single tokens, and nothing else."""

_REMEDY: Final = "load the model with from_pretrained() from a local directory or the hub's cache"


def identity_of(
    model: Any,  # noqa: ANN401
    *,
    chunk_tokens: int = 64,
    epoch: str = "",
) -> Identity:
    """Return the identity of the caches that ``model`` computes; vLLM's of that model is the same.

    Reads the weights' files, unless it is remembered what they hold (`vua.weights`).

    Args:
        model: a model that `from_pretrained` made.
        chunk_tokens: tokens per chunk.
        epoch: change it to leave everything stored so far unused.

    Raises:
        ConfigError: the model's weights cannot be identified, or are not those of its files.
        OSError: a file cannot be read.
    """
    described = described_model(model, chunk_tokens=chunk_tokens, epoch=epoch)
    return described.identity(identify_weights(described.files))


def described_model(model: Any, *, chunk_tokens: int, epoch: str) -> Described:  # noqa: ANN401
    """Return what `identity_of` returns but for the weights; raises the same."""
    text = model.config.get_text_config()
    described = text.to_dict()
    if getattr(model, "peft_config", None):
        raise ConfigError(
            "the model has an adapter (PEFT), which its files do not show; store the merged model "
            "with save_pretrained() and load that"
        )
    _check_rope(model)
    folder = _weights_folder(model)
    if not getattr(model.config, "quantization_config", None):
        _check_weights(model, folder)
    rope = rope_order(text.model_type)
    if code := _code(model, folder):
        described["vua.code"] = code
    if unshared(described):  # another engine may compute something else: keep apart
        described["vua_stored_by"] = "transformers"
    layout = layout_of(model, chunk_tokens=chunk_tokens)
    described |= division(groups_of(layout, windows_of(model)))
    others = Identity(
        model=config_digest(described),
        kv_dtype=_dtype_name(model),
        rope=rope,
        epoch=epoch,
        chunk_tokens=chunk_tokens,
        name=_name(model, folder),
    )
    return Described(_weight_files(folder), others)


def layout_of(model: Any, *, chunk_tokens: int = 64) -> KVLayout:  # noqa: ANN401
    """Return the layout of the caches that ``model`` computes.

    Raises:
        ConfigError: its caches are not K and V of one text's tokens, layer by layer.
    """
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


def windows_of(model: Any) -> list[int | None]:  # noqa: ANN401
    """Return of each layer how many tokens its sliding window has; None: it attends to everything.

    Args:
        model: one of which `layout_of` has a layout.
    """
    layers = DynamicCache(config=model.config.get_text_config()).layers
    return [getattr(layer, "sliding_window", None) for layer in layers]


def _unsupported(model: Any, text: Any) -> str:  # noqa: ANN401
    """Return why a prefix of this model cannot be used again; "" where it can."""
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


def _dtype_name(model: Any) -> str:  # noqa: ANN401
    name = DTYPE_NAMES.get(model.dtype)
    if name is None:
        raise ConfigError(f"a model of {model.dtype} is not supported; use one of {[*DTYPES]}")
    return name


def _check_rope(model: Any) -> None:  # noqa: ANN401
    """Refuse rounded frequencies: K then differs by far more than its own rounding."""
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and buffer.dtype != torch.float32:
            raise ConfigError(
                f"{name} is {buffer.dtype}: the model was cast after it was loaded, which changes "
                "K; give from_pretrained() the dtype instead of calling .to(dtype) or .half()"
            )


def _weights_folder(model: Any) -> Path:  # noqa: ANN401
    """Return the directory that the weights were loaded from."""
    name = str(model.config.name_or_path or "")
    if not name:
        raise ConfigError(f"the model names no files, so its caches have no identity; {_REMEDY}")
    if Path(name).is_dir():
        return Path(name)
    revision = getattr(model.config, "_commit_hash", None)
    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # no hub id
        found = None
    if not isinstance(found, str):
        raise ConfigError(
            f"{name!r}, which the model names, is neither a directory nor in the hub's cache, so "
            f"its caches have no identity; {_REMEDY}"
        )
    return Path(found).parent


def _code(model: Any, folder: Path) -> list[str]:  # noqa: ANN401
    """Return digests of the Python code that runs and came with the model's files."""
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
    return [code_digest(folder)]


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that `from_pretrained` reads: one that holds all comes before an index."""
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else checkpoint_files(folder)


def _name(model: Any, folder: Path) -> str:  # noqa: ANN401
    name = str(model.config.name_or_path)
    return folder.resolve().name if Path(name).is_dir() else name


def _check_weights(model: Any, folder: Path) -> None:  # noqa: ANN401
    """Refuse a model whose parameters are not those of the files, seen by their first rows.

    A parameter that the files hold under another name or in another shape is passed over.
    """
    with ExitStack() as stack:
        files = [
            stack.enter_context(safe_open(path, framework="pt"))
            for path in sorted(folder.glob("*.safetensors"))
        ]
        where = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - no mapping
        for name, parameter in model.named_parameters():
            if name not in where or parameter.is_meta or not parameter.ndim:
                continue
            stored = where[name].get_slice(name)
            if list(stored.get_shape()) != list(parameter.shape):
                continue
            row = parameter[:1].detach().cpu()
            if not torch.equal(stored[:1].to(row.dtype), row):
                raise ConfigError(
                    f"{name} differs from {folder}: the model was changed after it was loaded, or "
                    "never loaded; store it with save_pretrained() and load that"
                )
