"""A tiny model that sees (LLaVA), and its pictures. Runs where torchvision is missing."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

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


def make_llava(target: Path, seed: int, **changes: Any) -> None:
    """Make a checkpoint of two layers that see what a vision tower of three layers makes.

    Args:
        target: the directory.
        seed: of the weights.
        changes: to its LlavaConfig.
    """
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    from e2e.checkpoints import SIZES

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
    settings = {
        "image_seq_length": IMAGE_TOKENS,
        "image_token_id": IMAGE_TOKEN,
        "image_token_index": IMAGE_TOKEN,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, **settings | changes)
    torch.manual_seed(seed)
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
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", "<pad>", "<image>", *(f"t{n}" for n in range(5, 512))]
    made = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, additional_special_tokens=["<image>"], **special
    )
    size = {"height": SIDE_PIXELS, "width": SIDE_PIXELS}
    images = CLIPImageProcessor(size={"shortest_edge": SIDE_PIXELS}, crop_size=size)
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )
