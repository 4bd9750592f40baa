"""Stands in for SGLang's CUDA kernels, of which there is no build for CPUs without AMX.

Every name can be imported; whatever is called says which name was missing. SGLang's fallbacks in
PyTorch call none of them.
"""

from __future__ import annotations

from typing import Any, NoReturn


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **named: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is a CUDA kernel")

    missing.__name__ = name
    return missing
