"""Whether a model in memory holds what the files of its checkpoint hold, element by element.

Names the first tensor that differs. A tensor of another dtype than its file's is compared with what
`from_pretrained` makes of the file: the same values, cast.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import load_state_dict

from vua.transformers.tensors import PIECE_NBYTES, same_bytes

__all__ = ["difference_from_files", "may_be_of_files"]

_TORCH: Final = (".bin", ".pt", ".pth")


def difference_from_files(model: Any, files: Sequence[Path], stop: threading.Event) -> str:
    """Return which parameter or persistent buffer differs from the files; "" if none does.

    Reads every byte of the files' tensors that the model has. Memory: 64 MiB, and one tensor if
    transformers keeps several of the file's tensors as one.

    Args:
        model: a model in memory.
        files: the checkpoint's weight files.
        stop: once set, the call ends with CancelledError.

    Raises:
        OSError: a file cannot be read.
        CancelledError: ``stop`` was set.
    """
    with ExitStack() as stack:
        try:
            stored = _Stored(files, stack)
        except (ValueError, RuntimeError, TypeError, LookupError, SafetensorError) as error:
            return f"the files cannot be read as tensors ({error})"
        names: dict[tuple[object, ...], list[str]] = {}
        tensors = dict(_persistent(model))
        for name, tensor in tensors.items():  # tied ones are one tensor with several names
            place = (tensor.data_ptr(), tensor.shape, tensor.stride())
            names.setdefault(place if tensor.nbytes else (name,), []).append(name)
        for group in names.values():
            problems = [
                (_difference(model, name, tensors[name], stored, stop), stored.has(model, name))
                for name in group
            ]
            found = [problem for problem, has in problems if has]
            if problem := next(filter(None, found or [problem for problem, _ in problems]), ""):
                return problem
    return ""


def may_be_of_files(model: Any, files: Sequence[Path]) -> bool:
    """Whether three rows of each tensor match the files' rows, if they name the tensor.

    Reads little: it tells checkpoints of one model apart, and proves nothing.
    """
    with ExitStack() as stack:
        try:
            stored = _Stored(files, stack)
        except (OSError, ValueError, RuntimeError, TypeError, LookupError, SafetensorError):
            return False
        for name, tensor in _persistent(model):
            for same in _names(model, name):
                if same not in stored or stored.shape(same) != tuple(tensor.shape):
                    continue
                last = len(tensor) - 1 if tensor.ndim else 0
                for at in sorted({0, last // 2, last}):
                    row = tensor.detach()[at : at + 1] if tensor.ndim else tensor.detach()
                    expected = stored.rows(same, at, at + 1).to(row.device, row.dtype)
                    if not same_bytes(expected, row):
                        return False
    return True


def _persistent(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    passing = {name for name, _ in model.named_non_persistent_buffers(remove_duplicate=False)}
    yield from model.named_parameters(remove_duplicate=False)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name not in passing:
            yield name, buffer


class _Stored:
    """The tensors of a checkpoint's files, by name."""

    def __init__(self, files: Sequence[Path], stack: ExitStack) -> None:
        """Open them. Raises OSError, ValueError, RuntimeError."""
        self._slices: dict[str, Any] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        for path in files:
            if path.suffix == ".safetensors":
                file = stack.enter_context(safe_open(path, framework="pt"))
                for name in file.keys():  # noqa: SIM118 - no mapping
                    self._add(self._slices, name, file)
            elif path.suffix in _TORCH:
                for name, tensor in _loaded(path).items():
                    self._add(self._tensors, name, tensor)
            else:
                raise ValueError(f"{path.name}: no safetensors and no file of torch's")

    def _add(self, where: dict[str, Any], name: str, value: object) -> None:
        if name in self._slices or name in self._tensors:
            raise ValueError(f"{name} is in two files")
        where[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self._slices or name in self._tensors

    def has(self, model: Any, name: str) -> bool:
        """Whether a parameter is here under its own name; tied ones need not be."""
        return any(same in self for same in _names(model, name))

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._tensors:
            return tuple(self._tensors[name].shape)
        return tuple(self._slices[name].get_slice(name).get_shape())

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return part of a tensor along its first dimension; all of a scalar."""
        if name in self._tensors:
            tensor = self._tensors[name]
            return tensor[start:stop] if tensor.ndim else tensor
        if not self.shape(name):
            return self._slices[name].get_tensor(name)
        return self._slices[name].get_slice(name)[start:stop]


def _loaded(path: Path) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a torch file. Raises OSError, RuntimeError, ValueError."""
    found = load_state_dict(str(path))  # transformers' own: tensors only, mapped where it can be
    if not isinstance(found, Mapping):
        raise TypeError(f"{path.name} holds a {type(found).__name__}, expected tensors by name")
    return {str(name): value for name, value in found.items() if isinstance(value, torch.Tensor)}


def _difference(
    model: Any,
    name: str,
    tensor: torch.Tensor,
    stored: _Stored,
    stop: threading.Event,
) -> str:
    """Return how one tensor differs from the file's, under any name."""
    if stop.is_set():
        raise CancelledError
    for same in _names(model, name):
        if same in stored and stored.shape(same) == tuple(tensor.shape):
            return _compared(name, tensor, same, stored, stop)
    try:
        parts = revert_weight_conversion(model, {name: tensor.detach()})
    except Exception as error:  # noqa: BLE001 - it needs other tensors, too, or finds no rule
        return f"{name} is in the files under no known name ({error})"
    for same, part in parts.items():
        if same not in stored or stored.shape(same) != tuple(part.shape):
            return f"{name} is of shape {tuple(tensor.shape)}; the files hold no such tensor"
        if problem := _compared(name, part, same, stored, stop):
            return problem
    return ""


def _names(model: Any, name: str) -> tuple[str, ...]:
    prefix = f"{model.base_model_prefix}."
    return name, prefix + name, name.removeprefix(prefix)


def _compared(
    name: str, tensor: torch.Tensor, same: str, stored: _Stored, stop: threading.Event
) -> str:
    tensor = tensor.detach()
    length = len(tensor) if tensor.ndim else 1
    rows = max(1, PIECE_NBYTES * length // max(1, tensor.nbytes))
    for at in range(0, length, rows):
        if stop.is_set():
            raise CancelledError
        expected = stored.rows(same, at, at + rows).to(tensor.device)
        found = tensor[at : at + rows] if tensor.ndim else tensor
        if expected.is_floating_point() and found.is_floating_point():
            expected = expected.to(found.dtype)
        if not same_bytes(expected, found):
            return f"{name} differs from what the files hold"
    return ""
