"""Small models, made offline: other tensors, files, configurations, adapters; a model that sees."""

from __future__ import annotations

import json
import shutil
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from e2e.damage import CHUNK
from small_models import tokenizer_of

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
ADAPTED = ("q_proj.weight", "v_proj.weight")


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


def remade(model: Path, target: Path, change: Callable[[str, Tensor], Tensor]) -> Path:
    """A copy of a checkpoint in one file whose tensors are changed, by their names in order."""
    weights = sorted(_weights(copied(model, target)).items())
    changed = {name: change(name, weight).contiguous() for name, weight in weights}
    save_file(changed, target / _WHOLE, metadata={"format": "pt"})
    return target


def scaled(model: Path, target: Path, part: str) -> Path:
    """A copy of a checkpoint in which one element of a tensor is far from what it was."""

    def change(name: str, weight: Tensor) -> Tensor:
        if part in name:
            weight.view(-1)[7] += 10
        return weight

    return remade(model, target, change)


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


def make_adapter(
    at: Path, source: Path, *, seed: int = 0, rank: int = 8, alpha: int = 8, strength: float = 0.05
) -> Path:
    """Make a LoRA adapter of q_proj and v_proj as PEFT writes it; return its directory.

    Args:
        at: where; is made.
        source: the checkpoint that it is for.
        seed: other seeds give other weights.
        rank: its rank.
        alpha: its alpha.
        strength: the size of what it adds to a weight, relative to the weight, at alpha 8.
    """
    at.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source.name,
        "bias": "none",
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "r": rank,
        "target_modules": ["q_proj", "v_proj"],
    }
    (at / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    noise, adapter = torch.Generator().manual_seed(seed), {}
    for name, weight in sorted(load_file(source / _WHOLE).items()):
        if not name.endswith(ADAPTED):
            continue
        rows, columns = weight.shape
        down = torch.randn(rank, columns, generator=noise)
        up = torch.randn(rows, rank, generator=noise)
        scale = strength * weight.float().norm() / (up @ down).norm() * rank / 8
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        adapter[f"{stem}.lora_A.weight"] = down.to(weight.dtype)
        adapter[f"{stem}.lora_B.weight"] = (up * scale).to(weight.dtype)
    save_file(adapter, at / "adapter_model.safetensors")
    return at


IMAGE_TOKEN = 4
IMAGE_TOKENS = 64  # 8 by 8 patches
SIDE_PIXELS = 64


def stand_in_for_torchvision() -> None:
    """Let vLLM import its LLaVA, which imports Pixtral's preprocessing and never calls it.

    That preprocessing needs torchvision, of which package indexes hold no CPU build. vLLM looks at
    models in a process of their own, which would not know of the stand-in: it looks in this one.
    """
    from vllm.model_executor.models import registry

    name = "transformers.models.pixtral.image_processing_pixtral"
    stand_in: Any = types.ModuleType(name)
    stand_in._num_image_tokens = None
    sys.modules.setdefault(name, stand_in)
    registry._run_in_subprocess = lambda look: look()


def picture(seed: int) -> Any:
    from PIL import Image

    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (SIDE_PIXELS, SIDE_PIXELS, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def make_llava(target: Path) -> None:
    """Make a checkpoint of two layers that see what a vision tower of three layers makes."""
    import transformers

    vision = transformers.CLIPVisionConfig(
        hidden_size=64,
        image_size=SIDE_PIXELS,
        initializer_factor=1.0,
        initializer_range=0.25,
        intermediate_size=128,
        num_attention_heads=2,
        num_hidden_layers=3,
        patch_size=8,
        projection_dim=64,
    )
    text = transformers.LlamaConfig(head_dim=32, num_key_value_heads=2, **SIZES)
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_seq_length=IMAGE_TOKENS,
        image_token_id=IMAGE_TOKEN,
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    torch.manual_seed(0)
    transformers.LlavaForConditionalGeneration(config).float().save_pretrained(target)
    file = target / "model.safetensors"
    weights = {  # transformers 5 writes the vision tower without a prefix that vLLM expects
        name.replace("vision_tower.", "vision_tower.vision_model.")
        if "vision_model" not in name
        else name: value
        for name, value in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
    _processor().save_pretrained(target)


def _processor() -> Any:
    from transformers import CLIPImageProcessor, LlavaProcessor

    size = {"height": SIDE_PIXELS, "width": SIDE_PIXELS}
    images = CLIPImageProcessor(size={"shortest_edge": SIDE_PIXELS}, crop_size=size)
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer_of(SIZES["vocab_size"], "<image>"),
        patch_size=8,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )


def model_of(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A model that goes on behind an end of text, as the engines are asked to."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    if model.config.model_type == "gemma2":  # sdpa drops its soft cap
        model.set_attn_implementation("eager")
    model.generation_config.eos_token_id = None
    return model


def generated(
    model: Any, root: Path, prompts: Sequence[list[int]], *, new: int, share: bool = True
) -> Iterator[tuple[int, list[int]]]:
    """For each prompt in turn: tokens loaded, and so many new ones; stored for other engines."""
    from vua.transformers import PrefixCache

    with PrefixCache(model, root, chunk_tokens=CHUNK, share=share) as prefixes:
        prefixes.ready()
        for prompt in prompts:
            ids = torch.tensor([prompt])
            prefix = prefixes.load(ids)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=prefix.cache,
                do_sample=False,
                max_new_tokens=new,
            )
            prefixes.save(ids, prefix.cache)
            yield prefix.num_tokens, out[0, len(prompt) :].tolist()


def generate(
    path: Path,
    root: Path,
    ids: list[int],
    *,
    new: int,
    dtype: torch.dtype = torch.float32,
    share: bool = True,
) -> tuple[int, list[int]]:
    """The same of one prompt, by a model from its directory."""
    (found,) = generated(model_of(path, dtype), root, [ids], new=new, share=share)
    return found
