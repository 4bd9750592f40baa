"""States of llama.cpp, taken apart and joined."""

from __future__ import annotations

import struct
import unittest
from dataclasses import replace

import numpy as np
import pytest

from llama import WHERE, has_llama_cpp
from vua.errors import ConfigError

if not has_llama_cpp():
    pytest.skip(WHERE, allow_module_level=True)

from vua.llama_cpp.cache import StateForm, parse

TOKENS, LAYERS = 5, 2
FORM = StateForm(b"llama", LAYERS, k_type=1, v_type=1, k_dim=4, v_dim=6, v_transposed=False)


def values(dim: int, seed: int) -> list[np.ndarray[tuple[int, ...], np.dtype[np.uint16]]]:
    """Bits of K or V of each layer."""
    random = np.random.default_rng(seed)
    return [random.integers(0, 1 << 16, (TOKENS, dim), dtype=np.uint16) for _ in range(LAYERS)]


K, V = values(FORM.k_dim, 0), values(FORM.v_dim, 1)


def written(*, transposed: bool, order: tuple[int, ...] = tuple(range(TOKENS))) -> bytes:
    """A state as llama.cpp writes it (llama-kv-cache.cpp), its cells in any order."""
    out = [struct.pack("<I", 5), b"llama", struct.pack("<II", 1, TOKENS)]
    out += [struct.pack("<iIi", position, 1, 0) for position in order]
    out.append(struct.pack("<II", transposed, LAYERS))
    for rows in K:
        out += [struct.pack("<iQ", 1, 8), *(rows[position].tobytes() for position in order)]
    for rows in V:
        if transposed:
            out.append(struct.pack("<iII", 1, 2, 6))
            out += [column[list(order)].tobytes() for column in rows.T]
        else:
            out += [struct.pack("<iQ", 1, 12), *(rows[position].tobytes() for position in order)]
    return b"".join(out)


class TestState(unittest.TestCase):
    def test_both_ways(self) -> None:
        """What llama.cpp writes is taken apart, and put together to the same bytes."""
        for transposed in (False, True):
            with self.subTest(transposed=transposed):
                data = written(transposed=transposed)
                state = parse(data)

                self.assertEqual(replace(FORM, v_transposed=transposed), state.form)
                self.assertEqual(("F16", TOKENS), (state.form.dtype, state.tokens))
                np.testing.assert_array_equal(K, state.k)
                np.testing.assert_array_equal(V, state.v)
                self.assertEqual(data, state.form.build(K, V))
                self.assertEqual(data, state.form.build(state.k, state.v))

    def test_cells_in_any_order(self) -> None:
        """Tokens come out by position, wherever their cells lie."""
        for transposed in (False, True):
            with self.subTest(transposed=transposed):
                state = parse(written(transposed=transposed, order=(3, 0, 4, 1, 2)))

                np.testing.assert_array_equal(K, state.k)
                np.testing.assert_array_equal(V, state.v)

    def test_every_end(self) -> None:
        """A state that ends early, or goes on, is refused wherever that is."""
        data = written(transposed=False)
        for length in range(len(data)):
            with self.assertRaisesRegex(ConfigError, "cannot be taken apart"):
                parse(data[:length])
        with self.assertRaisesRegex(ConfigError, "3 bytes that are not K and V"):
            parse(data + b"abc")

    def test_what_is_not_known(self) -> None:
        """Each thing that this module does not know is refused, in words."""
        data = written(transposed=False)
        cell, rows = 17, 17 + 12 * TOKENS  # where the cells begin, where the layers
        broken = {
            "2 streams": (9, 2),
            "0 cells": (13, 0),
            "not one sequence's tokens": (cell, 7),
            "sequence's tokens from position 0": (cell + 4, 2),
            "ggml's type 8": (rows + 8, 8),
            "of different shapes": (rows + 4, 9999),  # layers
            "layers of different": (rows + 12, 9),  # bytes of a row
            "layers of different shapes": (rows + 8 + 12 + 8 * TOKENS + 4, 4),  # of the next layer
        }
        for expected, (at, number) in broken.items():
            with self.subTest(expected), self.assertRaisesRegex(ConfigError, expected):
                parse(data[:at] + struct.pack("<I", number) + data[at + 4 :])
