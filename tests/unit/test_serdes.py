"""Mirrors `vua.serdes`: one tensor as safetensors bytes, and back."""

from __future__ import annotations

import doctest
import json
import math
import pickle
import struct
import unittest
import warnings
from typing import Any

import pytest
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


CERTAIN = tuple(
    getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    )
)
# Depends on the releases of safetensors and torch.
RECENT = tuple(
    getattr(torch, name)
    for name in (
        *("uint64", "uint32", "uint16", "complex64"),
        *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
)
DTYPES = (*CERTAIN, *filter(carries, RECENT))
# Release 0.8 of safetensors writes float8_e8m0fnu and cannot read it.
SHARED_DTYPES = tuple(dtype for dtype in DTYPES if carries(dtype, back=True))
SHAPES = ((), (1,), (0,), (3, 0, 2), (2, 3, 5), (1, 1, 1, 1, 1, 1, 7))


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return noise(math.prod(shape), dtype=dtype, seed=seed).reshape(shape)


def file_of(header: Any, payload: bytes = b"", header_nbytes: int | None = None) -> bytes:
    """A file with the safetensors framing around whatever header is given."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    nbytes = len(raw) if header_nbytes is None else header_nbytes
    return struct.pack("<Q", nbytes) + raw + payload


def one(**changes: Any) -> dict[str, Any]:
    """The header of one float32, with some fields changed."""
    return {"t": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}}


FOUR = bytes(4)
ATTACKS = {
    "nothing at all": b"",
    "less than a header length": b"\x01\0\0",
    "a header length and no header": file_of(b"", header_nbytes=2),
    "a header longer than the file": file_of(one(), FOUR, header_nbytes=4096),
    "a header of 2**63 bytes": file_of(one(), FOUR, header_nbytes=2**63),
    "a header that is not UTF-8": file_of(b'{"\xff\xfe": 1}', FOUR),
    "a header that is not JSON": file_of(b"{dtype: F32}", FOUR),
    "a header nested 100,000 deep": file_of(b"[" * 100_000),
    "an ignored field nested 100,000 deep": file_of(
        json.dumps(one()).encode()[:-2] + b', "x": ' + b"[" * 100_000, FOUR
    ),
    "an ignored field with a number of 10,000 digits": file_of(
        json.dumps(one()).encode()[:-2] + b', "x": ' + b"9" * 10_000 + b"}}", FOUR
    ),
    "a pickle": pickle.dumps({"t": [1.0]}),
    "no tensor": file_of({}),
    "only metadata": file_of({"__metadata__": {"a": "b"}}),
    "metadata that is not text": file_of({"__metadata__": {"a": 1}, **one()}, FOUR),
    "two tensors": file_of({**one(), "u": {**one()["t"], "data_offsets": [4, 8]}}, FOUR * 2),
    "one name twice": file_of(
        b'{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"t":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}}',
        FOUR,
    ),
    "one field twice": file_of(
        b'{"t":{"dtype":"F32","dtype":"I32","shape":[1],"data_offsets":[0,4]}}', FOUR
    ),
    "no dtype": file_of({"t": {"shape": [1], "data_offsets": [0, 4]}}, FOUR),
    "an unknown dtype": file_of(one(dtype="F31"), FOUR),
    "a dtype of half bytes": file_of(one(dtype="F4", shape=[8]), FOUR),
    "a dtype smaller than the payload": file_of(one(dtype="F16"), FOUR),
    "a shape smaller than the payload": file_of(one(data_offsets=[0, 8]), FOUR * 2),
    "a negative shape": file_of(one(shape=[-1]), FOUR),
    "a shape that is a number": file_of(one(shape=1), FOUR),
    "a shape whose product overflows to fit": file_of(one(shape=[2**32, 2**32, 1]), FOUR),
    "a shape that overflows beside a zero": file_of(
        one(shape=[2**63, 0], data_offsets=[0, 0]),
    ),
    "a terabyte that is not there": file_of(one(shape=[2**38], data_offsets=[0, 2**40]), FOUR),
    "offsets backwards": file_of(one(data_offsets=[4, 0]), FOUR),
    "three offsets": file_of(one(data_offsets=[0, 2, 4]), FOUR),
    "a gap before the payload": file_of(one(data_offsets=[4, 8]), FOUR * 2),
    "offsets into the header": file_of(one(data_offsets=[-8, -4]), FOUR),
    "a truncated payload": file_of(one(), FOUR[:-1]),
    "one trailing byte": file_of(one(), FOUR + b"\0"),
    "a truth value of 2": file_of(one(dtype="BOOL", shape=[4]), b"\0\1\2\1"),
}


class TestRoundTrip(unittest.TestCase):
    def assert_same(self, expected: torch.Tensor, actual: torch.Tensor) -> None:
        """The tensors agree in dtype, shape and every bit."""
        self.assertEqual(expected.dtype, actual.dtype)
        self.assertEqual(expected.shape, actual.shape)
        dense = expected.clone(memory_format=torch.contiguous_format)
        self.assertEqual(bits(dense), bits(actual))

    def test_every_dtype_and_shape(self) -> None:
        """Every dtype comes back bit by bit in every shape, scalars and empty ones included."""
        for dtype in DTYPES:
            for shape in SHAPES:
                with self.subTest(dtype=dtype, shape=shape):
                    expected = tensor_of(dtype, shape)

                    self.assert_same(expected, bytes_to_tensor(tensor_to_bytes(expected)))

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

        self.assert_same(view, bytes_to_tensor(tensor_to_bytes(view)))

    @unittest.skipUnless(torch.complex64 in DTYPES, "this safetensors knows no complex numbers")
    def test_views_that_are_flags(self) -> None:
        """Lazily conjugated and negated views are stored as what they show."""
        values = torch.tensor([1 + 2j, 3 - 4j])
        for view in (values.conj(), values.conj().imag):
            with self.subTest(conj=view.is_conj(), neg=view.is_neg()):
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

    def test_examples_in_docstrings(self) -> None:
        result = doctest.testmod(serdes)

        self.assertEqual(0, result.failed)
        self.assertGreater(result.attempted, 1)


class TestCompatibility(unittest.TestCase):
    def test_safetensors_reads_ours(self) -> None:
        """safetensors.torch.load opens what we wrote, under the name `tensor`."""
        for dtype in SHARED_DTYPES:
            for shape in SHAPES:
                with self.subTest(dtype=dtype, shape=shape):
                    expected = tensor_of(dtype, shape)
                    loaded = safetensors.torch.load(tensor_to_bytes(expected))

                    self.assertEqual(["tensor"], list(loaded))
                    self.assertEqual(dtype, loaded["tensor"].dtype)
                    self.assertEqual(expected.shape, loaded["tensor"].shape)
                    self.assertEqual(bits(expected), bits(loaded["tensor"]))

    def test_we_read_theirs(self) -> None:
        """We open what safetensors.torch.save wrote, under any name and beside any metadata."""
        for dtype in SHARED_DTYPES:
            for name in ("", "tensor", "层.0/kv"):
                with self.subTest(dtype=dtype, name=name):
                    expected = tensor_of(dtype, (2, 3))
                    written = safetensors.torch.save({name: expected}, metadata={"a": "b"})

                    self.assertEqual(bits(expected), bits(bytes_to_tensor(written)))

    def test_pinned_bytes(self) -> None:
        """The bytes of a known tensor never change between releases."""
        header = b'{"tensor":{"dtype":"I16","shape":[2],"data_offsets":[0,4]}}'
        padding = b" " * (-len(header) % 8)
        expected = file_of(header + padding, b"\x01\x00\xff\xff")

        self.assertEqual(expected, tensor_to_bytes(torch.tensor([1, -1], dtype=torch.int16)))


class TestAttacks(unittest.TestCase):
    def test_attacks(self) -> None:
        """Every hostile file is refused as corrupt, in a message that says what to do."""
        for name, data in ATTACKS.items():
            for kind in (bytes, bytearray, memoryview):
                with self.subTest(attack=name, kind=kind.__name__):
                    with self.assertRaises(CorruptEntryError) as caught:
                        bytes_to_tensor(kind(data))

                    self.assertRegex(str(caught.exception), "are not usable: .*; expected .*; ")

    def test_the_attacked_file_is_sound(self) -> None:
        """The file that the attacks are made from is read, so it is the attack that is refused."""
        self.assertEqual([0.0], bytes_to_tensor(file_of(one(), FOUR)).tolist())

    def test_every_truncation(self) -> None:
        """No prefix of a file is mistaken for a file."""
        written = tensor_to_bytes(torch.arange(7, dtype=torch.bfloat16))
        for nbytes in range(len(written)):
            with self.subTest(nbytes=nbytes), self.assertRaises(CorruptEntryError):
                bytes_to_tensor(written[:nbytes])

    @pytest.mark.thorough
    @settings(max_examples=300)
    @given(data=st.data())
    def test_changed_headers(self, data: st.DataObject) -> None:
        """A changed header gives a tensor of exactly the payload's size, or a refusal."""
        written = bytearray(tensor_to_bytes(torch.arange(6, dtype=torch.int32)))
        for _ in range(data.draw(st.integers(1, 4))):
            written[data.draw(st.integers(0, len(written) - 25))] = data.draw(st.integers(0, 255))
        try:
            actual = bytes_to_tensor(written)
        except CorruptEntryError:
            return

        self.assertEqual(24, actual.nbytes)


class TestRefusals(unittest.TestCase):
    def test_no_plain_bytes(self) -> None:
        """Sparse, meta, quantized (its scale would be lost), unnameable: the caller's error."""
        refused = {
            "sparse": torch.eye(3).to_sparse(),
            "mkldnn": torch.eye(3).to_mkldnn() if torch.backends.mkldnn.is_available() else None,
            "meta": torch.empty(3, device="meta"),
            "complex128": torch.zeros(3, dtype=torch.complex128),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer releases of torch call quantization deprecated
            refused["quantized"] = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        for name, t in refused.items():
            if t is None:
                continue
            with self.subTest(name), self.assertRaisesRegex(InputError, "convert"):
                tensor_to_bytes(t)

    def test_dtypes_of_other_releases(self) -> None:
        """A dtype that the installed safetensors lacks is the caller's error, in words."""
        lacking = [dtype for dtype in RECENT if dtype not in DTYPES]
        lacking += [t for t in (getattr(torch, "float4_e2m1fn_x2", None),) if t]
        for dtype in lacking:
            with self.subTest(dtype=dtype), self.assertRaisesRegex(InputError, "convert"):
                tensor_to_bytes(torch.empty(2, dtype=dtype))
