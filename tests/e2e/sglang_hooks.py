"""Changes of an SGLang engine, made in its own process: a hook, patches, a storage with trouble.

While the directory of a `TroubledStorage` holds a file named ``hang``, reads and writes wait; while
it holds one named ``full``, the file system has no room left.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from vua.sglang.storage import VUAHiCacheStorage
from vua.storage.local import LocalStorage


def scaled(config: Mapping[str, float]) -> Callable[..., Any]:
    """A hook that scales what a module returns."""
    factor = config["factor"]

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        return output * factor

    return hook


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


LOOK_EVERY_S = 0.05


class TroubledStorage(VUAHiCacheStorage):
    """VUA's backend, in a process whose local storage looks for trouble first."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        troubled("read", "hang")
        troubled("write", "hang", "full")


def troubled(name: str, *troubles: str) -> None:
    """Have a method of the storage look for trouble first."""
    method = getattr(LocalStorage, name)
    if getattr(method, "troubled", False):
        return

    def first(self: LocalStorage, *arguments: Any) -> Any:
        root = self.directory.parent
        while "hang" in troubles and (root / "hang").exists():
            time.sleep(LOOK_EVERY_S)
        if "full" in troubles and (root / "full").exists():
            raise OSError(errno.ENOSPC, "no space left on device")
        return method(self, *arguments)

    first.troubled = True  # type: ignore[attr-defined]
    setattr(LocalStorage, name, first)
