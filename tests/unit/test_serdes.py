"""Mirrors `vua.serdes`: one tensor as safetensors bytes, and back."""

from __future__ import annotations

import doctest
import json
import math
import struct
import unittest
import warnings
from typing import Any

import safetensors.torch
import torch
from hypothesis import strategies as st

from helpers import bits, noise
from properties import given, settings
from vua import serdes
from vua.errors import CorruptEntryError, InputError
from vua.serdes import bytes_to_tensor, tensor_to_bytes


def carries(dtype: torch.dtype, *, back: bool = False) -> bool:
    """Whether the installed safetensors writes a dtype (and reads it back)."""
    try:
        written = safetensors.torch.save({"t": torch.empty(2, dtype=dtype)})
        return not back or bool(safetensors.torch.load(written))
    except KeyError:
        return False


DTYPES = tuple(filter(carries, serdes.DTYPES.values()))
SHAPES = ((), (1,), (0,), (3, 0, 2), (2, 3, 5), (1, 1, 1, 1, 1, 1, 7))


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return noise(math.prod(shape), dtype=dtype, seed=seed).reshape(shape)


def file_of(header: Any, payload: bytes = b"") -> bytes:
    """A file with the safetensors framing around whatever header is given."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + payload


def one(**changes: Any) -> dict[str, Any]:
    """The header of one float32, with some fields changed."""
    return {"t": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}}


FOUR = bytes(4)
ONE = json.dumps(one()).encode()
ATTACKS = {
    "nothing at all": b"",
    "a header longer than the file": struct.pack("<Q", 4096) + ONE + FOUR,
    "an ignored field nested 100,000 deep": file_of(ONE[:-2] + b', "x": ' + b"[" * 100_000, FOUR),
    "an ignored number of 10,000 digits": file_of(
        ONE[:-2] + b', "x": ' + b"9" * 10_000 + b"}}", FOUR
    ),
    "only metadata": file_of({"__metadata__": {"a": "b"}}),
    "two tensors": file_of({**one(), "u": {**one()["t"], "data_offsets": [4, 8]}}, FOUR * 2),
    "one name twice": file_of(ONE[:-1] + b"," + ONE[1:], FOUR),
    "one field twice": file_of(ONE.replace(b'"dtype"', b'"dtype": "I32", "dtype"'), FOUR),
    "an unknown dtype": file_of(one(dtype="F31"), FOUR),
    "a dtype of half bytes": file_of(one(dtype="F4", shape=[8]), FOUR),
    "a shape that overflows beside a zero": file_of(one(shape=[2**63, 0], data_offsets=[0, 0])),
    "a terabyte that is not there": file_of(one(shape=[2**38], data_offsets=[0, 2**40]), FOUR),
    "a truncated payload": file_of(one(), FOUR[:-1]),
    "one trailing byte": file_of(one(), FOUR + b"\0"),
    "a truth value of 2": file_of(one(dtype="BOOL", shape=[4]), b"\0\1\2\1"),
}
"""What VUA itself judges; of lengths and shapes, which safetensors does, some of each kind."""


class TestRoundTrip(unittest.TestCase):
    def test_every_dtype_and_shape(self) -> None:
        """Every dtype comes back bit by bit in every shape, here and in safetensors."""
        for dtype in DTYPES:
            for shape in SHAPES:
                with self.subTest(dtype=dtype, shape=shape):
                    expected = tensor_of(dtype, shape)
                    written = tensor_to_bytes(expected)
                    found = [bytes_to_tensor(written)]
                    if carries(dtype, back=True):  # release 0.8 cannot read float8_e8m0fnu
                        found.append(safetensors.torch.load(written)["tensor"])
                        theirs = safetensors.torch.save({"层.0": expected}, metadata={"a": "b"})
                        found.append(bytes_to_tensor(theirs))
                    for actual in found:
                        self.assertEqual((dtype, shape), (actual.dtype, tuple(actual.shape)))
                        self.assertEqual(bits(expected), bits(actual))

    @settings(max_examples=150)
    @given(
        dtype=st.sampled_from(DTYPES),
        shape=st.lists(st.integers(0, 5), max_size=5),
        order=st.randoms(use_true_random=False),
        seed=st.integers(0, 2**31),
        step=st.integers(1, 3),
    )
    def test_any_strides(
        self, dtype: torch.dtype, shape: list[int], order: Any, seed: int, step: int
    ) -> None:
        """Any permuted and sliced view comes back as the values that the view shows."""
        axes = list(range(len(shape)))
        order.shuffle(axes)
        view = tensor_of(dtype, tuple(shape), seed).permute(axes)
        view = view[::step] if view.dim() else view
        found = bytes_to_tensor(tensor_to_bytes(view))
        self.assertEqual(view.shape, found.shape)
        self.assertEqual(bits(view.clone(memory_format=torch.contiguous_format)), bits(found))

    def test_views_that_are_flags(self) -> None:
        """Lazily conjugated and negated views are stored as what they show."""
        values = torch.tensor([1 + 2j, 3 - 4j])
        for view in (values.conj(), values.conj().imag):
            self.assertTrue(view.is_conj() or view.is_neg())
            self.assertEqual(view.tolist(), bytes_to_tensor(tensor_to_bytes(view)).tolist())

    def test_result_is_writable_and_owns_its_memory(self) -> None:
        """Changing the buffer later does not change the tensor, and the tensor may be changed."""
        for kind in (bytes, bytearray, memoryview):
            with self.subTest(kind=kind.__name__):
                source = bytearray(tensor_to_bytes(torch.zeros(4)))
                actual = bytes_to_tensor(kind(source))
                source[-16:] = b"\xff" * 16
                actual[0] = 1

                self.assertEqual([1, 0, 0, 0], actual.tolist())

    def test_pinned_bytes(self) -> None:
        """The bytes of a known tensor never change between releases; examples are as shown."""
        header = b'{"tensor":{"dtype":"I16","shape":[2],"data_offsets":[0,4]}}'
        expected = file_of(header + b" " * (-len(header) % 8), b"\x01\x00\xff\xff")

        self.assertEqual(expected, tensor_to_bytes(torch.tensor([1, -1], dtype=torch.int16)))
        self.assertEqual(0, doctest.testmod(serdes).failed)


class TestRefusals(unittest.TestCase):
    def test_attacks(self) -> None:
        """Every hostile file is refused as corrupt, in a message that says what to do."""
        self.assertEqual([0.0], bytes_to_tensor(file_of(one(), FOUR)).tolist())  # control
        for name, data in ATTACKS.items():
            with self.subTest(name), self.assertRaises(CorruptEntryError) as caught:
                bytes_to_tensor(data)
            self.assertRegex(str(caught.exception), "are not usable: .*; expected .*; ")

    @settings(max_examples=100)
    @given(data=st.data())
    def test_changed_headers(self, data: st.DataObject) -> None:
        """A changed header gives a tensor of exactly the payload's size, or a refusal."""
        written = bytearray(tensor_to_bytes(torch.arange(6, dtype=torch.int32)))
        for _ in range(data.draw(st.integers(1, 4))):
            written[data.draw(st.integers(0, len(written) - 25))] = data.draw(st.integers(0, 255))
        try:
            self.assertEqual(24, bytes_to_tensor(written).nbytes)
        except CorruptEntryError:
            return

    def test_no_plain_bytes(self) -> None:
        """Sparse, meta, quantized (its scale would be lost), unnameable: the caller's error."""
        refused = [
            torch.eye(3).to_sparse(),
            torch.empty(3, device="meta"),
            torch.zeros(3, dtype=torch.complex128),
            *(torch.empty(2, dtype=one) for one in serdes.DTYPES.values() if not carries(one)),
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer releases of torch call quantization deprecated
            refused.append(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
        for tensor in refused:
            with self.subTest(tensor.dtype), self.assertRaisesRegex(InputError, "convert"):
                tensor_to_bytes(tensor)
