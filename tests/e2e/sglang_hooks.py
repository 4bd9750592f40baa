"""A hook for `--forward-hooks`. SGLang imports it, in its own process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
