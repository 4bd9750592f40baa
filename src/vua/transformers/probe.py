"""What a model computes: K and V of a fixed prompt, and of the first layer for any ids.

A Python process has no end of places where a function can live, so nothing is read from it: two
models are the same if they compute the same. The prompt has 96 ids, drawn from the vocabulary by a
seed: 80 at positions 0 to 79, and 16 that continue at the far end of the model's positions.
Models that compute the same differ by rounding alone (`vua.store.agreement`), in every layer and
every 16 tokens.

The first 16 ids alone, the 80 before 64 others, and K of the first layer of a long prompt show
whether a token's K and V depend on what follows it, or on the length of its prompt. If so, no
prefix can be reused.

Beside it the tensors of a model, wherever they lie, their bytes, and a cheap mark.

The mark changes when something may have changed what the model computes. It proves nothing: a
changed mark is the reason to compare and to compute again. It holds what is seen in passing: modes
of torch, hooks, classes and `forward` of modules, their plain attributes, and the tensors'
addresses and versions. A write through `.data` or an array, and a function that is replaced
elsewhere, change no mark; these are found by the reads and the probe of each load and save. Taken
in some 10 microseconds per module.
"""

from __future__ import annotations

import hashlib
import inspect
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any, Final, TypeVar

import torch
import xxhash
from torch import nn
from torch.overrides import _get_current_function_mode_stack as _function_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache

from vua.connector.weights_watch import device_digest
from vua.errors import ConfigError
from vua.serdes import DTYPE_NAMES
from vua.store.agreement import distances, tolerance
from vua.transformers.layers import LayerCache

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


TOKENS: Final = 96
_NEAR, _FIRST, _TAIL = 80, 16, 64
_LONG: Final = 4096
"""Tokens of the long prompt at most."""
_FULL: Final = 1 / 64
"""The share of TF32's tolerance that products of float32 need: they have 13 bits more."""
_BLOCK: Final = 1024
"""Tokens whose first layer is computed at once."""


def run(
    model: Any, ids: torch.Tensor, past: DynamicCache | None = None, start: int | None = None
) -> DynamicCache:
    """Return the cache with K and V of ``ids``, (T,), after ``past``, at positions from ``start``.

    By default at those that follow ``past``. Passes the model's exceptions on.
    """
    cache = DynamicCache() if past is None else past
    taken = inspect.signature(model.forward).parameters
    more: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
    ids = ids.to(device_of(model))[None]
    if start is not None and "position_ids" in taken:
        more["position_ids"] = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True, **more)
    return cache


class _FirstLayer(DynamicCache):
    """Captures K of the first layer and ends the forward pass."""

    class Taken(Exception):  # noqa: N818 - no error
        """K was captured."""

    k: torch.Tensor

    def update(self, key_states: torch.Tensor, *_: object, **__: object) -> Any:
        self.k = key_states
        raise self.Taken


def first_keys(model: Any, ids: torch.Tensor, start: int = 0, *, whole: bool = False) -> Any:
    """Return K of the first layer for ``ids[start:]``, [heads, tokens, dim]; ids: (T,).

    It depends on the tokens and their positions alone, so they are computed in blocks, unless
    ``whole``. Costs one layer's projections. Passes the model's exceptions on.
    """
    positions = "position_ids" in inspect.signature(model.forward).parameters
    size = _BLOCK if positions and not whole else max(1, len(ids))
    # compiled code cannot be left at its first layer
    stance = getattr(torch.compiler, "set_stance", None)
    parts = []
    with stance("force_eager") if stance is not None else nullcontext():
        for at in range(start if positions else 0, len(ids), size):
            cache = _FirstLayer()
            with suppress(_FirstLayer.Taken):
                run(model, ids[at : at + size], cache, at)
            parts.append(cache.k[0])
    return torch.cat(parts, dim=1)[:, 0 if positions else start :]


def layers_of(cache: DynamicCache, start: int = 0, stop: int | None = None) -> list[LayerCache]:
    """Return K and V of a cache's only row, of tokens ``start`` to ``stop``."""
    return [
        LayerCache(layer.keys[0, :, start:stop], layer.values[0, :, start:stop])
        for layer in cache.layers
    ]


