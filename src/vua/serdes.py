"""One tensor as safetensors bytes, and back.

`tensor_to_bytes` writes a valid safetensors file that `safetensors.torch.load` opens, and
`bytes_to_tensor` reads what `safetensors.torch.save` wrote, as long as it holds one tensor. Nothing
in the bytes is ever executed (no pickle), and every length in them is checked against the actual
bytes before it is used. It does not prove that the values are the intended ones: `vua.format.entry`
does that.
"""

from __future__ import annotations

import json
from typing import Any, Final

from vua.errors import CorruptEntryError, InputError, how_to_get

try:
    import torch
except ModuleNotFoundError as problem:
    raise how_to_get(problem) from None

import safetensors
import safetensors.torch

__all__ = ["bytes_to_tensor", "tensor_to_bytes"]

_NAME: Final = "tensor"

# safetensors' own table for reading is private and, up to 0.8, lacks a dtype that it writes. Names
# are looked up in torch because its older versions lack some.
DTYPES: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, in_torch)
    for name, in_torch in {
        "BOOL": "bool",
        "U8": "uint8",
        "I8": "int8",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2": "float8_e5m2",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
        "U16": "uint16",
        "I16": "int16",
        "F16": "float16",
        "BF16": "bfloat16",
        "U32": "uint32",
        "I32": "int32",
        "F32": "float32",
        "U64": "uint64",
        "I64": "int64",
        "F64": "float64",
        "C64": "complex64",
    }.items()
    if hasattr(torch, in_torch)
}
DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def tensor_to_bytes(t: torch.Tensor) -> bytes:
    """Returns a safetensors file that holds this one tensor.

    The tensor may be of any shape, strides and device; its gradient history is not kept.

    Raises:
        InputError: The tensor has no plain dense bytes (sparse, quantized, nested or meta), or
            safetensors has no name for its dtype.

    >>> len(tensor_to_bytes(torch.zeros(2, 3)))
    96
    """
    if t.is_meta or t.is_quantized or t.is_nested or t.layout is not torch.strided:
        raise InputError(
            f"this tensor has no plain dense bytes: layout {t.layout}, dtype {t.dtype}, "
            f"device {t.device}; convert it first, e.g. with to_dense() or dequantize()"
        )
    if t.dtype not in DTYPE_NAMES:
        raise InputError(
            f"safetensors has no name for {t.dtype}; convert the tensor first, "
            f"e.g. with view(torch.uint8)"
        )
    # A conjugate or negative view is a flag on the bytes of another tensor; a file has no flags.
    plain = t.detach().cpu().resolve_conj().resolve_neg().contiguous()
    try:
        return safetensors.torch.save({_NAME: plain})
    except KeyError as error:
        raise InputError(
            f"safetensors {safetensors.__version__} cannot write {t.dtype}; "
            f"a newer release may, or convert the tensor first, e.g. with view(torch.uint8)"
        ) from error


def bytes_to_tensor(
    buf: bytes | bytearray | memoryview, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """Returns the one tensor of a safetensors file in memory, with any name.

    The tensor is writable and owns its memory: `buf` may be changed or freed afterwards.

    Raises:
        CorruptEntryError: The bytes are not a safetensors file with exactly one tensor.

    >>> bytes_to_tensor(tensor_to_bytes(torch.arange(3)))
    tensor([0, 1, 2])
    """
    data = buf if isinstance(buf, bytes) else memoryview(buf).tobytes()
    # The library checks all lengths, offsets and shapes against the size of `data`, without
    # overflow and before it allocates; it copies the payload into a bytearray of its own.
    try:
        tensors = safetensors.deserialize(data)
    except safetensors.SafetensorError as error:
        raise _corrupt(str(error), len(data)) from error
    _check_names(data)
    if len(tensors) != 1:
        raise _corrupt(f"it holds {len(tensors)} tensors", len(data))
    [(_, found)] = tensors
    if found["dtype"] not in DTYPES:
        raise _corrupt(f"its dtype {found['dtype']} is unknown here", len(data))
    return _tensor(found["data"], DTYPES[found["dtype"]], found["shape"], len(data)).to(device)


def _tensor(payload: bytearray, dtype: torch.dtype, shape: list[int], nbytes: int) -> torch.Tensor:
    """Returns a tensor over `payload`, which has no other user."""
    if dtype is torch.bool and payload.strip(b"\x00\x01"):
        raise _corrupt("a truth value is neither 0 nor 1", nbytes)
    try:
        if not payload:  # frombuffer refuses these
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(payload, dtype=dtype).reshape(shape)
    except (RuntimeError, TypeError) as error:  # e.g. a length beyond 2**63 beside a length of 0
        raise _corrupt(f"torch cannot have the shape {shape}", nbytes) from error


def _check_names(data: bytes) -> None:
    """Raises if a name occurs twice: readers differ in which one they use."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) != len(pairs):
            raise _corrupt("a name occurs twice in its header", len(data))
        return names

    header_nbytes = int.from_bytes(data[:8], "little")
    try:
        json.loads(data[8 : 8 + header_nbytes].decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # in fields that the library skips
        raise _corrupt(f"its header is not plain JSON: {error}", len(data)) from error


def _corrupt(found: str, nbytes: int) -> CorruptEntryError:
    return CorruptEntryError(
        f"these {nbytes} bytes are not usable: {found}; expected a safetensors file with exactly "
        f"one tensor; discard them and store the tensor again"
    )
