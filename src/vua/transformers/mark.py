"""A cheap mark of a model: it changes when something may have changed what the model computes.

It proves nothing: a changed mark is the reason to compare and to compute again. It holds what is
seen in passing: modes of torch, hooks, classes and `forward` of modules, their plain attributes,
and the tensors' addresses and versions. A write through `.data` or an array, and a function that is
replaced elsewhere, change no mark; these are found by the reads and the probe of each load and
save. Taken in some 10 microseconds per module.
"""

from __future__ import annotations

from contextlib import suppress
from operator import attrgetter
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack as _function_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.hooks import RemovableHandle

from vua.transformers.tensors import all_tensors, modules_of

Mark = tuple[object, ...]

_NESTED: Final = frozenset((list, tuple, set, dict))
_PLAIN: Final = _NESTED | {int, float, str, bool}
_MODULE: Final = frozenset(vars(nn.Module())) - {"training"}
_BACKENDS: Final = ("cuda.matmul", "cudnn", "cudnn.conv", "mkldnn", "mkldnn.matmul", "mkldnn.conv")


def light_mark(model: Any) -> Mark:
    """Return what may change between two tokens of one call."""
    modules = modules_of(model)
    kinds = {type(module) for module in modules}
    return (
        # a hook that was put on and off again leaves a number
        RemovableHandle.next_id,
        *nn.modules.module._global_forward_hooks,  # noqa: SLF001 - their only name
        *nn.modules.module._global_forward_pre_hooks,  # noqa: SLF001
        torch.is_autocast_enabled("cuda"),
        torch.is_autocast_enabled("cpu"),
        len(_function_modes()),  # type: ignore[no-untyped-call]
        len(_get_current_dispatch_mode_stack()),
        torch.get_default_dtype(),
        tuple(
            [(id(module), module.training, id(vars(module).get("forward"))) for module in modules]
        ),
        tuple(
            [
                (id(kind), id(forward := kind.forward), id(getattr(forward, "__code__", 0)))
                for kind in kinds
            ]
        ),
    )


def tensor_mark(model: Any) -> Mark:
    """Return a value that changes when a tensor is replaced or written to, but for `.data`."""
    return tuple(
        [
            (id(tensor), tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version)  # noqa: SLF001 - its only name
            for tensor in all_tensors(model)
            if not tensor.is_meta
        ]
    )


def mark_of(model: Any) -> Mark:
    """Return everything that is seen in passing."""
    configs = (model.config, model.config.get_text_config())
    return (
        light_mark(model),
        tensor_mark(model),
        tuple([_flag(path) for path in _BACKENDS]),
        tuple([_plain(vars(config)) for config in configs]),
        tuple([_attributes(module) for module in modules_of(model)]),
    )


def _attributes(module: nn.Module) -> Mark:
    own = vars(module)
    kept = {name: value for name, value in own.items() if name not in _MODULE}
    return (*_plain(kept), *own["_forward_hooks"], *own["_forward_pre_hooks"])


def _plain(values: dict[str, Any]) -> Mark:
    return tuple(
        [
            repr(value) if type(value) in _NESTED else value
            for value in values.values()
            if type(value) in _PLAIN
        ]
    )


def _flag(path: str) -> object:
    """Return the precision of one of torch's backends; it raises for mixtures of settings."""
    with suppress(AttributeError, RuntimeError):
        return attrgetter(f"{path}.fp32_precision")(torch.backends)
    return None
