"""Sizes of small models; copies of checkpoints with other tensors, files or configurations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SIZES: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 128,
    "initializer_range": 0.25,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 3,
    "tie_word_embeddings": False,
    "vocab_size": 512,
}
"""Of the small models that are made from a configuration of transformers."""

_WHOLE = "model.safetensors"
_EMBEDDING = "embed_tokens.weight"


def with_biases(at: Path, model_type: str, **config: Any) -> Path:
    """Make a checkpoint with random weights; biases and the weights of norms are random, too."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    at.mkdir(parents=True, exist_ok=True)
    said = {"architectures": [NAMES[model_type]], "model_type": model_type, **SIZES, **config}
    (at / "config.json").write_text(json.dumps(said))
    torch.manual_seed(7)
    settings = transformers.AutoConfig.from_pretrained(at)
    model: Any = transformers.AutoModelForCausalLM.from_config(settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                noise = torch.randn(parameter.shape) * 0.2
                parameter.copy_(noise + 1 if name.endswith(".weight") else noise)
    model.save_pretrained(at)
    (at / "config.json").write_text(json.dumps(said))
    return at


def copied(source: Path, target: Path) -> Path:
    """A copy of a model's directory, to be changed."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))


def edit(file: Path, **changes: Any) -> None:
    """Change values of a JSON file, ``a__b`` for those of an inner object."""
    said = json.loads(file.read_text())
    for name, value in changes.items():
        *outer, last = name.split("__")
        inner = said
        for step in outer:
            inner = inner[step]
        inner[last] = value
    file.write_text(json.dumps(said))


def rewritten(
    model: Path, target: Path, *, shards: int = 1, rows: int = 0, **metadata: str
) -> Path:
    """A copy of a checkpoint in so many files, with so many changed rows of its embedding."""
    weights = _weights(copied(model, target))
    if rows:
        name = next(name for name in weights if name.endswith(_EMBEDDING))
        noise = torch.Generator().manual_seed(rows)
        new = torch.randn(rows, weights[name].shape[1], generator=noise)
        weights[name][100 : 100 + rows] = new.to(weights[name].dtype)
    names = sorted(weights)
    where = {}
    for shard in range(shards):
        part = {tensor: weights[tensor] for tensor in names[shard::shards]}
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors" if shards > 1 else _WHOLE
        save_file(part, target / file, metadata={"format": "pt", **metadata})
        where |= dict.fromkeys(part, file)
    if shards > 1:
        index = {"metadata": {"total_size": 0}, "weight_map": where}
        (target / f"{_WHOLE}.index.json").write_text(json.dumps(index))
    return target


def scaled(model: Path, target: Path, part: str) -> Path:
    """A copy of a checkpoint in which one element of a tensor is far from what it was."""
    weights = _weights(copied(model, target))
    name = next(name for name in sorted(weights) if part in name)
    weights[name].view(-1)[7] += 10
    save_file(weights, target / _WHOLE, metadata={"format": "pt"})
    return target


def extended(model: Path, target: Path, more: dict[str, torch.Tensor]) -> Path:
    """A copy of a checkpoint with more tensors."""
    weights = _weights(copied(model, target))
    save_file(weights | more, target / _WHOLE, metadata={"format": "pt"})
    return target


def _weights(model: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, which then has no files with tensors any more."""
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        weights |= load_file(file)
        file.unlink()
    (model / f"{_WHOLE}.index.json").unlink(missing_ok=True)
    return weights