class Probe:
    """What a model computes for the prompt."""

    def __init__(self, model: Any) -> None:
        """Compute it: 96 tokens, 144, 16, and the first layer of a long prompt.

        Raises:
            ConfigError: no prefix can be reused: the model keeps no K and V, K and V of a token
                depend on what follows, or they have several shapes.
        """
        self._model = model
        self._ids = _ids_of(model)
        text = model.config.get_text_config()
        most = getattr(text, "max_position_embeddings", None) or _LONG
        try:
            near = run(model, self._ids[:_NEAR])
            whole = run(model, self._ids[_NEAR:TOKENS], near, max(_NEAR, most - 2 * _FIRST))
        except Exception as problem:  # the model's own, of any kind
            raise ConfigError(
                f"it computes nothing with an empty DynamicCache() ({type(problem).__name__}: "
                f"{problem})"
            ) from problem
        if any(not layer.is_initialized for layer in whole.layers) or not whole.layers:
            raise ConfigError("it keeps no K and V for some of its layers")
        self.devices = [layer.keys.device for layer in whole.layers]
        shapes = {
            (tuple(tensor.shape), DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)))
            for layer in whole.layers
            for tensor in (layer.keys, layer.values)
        }
        kinds = {(layer.keys.shape, layer.values.shape) for layer in whole.layers}
        ((_, self.kv_heads, columns, self.k_dim), v) = (*next(iter(kinds)),)
        self.v_dim, self.dtype = v[3], next(iter(shapes))[1]
        if len(kinds) > 1 or columns != TOKENS or v[1:3] != (self.kv_heads, TOKENS):
            raise ConfigError(
                f"its layers' K and V have different shapes, {sorted(shapes)}; expected one "
                f"shape in all layers, (1, heads, {TOKENS}, dim)"
            )
        if len({dtype for _, dtype in shapes}) > 1 or self.dtype not in DTYPE_NAMES.values():
            raise ConfigError(f"its K and V are {sorted(shapes)}, expected one known dtype")
        self._quantised = getattr(model, "hf_quantizer", None) is not None
        self.layers = layers_of(whole)
        self._first = layers_of(run(model, self._ids[:_FIRST]))
        self._check_prefixes(most)

    def _check_prefixes(self, most: int) -> None:
        """Raise ConfigError if a token's K or V depend on more than the tokens up to it."""
        model, ids = self._model, self._ids
        longer = run(model, ids[torch.cat([torch.arange(_NEAR), torch.arange(TOKENS, 160)])])
        for found, tokens, what in (
            (self._first, _FIRST, "alone"),
            (layers_of(longer, 0, _NEAR), _NEAR, "before other ids"),
        ):
            own = [LayerCache(k[:, :tokens], v[:, :tokens]) for k, v in self.layers]
            if difference := self.unlike(found, own):
                raise ConfigError(
                    f"a token's K and V change with what follows it: {tokens} tokens {what}, "
                    f"{difference}"
                )
        known = self.layers[0].k[:, :_NEAR]
        length = min(most + _TAIL if _has_no_end(model, most) else most - _FIRST, _LONG + _TAIL)
        long = ids.repeat(-(-length // len(ids)))[:length] if length > TOKENS else ids[:TOKENS]
        long[:_NEAR] = ids[:_NEAR]
        for start, keys, what in (
            (0, first_keys(model, ids[:_NEAR]), "alone"),
            (_FIRST, first_keys(model, ids[:_NEAR], _FIRST), f"from token {_FIRST} on"),
            (0, first_keys(model, long, whole=True)[:, :_NEAR], f"in a prompt of {len(long)}"),
        ):
            found, expected = ([LayerCache(k, k)] for k in (keys, known[:, start:]))
            if difference := self.unlike(found, expected):
                raise ConfigError(
                    f"K of a token's first layer depends on more than the token and its position: "
                    f"{what}, {difference}"
                )

    def unlike(
        self, computed: Sequence[LayerCache], stored: Sequence[LayerCache], *, each: bool = False
    ) -> str:
        """Return how two computations differ beyond this model's rounding; "" if they do not.

        Args:
            computed: K and V of each layer.
            stored: the same tokens', possibly on other devices.
            each: whether each token counts; else the median of 16, as a mixture of experts sends
                some tokens to another expert where another kernel rounds otherwise.
        """
        most = _FULL if self.dtype in {"F32", "F64"} and not _is_tf32() else 1.0
        if len(computed) != len(stored):
            return f"there are {len(computed)} layers, expected {len(stored)}"
        for number, (one, other) in enumerate(zip(computed, stored, strict=True)):
            if [part.shape for part in one] != [part.shape for part in other]:
                return f"layer {number} is of other shapes"
            for name, mine, theirs in zip("KV", one, other, strict=True):
                if torch.equal(mine := mine.to(theirs.device), theirs):
                    continue
                tokens = distances(mine, theirs)
                some = (tokens[at : at + _FIRST] for at in range(0, len(tokens), _FIRST))
                found = max(float(part.max() if each else part.median()) for part in some)
                if found > most * tolerance(self.dtype, number, quantised=self._quantised):
                    return f"{name} of layer {number} differs by {found:.2g} of its size"
        return ""

    def change(self) -> str:
        """Compute the first 16 ids again; return how they differ from the first time."""
        return self.unlike(layers_of(run(self._model, self._ids[:_FIRST])), self._first, each=True)


def _is_tf32() -> bool:
    """Whether products of float32 may have fewer bits; torch raises for mixtures of settings."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        return True


def _has_no_end(model: Any, most: int) -> bool:
    """Whether positions from ``most`` on can be computed.

    A table of positions has an end: an index after it is an error that a GPU does not survive.
    """
    modules = list(model.modules())
    names = [*vars(model.config.get_text_config()), *(type(one).__name__ for one in modules)]
    tables = {len(one.weight) for one in modules if isinstance(one, torch.nn.Embedding)}
    tables |= {len(one) for one in model.buffers() if one.ndim > 1}
    rotates = any("rope" in name.lower() or "rotary" in name.lower() for name in names)
    return rotates and tables.isdisjoint(range(most, most + _FIRST))


def digest_of(layers: Sequence[LayerCache]) -> str:
    """Return 64 hex digits that name K and V by their bytes."""
    found = hashlib.sha256()
    for tensor in (tensor for layer in layers for tensor in layer):
        data: Any = tensor.contiguous().cpu().view(torch.uint8).numpy()
        found.update(data)
    return found.hexdigest()


def _ids_of(model: Any) -> torch.Tensor:
    """Return the ids: 96 of the prompt, 64 others; none that means an image or a sound."""
    text = model.config.get_text_config()
    special: set[int] = set()
    for config in (model.config, text):
        for name, value in vars(config).items():
            if name.endswith(("token_id", "token_index")) and value is not None:
                special |= {value} if isinstance(value, int) else {*value}
    drawn = random.Random(0).choices(range(text.vocab_size), k=64 * TOKENS)  # noqa: S311
    plain = [token for token in drawn if token not in special] or drawn
    return torch.tensor(plain[: TOKENS + _TAIL])
