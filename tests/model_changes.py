"""Ways to change a model of transformers in memory: for the tests, and for the campaign."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Change = Callable[[Any, torch.Generator], Any]


def _layer(model: Any, noise: torch.Generator) -> Any:
    layers = model.model.layers
    return layers[int(torch.randint(len(layers), (1,), generator=noise))]


def _some_parameter(model: Any, noise: torch.Generator) -> torch.nn.Parameter:
    attention = _layer(model, noise).self_attn
    names = ("q_proj", "k_proj", "v_proj")
    name = names[int(torch.randint(3, (1,), generator=noise))]
    weight: torch.nn.Parameter = getattr(attention, name).weight
    return weight


def _rows(model: Any, noise: torch.Generator) -> None:
    with torch.no_grad():
        _some_parameter(model, noise)[1:] *= 1.5


def _embedding(model: Any, noise: torch.Generator) -> None:
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[4:] += torch.randn(weight[4:].shape, generator=noise).to(weight.dtype) * 0.3


def _data(model: Any, noise: torch.Generator) -> None:
    weight = _some_parameter(model, noise)
    weight.data.copy_(weight.data.flip(0))


def _parameter(model: Any, noise: torch.Generator) -> None:
    projection = _layer(model, noise).self_attn.k_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach() * 1.7)


def _state_dict(model: Any, noise: torch.Generator) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    name = next(name for name in state if "v_proj" in name)
    state[name] = state[name].flip(0)
    model.load_state_dict(state)


def _rotary(model: Any, noise: torch.Generator) -> None:
    with torch.no_grad():
        model.model.rotary_emb.inv_freq *= 0.5


def _epsilon(model: Any, noise: torch.Generator) -> None:
    norm = _layer(model, noise).input_layernorm
    norm.variance_epsilon = getattr(norm, "variance_epsilon", 1e-6) + 3.0
    if hasattr(norm, "eps"):
        norm.eps = norm.eps + 3.0


def _hook(model: Any, noise: torch.Generator) -> None:
    _layer(model, noise).mlp.register_forward_hook(lambda *args: args[2] * 3)


def _forward(model: Any, noise: torch.Generator) -> None:
    mlp = model.model.layers[0].mlp
    before = mlp.forward
    mlp.forward = lambda *args: before(*args) * 3


def _module(model: Any, noise: torch.Generator) -> None:
    attention = model.model.layers[0].self_attn
    old = attention.v_proj

    class Adapted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = old
            self.weight = old.weight

        def forward(self, x: torch.Tensor) -> Any:
            return self.base(x) * 2

    attention.v_proj = Adapted()


def _pruned(model: Any, noise: torch.Generator) -> None:
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1


def _resized(model: Any, noise: torch.Generator) -> None:
    model.resize_token_embeddings(520, mean_resizing=False)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[5:40] = torch.randn(35, weight.shape[1], generator=noise).to(weight.dtype)


def _quantised(model: Any, noise: torch.Generator) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


CHANGES: dict[str, Change] = {
    "rows of a parameter": _rows,
    "rows of the embedding": _embedding,
    ".data in place": _data,
    "a new Parameter": _parameter,
    "load_state_dict": _state_dict,
    "the rotary buffer": _rotary,
    "an epsilon": _epsilon,
    "a forward hook": _hook,
    "a patched forward": _forward,
    "an adapter's module": _module,
    "double": lambda model, _: model.double(),
    "bfloat16": lambda model, _: model.to(torch.bfloat16),
    "rounded": lambda model, _: model.to(torch.bfloat16).float(),
    "a layer less": _pruned,
    "training mode": lambda model, _: model.train(),
}
"""By name: each changes a model in place. Kinds of models with `model.model.layers`."""
ONLY_BEFORE: dict[str, Change] = {"new embeddings": _resized, "quantised": _quantised}
"""Likewise, but may return another model."""


# -- where functions live ---------------------------------------------------------------------

Place = Callable[[Any], AbstractContextManager[Any]]


def _louder(function: Callable[..., Any]) -> Callable[..., Any]:
    def twice(*args: Any, **more: Any) -> Any:
        found = function(*args, **more)
        return (found[0] * 2, *found[1:]) if isinstance(found, tuple) else found * 2

    return twice


def _replaced(find: Callable[[Any], Any], name: str) -> Place:
    """A function of what is found for a model: its result is doubled."""

    def place(model: Any) -> AbstractContextManager[Any]:
        owner = find(model)
        return mock.patch.object(owner, name, _louder(getattr(owner, name)))

    return place


def _source(model: Any) -> Any:
    """The module with the code of a model's kind."""
    return sys.modules[type(model).__module__]


