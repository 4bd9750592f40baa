"""Ways to change a model of transformers in memory: for the tests, and for the campaign."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

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


def _data_replaced(model: Any, noise: torch.Generator) -> None:
    weight = _some_parameter(model, noise)
    weight.data = weight.data * 2


def _parameter(model: Any, noise: torch.Generator) -> None:
    projection = _layer(model, noise).self_attn.k_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach() * 1.7)


def _state_dict(model: Any, noise: torch.Generator) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    name = next(name for name in state if "v_proj" in name)
    state[name] = state[name].flip(0)
    model.load_state_dict(state)


def _optimizer(model: Any, noise: torch.Generator) -> None:
    parameters = [_some_parameter(model, noise)]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=noise).to(parameter.dtype)
    torch.optim.SGD(parameters, lr=0.2).step()
    parameters[0].grad = None


def _rotary(model: Any, noise: torch.Generator) -> None:
    with torch.no_grad():
        model.model.rotary_emb.inv_freq *= 0.5


def _epsilon(model: Any, noise: torch.Generator) -> None:
    norm = _layer(model, noise).input_layernorm
    norm.variance_epsilon = getattr(norm, "variance_epsilon", 1e-6) + 3.0
    if hasattr(norm, "eps"):
        norm.eps = norm.eps + 3.0


def _scaling(model: Any, noise: torch.Generator) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 3


def _hook(model: Any, noise: torch.Generator) -> None:
    _layer(model, noise).mlp.register_forward_hook(lambda *args: args[2] * 3)


def _pre_hook(model: Any, noise: torch.Generator) -> None:
    _layer(model, noise).mlp.register_forward_pre_hook(lambda _, args: (args[0] * 3,))


def _forward(model: Any, noise: torch.Generator) -> None:
    mlp = model.model.layers[0].mlp
    before = mlp.forward
    mlp.forward = lambda *args: before(*args) * 3


def _method(model: Any, noise: torch.Generator) -> None:
    mlp = model.model.layers[0].mlp
    kind = type(mlp)
    mlp.forward = types.MethodType(lambda self, x: kind.forward(self, x).flip(-1), mlp)


def _subclass(model: Any, noise: torch.Generator) -> None:
    mlp = model.model.layers[0].mlp

    class Own(type(mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) * 3

    mlp.__class__ = Own


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


def _double(model: Any, noise: torch.Generator) -> None:
    model.double()


def _half(model: Any, noise: torch.Generator) -> None:
    model.to(torch.bfloat16)


def _rounded(model: Any, noise: torch.Generator) -> None:
    model.to(torch.bfloat16).float()


def _pruned(model: Any, noise: torch.Generator) -> None:
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1


def _swapped(model: Any, noise: torch.Generator) -> None:
    layers = model.model.layers
    first, second = layers[0].mlp, layers[1].mlp
    layers[0].mlp, layers[1].mlp = second, first


def _dropout(model: Any, noise: torch.Generator) -> None:
    model.train()


def _resized(model: Any, noise: torch.Generator) -> None:
    model.resize_token_embeddings(520, mean_resizing=False)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[5:40] = torch.randn(35, weight.shape[1], generator=noise).to(weight.dtype)


def _quantised(model: Any, noise: torch.Generator) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def _rope_parameters(model: Any, noise: torch.Generator) -> None:
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 100.0}
    rotary = model.model.rotary_emb
    with torch.no_grad():
        rotary.inv_freq.copy_(rotary.inv_freq**0.5)


CHANGES: dict[str, Change] = {
    "rows of a parameter": _rows,
    "rows of the embedding": _embedding,
    ".data in place": _data,
    ".data replaced": _data_replaced,
    "a new Parameter": _parameter,
    "load_state_dict": _state_dict,
    "a step of an optimizer": _optimizer,
    "the rotary buffer": _rotary,
    "an epsilon": _epsilon,
    "the scaling": _scaling,
    "a forward hook": _hook,
    "a forward pre-hook": _pre_hook,
    "a patched forward": _forward,
    "a patched method": _method,
    "a subclass": _subclass,
    "an adapter's module": _module,
    "double": _double,
    "bfloat16": _half,
    "rounded": _rounded,
    "a layer less": _pruned,
    "layers swapped": _swapped,
    "rope_parameters": _rope_parameters,
    "training mode": _dropout,
}
"""By name: each changes a model in place. Kinds of models with `model.model.layers`."""
ONLY_BEFORE: dict[str, Change] = {"new embeddings": _resized, "quantised": _quantised}
"""Likewise, but may return another model."""
