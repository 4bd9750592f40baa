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
        parts += [_cells(tokens).tobytes(), struct.pack("<II", self.v_transposed, self.layers)]
        head = _head(self.k_type, self.k_dim)
        head_v = _head(self.v_type, self.v_dim, transposed=self.v_transposed)
        for rows in k:
            parts += [head, rows.tobytes()]
        for rows in v:
            parts += [head_v, (rows.T if self.v_transposed else rows).tobytes()]
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


def parse(data: bytes | bytearray) -> State:
    """Split a state.

    Args:
        data: written by `llama_state_get_data` for a context with at least one token.

    Raises:
        ConfigError: it holds something other than K and V of one sequence from position 0 on, or in
            a form that this module does not know. The message says what.
    """
    try:
        (length,) = struct.unpack_from("<I", data)
        streams, tokens = struct.unpack_from("<II", data, 4 + length)
        at = 4 + length + 8 + 12 * tokens
        if streams != 1 or not tokens:
            raise _unknown(f"{streams} streams, {tokens} cells")
        transposed, layers, k_type, k_nbytes = struct.unpack_from("<IIiQ", data, at)
        k_dim = k_nbytes // _word(k_type).itemsize
        k, end = _layers(data, at + 8, _head(k_type, k_dim), layers, (tokens, k_dim))
        v_type, *v_size = struct.unpack_from("<iII" if transposed else "<iQ", data, end)
    except (struct.error, OverflowError) as problem:
        raise _unknown(f"it ends after {len(data)} bytes") from problem
    v_dim = v_size[-1] if transposed else v_size[0] // _word(v_type).itemsize
    shape = (v_dim, tokens) if transposed else (tokens, v_dim)
    head = _head(v_type, v_dim, transposed=transposed == 1)
    v, end = _layers(data, end, head, layers, shape)
    if end != len(data) or transposed > 1:
        raise _unknown(f"{len(data) - end} bytes that are not K and V, such as sliding windows")
    order = _order(np.frombuffer(data, "<i4", 3 * tokens, at - 12 * tokens).reshape(-1, 3))
    arch = bytes(data[4 : 4 + length])
    form = StateForm(arch, layers, k_type, v_type, k_dim, v_dim, v_transposed=transposed == 1)
    v = [rows.T if transposed else rows for rows in v]
    return State(form, [rows[order] for rows in k], [rows[order] for rows in v])


def _head(kind: int, dim: int, *, transposed: bool = False) -> bytes:
    itemsize = _word(kind).itemsize
    if transposed:
        return struct.pack("<iII", kind, itemsize, dim)
    return struct.pack("<iQ", kind, dim * itemsize)


def _layers(
    data: bytes | bytearray, at: int, head: bytes, layers: int, shape: tuple[int, int]
) -> tuple[list[Array], int]:
    found, count = list[Array](), shape[0] * shape[1]
    word = _word(struct.unpack_from("<i", head)[0])
    for _ in range(layers):
        begin, at = at + len(head), at + len(head) + count * word.itemsize
        if data[begin - len(head) : begin] != head or at > len(data):
            raise _unknown("layers of different shapes")
        found.append(np.frombuffer(data, word, count, begin).reshape(shape))
    return found, at


def _cells(tokens: int) -> Array:
    """Return what llama.cpp says of each token: position, number of sequences, sequence 0."""
    cells = np.zeros((tokens, 3), "<i4")
    cells[:, 0], cells[:, 1] = np.arange(tokens), 1
    return cells


def _order(cells: Array) -> slice | Array:
    """Return where tokens 0, 1, ... lie; a slice is a view of all."""
    sorts = np.argsort(cells[:, 0], kind="stable")
    if not np.array_equal(cells[sorts], _cells(len(cells))):
        raise _unknown("cells that are not one sequence's tokens from position 0 on")
    return slice(None) if np.array_equal(cells, cells[sorts]) else sorts


def _word(kind: int) -> np.dtype[Any]:
    if kind not in GGML_DTYPES:
        raise _unknown(f"K or V of ggml's type {kind}; {sorted(GGML_DTYPES)} are known")
    return np.dtype(f"<u{ITEMSIZE[GGML_DTYPES[kind]]}")


def _unknown(what: str) -> ConfigError:
    return ConfigError(f"the state that llama.cpp writes cannot be taken apart: {what}")