def _mlp(model: Any) -> Any:
    return type(model.model.layers[0].mlp)


def _activation(model: Any) -> AbstractContextManager[Any]:
    """The function behind a model's activation."""
    name = "gelu" if "GELU" in type(model.model.layers[0].mlp.act_fn).__name__ else "silu"
    return _replaced(lambda _: torch.nn.functional, name)(model)


@contextmanager
def _code(model: Any) -> Iterator[None]:
    """The code of a method of a class, in place."""
    forward: Any = _mlp(model).forward
    before = forward.__code__

    def other(self: Any, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))

    forward.__code__ = other.__code__
    try:
        yield
    finally:
        forward.__code__ = before


@contextmanager
def _closure(model: Any) -> Iterator[None]:
    """The value in a closure's cell, changed once the function is in place."""
    kind, factor = type(model.model.norm), 1.0
    before = kind.forward

    def forward(self: Any, x: Any) -> Any:
        return before(self, x) * factor

    with mock.patch.object(kind, "forward", forward):
        factor = 1.5
        yield


@contextmanager
def _defaults(model: Any) -> Iterator[None]:
    """The default of an argument."""
    before = _source(model).rotate_half

    def other(x: Any, factor: float = 1.0) -> Any:
        return before(x) * factor

    with mock.patch.object(_source(model), "rotate_half", other):
        other.__defaults__ = (0.5,)
        yield


@contextmanager
def _taken(model: Any) -> Iterator[None]:
    """A bound method of another layer."""
    first, second = (layer.mlp for layer in model.model.layers[:2])
    first.forward = second.forward
    try:
        yield
    finally:
        del first.forward


@contextmanager
def _by_array(model: Any) -> Iterator[None]:
    """One row of the embedding, by an array: it leaves no sign in the tensor."""
    row = model.get_input_embeddings().weight.detach().numpy()[5]
    before = row.copy()
    row += 1
    try:
        yield
    finally:
        row[:] = before


def _attention(mapping: dict[str, Any]) -> Place:
    """A table of attention functions, by the name that the model uses."""

    def place(model: Any) -> AbstractContextManager[Any]:
        name, eager = model.config._attn_implementation, _source(model).eager_attention_forward
        before = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
        return mock.patch.dict(mapping, {name: _louder(before)})

    return place


@contextmanager
def _default_dtype(_: Any) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _global_hook(model: Any) -> Iterator[None]:
    """A hook of all modules."""

    def hook(module: Any, _: Any, output: Any) -> Any:
        return output * 2 if type(module) is _mlp(model) else None

    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


class _Mode(TorchFunctionMode):
    """A mode of torch that changes what a function does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func in {torch.nn.functional.silu, torch.nn.functional.gelu} else found


PLACES: dict[str, Place] = {
    "a function of torch.nn.functional": _activation,
    "torch.nn.functional.linear": _replaced(lambda _: torch.nn.functional, "linear"),
    "a function of torch": _replaced(lambda _: torch, "rsqrt"),
    "a method of Tensor": _replaced(lambda _: torch.Tensor, "pow"),
    "a function of the model's module": _replaced(_source, "apply_rotary_pos_emb"),
    "a helper of it": _replaced(_source, "rotate_half"),
    "a class's method": _replaced(_mlp, "forward"),
    "a class of torch": _replaced(lambda of: type(of.model.layers[0].mlp.act_fn), "forward"),
    "the embedding's class": _replaced(lambda _: torch.nn.Embedding, "forward"),
    "Module.__call__": _replaced(_mlp, "__call__"),
    "code in place": _code,
    "a closure's value": _closure,
    "an argument's default": _defaults,
    "a bound method of another layer": _taken,
    "a row by an array": _by_array,
    "the table of attentions": _attention(ALL_ATTENTION_FUNCTIONS._global_mapping),
    "a module's table of attentions": _attention(ALL_ATTENTION_FUNCTIONS._local_mapping),
    "torch's default dtype": _default_dtype,
    "a hook of all modules": _global_hook,
    "a mode of torch": lambda _: _Mode(),
}
"""By name: each changes what a model computes, or what all of its kind in the process do."""
