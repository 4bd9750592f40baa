"""Checkpoints and adapters that differ from another one in one thing, made offline.

For tests and benchmarks that ask whether VUA notices such a difference. All of one specification
are the same bytes. Needs `torch` and `safetensors`, which are imported when they are made.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Weights: TypeAlias = "dict[str, Tensor]"
_WEIGHTS_FILE: Final = "model.safetensors"


def make_variant(source: Path, target: Path, kind: str) -> Path:
    """Copy the checkpoint at ``source`` to ``target`` with its weights changed; return ``target``.

    Args:
        source: a directory with one ``model.safetensors``.
        target: is replaced.
        kind: one of :data:`WEIGHTS`.
    """
    from safetensors.torch import load_file, save_file

    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    weights = WEIGHTS[kind](load_file(source / _WEIGHTS_FILE))
    save_file(
        {name: each.contiguous() for name, each in weights.items()},
        target / _WEIGHTS_FILE,
        metadata={"format": "pt"},
    )
    return target


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
    import torch
    from safetensors.torch import load_file, save_file

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
    for name, weight in sorted(load_file(source / _WEIGHTS_FILE).items()):
        if not name.endswith(("q_proj.weight", "v_proj.weight")):
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


def _tuned(strength: float) -> Callable[[Weights], Weights]:
    """Every matrix moved by so much of its own size, at random: as after a short fine-tuning."""

    def change(weights: Weights) -> Weights:
        import torch

        noise = torch.Generator().manual_seed(7)
        changed = {}
        for name, weight in sorted(weights.items()):
            if weight.dim() < 2:
                changed[name] = weight
                continue
            step = torch.randn(weight.shape, generator=noise) * weight.float().std() * strength
            changed[name] = (weight.float() + step).to(weight.dtype)
        return changed

    return change


def _low_rank(strength: float) -> Callable[[Weights], Weights]:
    """q_proj and v_proj moved by so much of their size as by an adapter of rank 8, merged."""

    def change(weights: Weights) -> Weights:
        import torch

        noise, changed = torch.Generator().manual_seed(7), dict(weights)
        for name, weight in sorted(weights.items()):
            if name.endswith(("q_proj.weight", "v_proj.weight")):
                rows, columns = weight.shape
                step = torch.randn(rows, 8, generator=noise) @ torch.randn(
                    8, columns, generator=noise
                )
                step *= strength * weight.float().norm() / step.norm()
                changed[name] = (weight.float() + step).to(weight.dtype)
        return changed

    return change


def _rounded(form: str) -> Callable[[Weights], Weights]:
    """The matrices of the layers rounded as a quantisation does, with one scale per row."""

    def change(weights: Weights) -> Weights:
        return {
            name: _round(each, form) if "proj" in name else each for name, each in weights.items()
        }

    return change


def _round(weight: Tensor, form: str) -> Tensor:
    import torch

    values = weight.float()
    most = {"int8": 127.0, "fp8": 448.0}[form]
    scale = values.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / most
    steps = values / scale
    steps = steps.round() if form == "int8" else steps.to(torch.float8_e4m3fn).float()
    return (steps * scale).to(weight.dtype)


def _swapped(weights: Weights) -> Weights:
    """The first two layers in the other order."""
    other = {"0": "1", "1": "0"}

    def name_of(name: str) -> str:
        return re.sub(r"\.layers\.([01])\.", lambda at: f".layers.{other[at[1]]}.", name)

    return {name_of(name): each for name, each in weights.items()}


def _shifted(weights: Weights) -> Weights:
    """Every token has the embedding of the next one: as with ids that are off by one."""
    return {
        name: each.roll(-1, dims=0) if "embed_tokens" in name else each
        for name, each in weights.items()
    }


def _scaled(part: str, by: float) -> Callable[[Weights], Weights]:
    """All weights of one kind multiplied, as with another scale of a quantised cache."""

    def change(weights: Weights) -> Weights:
        return {
            name: (each.float() * by).to(each.dtype) if part in name else each
            for name, each in weights.items()
        }

    return change


WEIGHTS: Final[dict[str, Callable[[Weights], Weights]]] = {
    "tuned 10 %": _tuned(0.1),
    "tuned 3 %": _tuned(0.03),
    "tuned 1 %": _tuned(0.01),
    "tuned 0.3 %": _tuned(0.003),
    "tuned 0.1 %": _tuned(0.001),
    "adapter 10 %": _low_rank(0.1),
    "adapter 3 %": _low_rank(0.03),
    "adapter 1 %": _low_rank(0.01),
    "int8 weights": _rounded("int8"),
    "fp8 weights": _rounded("fp8"),
    "layers swapped": _swapped,
    "tokens off by one": _shifted,
    "V scaled by 1.05": _scaled("v_proj", 1.05),
    "K scaled by 1.05": _scaled("k_proj", 1.05),
}
