"""Changes of an SGLang engine, made in its own process: a hook for `--forward-hooks`, patches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any


def scaled(config: Mapping[str, float]) -> Callable[..., Any]:
    """A hook that scales what a module returns."""
    factor = config["factor"]

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        return output * factor

    return hook


def hooks(factor: float) -> list[dict[str, Any]]:
    """The argument of a server whose first layer's MLP returns other values."""
    return [
        {
            "name": "scaled",
            "target_modules": ["model.layers.0.mlp"],
            "hook_factory": "e2e.sglang_hooks:scaled",
            "config": {"factor": factor},
        }
    ]


FACTOR = 2.0


def attention() -> None:
    """The attention backend returns other values."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    _scale(TorchNativeAttnBackend, "forward_extend")


def pool() -> None:
    """The pool of K and V keeps other values."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    kept = MHATokenToKVPool.set_kv_buffer

    def keep(self: Any, layer: Any, places: Any, k: Any, v: Any, *more: Any, **named: Any) -> None:
        kept(self, layer, places, k, v * FACTOR, *more, **named)

    MHATokenToKVPool.set_kv_buffer = keep


def linear() -> None:
    """A function of torch's returns other values."""
    import torch

    _scale(torch.nn.functional, "linear")


def registered() -> None:
    """A plug-in's hook changes a function of SGLang's."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def around(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return original(*args, **named) * FACTOR

    place = "sglang.srt.layers.activation.SiluAndMul.forward_native"
    HookRegistry.register(place, around, HookType.AROUND)
    HookRegistry.apply_hooks()


def edited() -> None:
    """SGLang's own code is another one than what was installed."""
    from sglang.srt.layers import activation

    text = """def edited(self, x):
        half = x.shape[-1] // 2
        return F.silu(x[..., :half]) * x[..., half:] * 2"""
    exec(text, vars(activation))
    activation.SiluAndMul.forward_native = vars(activation).pop("edited")


def _scale(place: Any, name: str) -> None:
    original = getattr(place, name)

    @wraps(original)
    def scaled(*args: Any, **named: Any) -> Any:
        return original(*args, **named) * FACTOR

    setattr(place, name, scaled)
