"""The bytes of a llama.cpp context's state, split into K and V and joined again.

`llama_state_get_data` writes the name of the architecture, then for each of its memory's streams a
position and the sequences of every cell, and the rows of K and V layer by layer. The format has no
version, so `parse` refuses everything that does not give the same bytes when it is joined again.
One stream, one sequence, one shape in all layers, dtypes without blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vua.errors import ConfigError
from vua.format.layout import ITEMSIZE

GGML_DTYPES: Final = {0: "F32", 1: "F16", 30: "BF16"}
"""ggml's types whose single values can be separated, by VUA's names."""

_MAX_ARCH_NBYTES: Final = 256
_MAX_LAYERS: Final = 4096

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class StateForm:
    """What all states of one context have in common."""

    arch: bytes
    """llama.cpp's name of the model's architecture."""
    layers: int
    k_type: int
    """A key of `GGML_DTYPES`, as is ``v_type``."""
    v_type: int
    k_dim: int
    """Values of one token in one layer, all heads."""
    v_dim: int
    v_transposed: bool
    """Whether V is ``[v_dim, cells]``: without flash attention."""

    @property
    def dtype(self) -> str:
        """The dtype of K, by VUA's name."""
        return GGML_DTYPES[self.k_type]

    def build(self, k: Sequence[Array], v: Sequence[Array]) -> bytes:
        """Return the state of a context that has computed these tokens as positions 0, 1, ...

        Args:
            k: for each layer ``[tokens, k_dim]``, any strides, of unsigned words as wide as a
                value: the bits of any dtype.
            v: the same, ``[tokens, v_dim]``.
        """
        tokens = len(k[0])
        parts = [struct.pack("<I", len(self.arch)), self.arch, struct.pack("<II", 1, tokens)]
        cells = np.zeros((tokens, 3), "<i4")  # position, number of sequences, sequence 0
        cells[:, 0], cells[:, 1] = np.arange(tokens), 1
        parts += [cells.tobytes(), struct.pack("<II", self.v_transposed, self.layers)]
        for rows in k:
            parts += [
                struct.pack("<iQ", self.k_type, rows.shape[1] * rows.itemsize),
                rows.tobytes(),
            ]
        for rows in v:
            if self.v_transposed:
                head = struct.pack("<iII", self.v_type, rows.itemsize, rows.shape[1])
                parts += [head, rows.T.tobytes()]
            else:
                head = struct.pack("<iQ", self.v_type, rows.shape[1] * rows.itemsize)
                parts += [head, rows.tobytes()]
        return b"".join(parts)


@dataclass(frozen=True, slots=True)
class State:
    """A state, split. The arrays are views of the parsed bytes."""

    form: StateForm
    k: list[Array]
    """For each layer ``[tokens, k_dim]``, unsigned words with the bits of the values."""
    v: list[Array]
    """The same, ``[tokens, v_dim]``."""

    @property
    def tokens(self) -> int:
        """How many tokens the context had computed, from position 0 on."""
        return len(self.k[0])


class _Reader:
    """Reads numbers and arrays from the front of bytes. Raises ConfigError at their end."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._data, self._at = data, 0

    def numbers(self, form: str) -> tuple[int, ...]:
        found = struct.unpack_from(
            f"<{form}", self._data, self._advance(struct.calcsize(f"<{form}"))
        )
        return tuple(int(one) for one in found)

    def bytes(self, nbytes: int) -> bytes:
        at = self._advance(nbytes)
        return bytes(self._data[at : at + nbytes])

    def array(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> Array:
        count = shape[0] * shape[1]
        at = self._advance(count * dtype.itemsize)
        return np.frombuffer(self._data, dtype, count, at).reshape(shape)

    def _advance(self, nbytes: int) -> int:
        at, self._at = self._at, self._at + nbytes
        if self._at > len(self._data):
            raise _unknown(f"it ends after {len(self._data)} bytes, {self._at} were expected")
        return at

    @property
    def left_nbytes(self) -> int:
        return len(self._data) - self._at


def parse(data: bytes | bytearray) -> State:
    """Split a state.

    Args:
        data: written by `llama_state_get_data` for a context with at least one token.

    Raises:
        ConfigError: it holds something other than K and V of one sequence from position 0 on, or in
            a form that this module does not know. The message says what.
    """
    reader = _Reader(data)
    (length,) = reader.numbers("I")
    if length > _MAX_ARCH_NBYTES:
        raise _unknown(f"a name of {length} bytes")
    arch = reader.bytes(length)
    streams, cells = reader.numbers("II")
    if streams != 1 or not cells:
        raise _unknown(f"{streams} streams, {cells} cells")
    order = _order(reader.array((cells, 3), np.dtype("<i4")))
    transposed, layers = reader.numbers("II")
    if transposed > 1 or not 0 < layers <= _MAX_LAYERS:
        raise _unknown(f"{layers} layers")
    k, k_types = _rows(reader, cells, layers)
    v, v_types = (_columns if transposed else _rows)(reader, cells, layers)
    if reader.left_nbytes:
        raise _unknown(f"{reader.left_nbytes} bytes that are not K and V, such as sliding windows")
    shapes = {(one, rows.shape[1]) for one, rows in zip(k_types, k, strict=True)}
    shapes_v = {(one, rows.shape[1]) for one, rows in zip(v_types, v, strict=True)}
    if len(shapes) != 1 or len(shapes_v) != 1:
        raise _unknown("layers of different shapes")
    ((k_type, k_dim),), ((v_type, v_dim),) = shapes, shapes_v
    form = StateForm(arch, layers, k_type, v_type, k_dim, v_dim, bool(transposed))
    return State(form, [rows[order] for rows in k], [rows[order] for rows in v])


def _order(cells: Array) -> slice | Array:
    positions = cells[:, 0]
    sorts = np.argsort(positions, kind="stable")
    if (
        not np.array_equal(positions[sorts], np.arange(len(cells)))
        or (cells[:, 1:] != [1, 0]).any()
    ):
        raise _unknown("cells that are not one sequence's tokens from position 0 on")
    in_order = np.array_equal(sorts, np.arange(len(cells)))
    return slice(None) if in_order else sorts


def _rows(reader: _Reader, cells: int, layers: int) -> tuple[list[Array], list[int]]:
    arrays, types = [], []
    for _ in range(layers):
        (kind,) = reader.numbers("i")
        (row_nbytes,) = reader.numbers("Q")
        word = _word(kind)
        if row_nbytes % word.itemsize:
            raise _unknown(f"rows of {row_nbytes} bytes")
        arrays.append(reader.array((cells, row_nbytes // word.itemsize), word))
        types.append(kind)
    return arrays, types


def _columns(reader: _Reader, cells: int, layers: int) -> tuple[list[Array], list[int]]:
    arrays, types = [], []
    for _ in range(layers):
        kind, itemsize, width = reader.numbers("iII")
        word = _word(kind)
        if itemsize != word.itemsize:
            raise _unknown(f"values of {itemsize} bytes")
        arrays.append(reader.array((width, cells), word).T)
        types.append(kind)
    return arrays, types


def _word(kind: int) -> np.dtype[Any]:
    if kind not in GGML_DTYPES:
        raise _unknown(f"K or V of ggml's type {kind}; {sorted(GGML_DTYPES)} are known")
    return np.dtype(f"<u{ITEMSIZE[GGML_DTYPES[kind]]}")


def _unknown(what: str) -> ConfigError:
    return ConfigError(f"the state that llama.cpp writes cannot be taken apart: {what}")
