"""The modules and tensors of a model, wherever they lie, the bytes of tensors, and a cheap mark.

The mark changes when something may have changed what the model computes. It proves nothing: a
changed mark is the reason to compare and to compute again. It holds what is seen in passing: modes
of torch, hooks, classes and `forward` of modules, their plain attributes, and the tensors'
addresses and versions. A write through `.data` or an array, and a function that is replaced
elsewhere, change no mark; these are found by the reads and the probe of each load and save. Taken
in some 10 microseconds per module.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any, Final, TypeVar

import torch
import xxhash
from torch import nn
from torch.overrides import _get_current_function_mode_stack as _function_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.hooks import RemovableHandle

from vua.connector.weights_watch import device_digest

PIECE_NBYTES: Final = 64 << 20
_READ_NBYTES: Final = 4 << 20
"""Bytes of a CPU tensor read in one piece: half a millisecond."""
_MAX_THREADS: Final = 8

_T = TypeVar("_T")


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return a model's modules with repetitions, in a tenth of the time of `named_modules`."""
    found = [model]
    for module in found:  # grows meanwhile
        found += [part for part in module._modules.values() if part is not None]  # noqa: SLF001 - its only dict
    return found


def all_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return parameters and buffers, with repetitions, as the modules hold them."""
    return [
        tensor
        for module in modules_of(model)
        for tensor in (*module._parameters.values(), *module._buffers.values())  # noqa: SLF001
        if tensor is not None
    ]


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers by name, tied ones under each of their names.

    Those that accelerate has offloaded are where its hooks take them from.
    """
    for where, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):  # noqa: SLF001
            if tensor is not None and name not in module._non_persistent_buffers_set:  # noqa: SLF001
                found = _offloaded(module, name) if tensor.is_meta else tensor
                yield f"{where}.{name}" if where else name, found


def _offloaded(module: nn.Module, name: str) -> torch.Tensor:
    for hook in _offload_hooks(module):
        if (found := getattr(hook, "weights_map", None)) is not None:
            return torch.as_tensor(found[name])
    raise ValueError(f"{name} of a {type(module).__name__} has no bytes (meta)")


def _offload_hooks(module: nn.Module) -> tuple[Any, ...]:
    hook = getattr(module, "_hf_hook", None)
    return tuple(getattr(hook, "hooks", (hook,)))


def device_of(model: Any) -> torch.device:
    """Return the device that token ids belong on."""
    embeddings = model.get_input_embeddings()
    devices = [getattr(hook, "execution_device", None) for hook in _offload_hooks(embeddings)]
    return torch.device(next((one for one in devices if one is not None), embeddings.weight.device))


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_words(one), _words(other.to(one.device)))


def digest(model: nn.Module, stop: threading.Event) -> str:
    """Return 64 hex digits of each tensor's name, dtype, shape and bytes.

    Raises CancelledError once ``stop`` is set; ValueError if a tensor has no bytes.
    """

    def one(item: tuple[str, torch.Tensor]) -> bytes:
        name, tensor = item
        found = hashlib.sha256(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        for piece in _pieces(tensor):
            if stop.is_set():
                raise CancelledError
            found.update(memoryview(_array(_bytes(piece))))
        return found.digest()

    tensors = list(named_tensors(model))
    parts = _in_threads(one, tensors, sum(tensor.nbytes for _, tensor in tensors))
    return hashlib.sha256(b"vua.transformers.memory.v2\n" + b"".join(parts)).hexdigest()


def sums(model: nn.Module) -> bytes:
    """Return a checksum of all of a model's bytes, read at memory speed; shared memory once.

    Not secure against forgery. Raises ValueError if a tensor has no bytes.
    """
    persistent = [tensor for _, tensor in named_tensors(model)]
    buffers = [tensor for tensor in all_tensors(model) if not tensor.is_meta]
    flat = [_bytes(tensor) for tensor in _distinct([*persistent, *buffers])]
    pieces = [
        one[at : at + _READ_NBYTES]
        for one in flat
        if one.device.type == "cpu"
        for at in range(0, len(one), _READ_NBYTES)
    ]

    def one(piece: torch.Tensor) -> bytes:
        return xxhash.xxh3_128_digest(memoryview(_array(piece)))

    found = _in_threads(one, pieces, sum(len(piece) for piece in pieces))
    never = threading.Event()
    digests = [device_digest(one, never) for one in flat if one.device.type != "cpu"]
    return xxhash.xxh3_128_digest(b"".join(found) + repr(digests).encode())


def _distinct(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    found: dict[tuple[object, ...], torch.Tensor] = {}
    for tensor in tensors:
        place = (tensor.device, tensor.data_ptr(), tensor.nbytes, *tensor.stride())
        found.setdefault(place, tensor)
    return list(found.values())


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if not tensor.ndim or tensor.nbytes <= PIECE_NBYTES:
        yield tensor
        return
    rows = max(1, PIECE_NBYTES * len(tensor) // tensor.nbytes)
    for at in range(0, len(tensor), rows):
        yield tensor[at : at + rows]


def _array(tensor: torch.Tensor) -> Any:
    return tensor.cpu().numpy()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    found = _bytes(tensor)
    for dtype in (torch.int64, torch.int32, torch.int16):
        if len(found) % dtype.itemsize == 0 and found.storage_offset() % dtype.itemsize == 0:
            return found.view(dtype)
    return found


def _in_threads(task: Callable[[_T], bytes], items: Sequence[_T], nbytes: int) -> list[bytes]:
    count = min(_MAX_THREADS, torch.get_num_threads())
    if count < 2 or nbytes <= PIECE_NBYTES:
        return [task(item) for item in items]
    with ThreadPoolExecutor(count, "vua-sums") as pool:
        return list(pool.map(task, items))


Mark = tuple[object, ...]

_NESTED: Final = frozenset((list, tuple, set, dict))
_PLAIN: Final = _NESTED | {int, float, str, bool}
_MODULE: Final = frozenset(vars(nn.Module())) - {"training"}


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
