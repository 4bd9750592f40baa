from __future__ import annotations

import subprocess
import sys
import unittest
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers import bits, noise
from vua.device.paged import PagedCache
from vua.lmcache.gpu_connector import (
    GPUConnectorInterface,
    MemoryFormat,
    MemoryObj,
    VLLMNestedTupleGPUConnector,
    VLLMPagedMemGPUConnector,
    VLLMPagedMemGPUConnectorV2,
)

LAYERS, BLOCKS, SLOTS, HEADS, SIZE = 3, 7, 4, 2, 8
HIDDEN, TOKENS = HEADS * SIZE, 19
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
SLOT_MAPPING = torch.randperm(BLOCKS * SLOTS, generator=torch.Generator().manual_seed(0))[:TOKENS]

RowOf = Callable[[int, int, int], torch.Tensor]
"""Where the test says that a token lies: (array, layer, token) -> view of its elements."""


class Case:
    """One connector with a cache that it can serve, full of noise."""

    def __init__(
        self,
        connector: GPUConnectorInterface,
        memory: list[torch.Tensor],
        kvcaches: Sequence[Any],
        row: RowOf,
        fmt: MemoryFormat = MemoryFormat.KV_BLOB,
    ) -> None:
        self.connector, self.memory, self.kvcaches, self.row = connector, memory, kvcaches, row
        self.fmt = fmt

    def blob(self, tokens: int, dtype: torch.dtype, seed: int = 5) -> MemoryObj:
        """A memory object for some tokens, full of noise."""
        shape = self.connector.get_shape(tokens)
        return MemoryObj(noise(*shape, dtype=dtype, seed=seed), self.fmt)

    def arguments(self, slots: torch.Tensor = SLOT_MAPPING) -> dict[str, Any]:
        """What each call is given; connectors that need no slots get them all the same."""
        return {"kvcaches": self.kvcaches, "slot_mapping": slots, "req_id": "ignored"}

    @property
    def bytes(self) -> list[bytes]:
        return [bits(tensor.cpu()) for tensor in self.memory]


def nested(dtype: torch.dtype, device: str = "cpu") -> Case:
    """(K, V) of the whole sequence, heads apart from elements."""
    memory = noise(LAYERS, 2, TOKENS + 3, HEADS, SIZE, dtype=dtype).to(device)
    connector = VLLMNestedTupleGPUConnector(HIDDEN, LAYERS)
    return Case(
        connector,
        [memory],
        tuple((layer[0], layer[1]) for layer in memory),
        lambda a, lay, t: memory[lay, a, t],
    )


def _paged(kind: type, axes: str, *shape: int, **more: Any) -> Callable[..., Case]:
    """Caches of these axes, whose rows `test_device` compares; ``BNHD``: pairs of K and V."""

    def make(dtype: torch.dtype, device: str = "cpu") -> Case:
        memory = noise(LAYERS, *shape, dtype=dtype).to(device)
        caches: list[Any] = [tuple(one) for one in memory] if axes == "BNHD" else list(memory)
        arrays = PagedCache.of(caches, axes).arrays

        def row(a: int, lay: int, t: int) -> torch.Tensor:
            slot = int(SLOT_MAPPING[t])
            return arrays[a][lay][slot // SLOTS, slot % SLOTS]

        fmt = MemoryFormat.KV_MLA_FMT if more else MemoryFormat.KV_BLOB
        return Case(kind(HIDDEN, LAYERS, **more), [memory], caches, row, fmt)

    make.__name__ = f"{kind.__name__} {axes}"
    return make


PAIRS = (2, BLOCKS, SLOTS, HEADS, SIZE)
paged = _paged(VLLMPagedMemGPUConnector, "BNHD", *PAIRS)
paged_v2 = _paged(VLLMPagedMemGPUConnectorV2, "BNHD", *PAIRS)
flash = _paged(VLLMPagedMemGPUConnectorV2, "2BNHD", *PAIRS)
flashinfer = _paged(VLLMPagedMemGPUConnectorV2, "B2NHD", BLOCKS, 2, SLOTS, HEADS, SIZE)
fused = _paged(VLLMPagedMemGPUConnectorV2, "BHNC", BLOCKS, HEADS, SLOTS, 2 * SIZE)
latent = _paged(VLLMPagedMemGPUConnectorV2, "BND", BLOCKS, SLOTS, HIDDEN, use_mla=True)
CASES = (nested, paged, paged_v2, flash, flashinfer, fused, latent)


class ConformanceTest(unittest.TestCase):
    """The contract, for every connector, layout and dtype."""

    device = "cpu"

    def test_from_gpu(self) -> None:
        """The memory object gets exactly the tokens of [start, end); the cache stays as it is."""
        for make, dtype, (start, end) in product(CASES, DTYPES, ((0, TOKENS), (5, 11), (3, 3))):
            with self.subTest(make=make.__name__, dtype=dtype, start=start):
                case = make(dtype, self.device)
                before, obj = case.bytes, case.blob(end - start, dtype)

                case.connector.from_gpu(obj, start, end, **case.arguments())

                arrays, layers, tokens, _ = obj.tensor.shape
                for a, lay, t in product(range(arrays), range(layers), range(tokens)):
                    row = case.row(a, lay, start + t).cpu()
                    self.assertEqual(bits(row), bits(obj.tensor[a, lay, t]))
                self.assertEqual(before, case.bytes)
                self.assertEqual(case.fmt, obj.metadata.fmt)

    def test_to_gpu(self) -> None:
        """Exactly the slots of [start, end) get the memory object's rows; nothing else changes."""
        for make, dtype, (start, end) in product(CASES, DTYPES, ((0, TOKENS), (5, 11))):
            with self.subTest(make=make.__name__, dtype=dtype, start=start):
                case, expected = make(dtype, self.device), make(dtype)
                obj = case.blob(end - start, dtype)
                given = bits(obj.tensor)

                case.connector.to_gpu(obj, start, end, **case.arguments())

                arrays, layers, tokens, _ = obj.tensor.shape
                for a, lay, t in product(range(arrays), range(layers), range(tokens)):
                    row = expected.row(a, lay, start + t).view(torch.uint8)
                    row.copy_(obj.tensor[a, lay, t].view(torch.uint8).view(row.shape))
                self.assertEqual(expected.bytes, case.bytes)
                self.assertTrue(case.bytes != make(dtype).bytes)
                self.assertEqual(given, bits(obj.tensor))

    def test_batched(self) -> None:
        """The batched pair does what the single calls do, range by range."""
        starts, ends = [0, 6, 12], [6, 12, 17]
        for make in CASES:
            with self.subTest(make=make.__name__):
                case, single = make(torch.bfloat16, self.device), make(torch.bfloat16)
                objs = [case.blob(e - s, torch.bfloat16) for s, e in zip(starts, ends, strict=True)]
                whole = single.blob(17, torch.bfloat16)
                single.connector.from_gpu(whole, 0, 17, **single.arguments())

                case.connector.batched_from_gpu(objs, starts, ends, **case.arguments())

                joined = torch.cat([obj.tensor for obj in objs], dim=2)
                self.assertEqual(bits(whole.tensor), bits(joined))
                before = case.bytes
                for tensor in case.memory:
                    tensor.view(torch.uint8).add_(1)
                case.connector.batched_to_gpu(objs, starts, ends, **case.arguments())
                for tensor in case.memory:
                    tensor.view(torch.uint8).sub_(1)
                case.connector.to_gpu(whole, 0, 17, **case.arguments())
                self.assertEqual(before, case.bytes)


class ErrorsTest(unittest.TestCase):
    """The documented errors, before anything is copied."""

    def test_missing_arguments(self) -> None:
        """Without kvcaches, or without slot_mapping where it is needed, a ValueError names it."""
        for make in CASES:
            for name in ("kvcaches", "slot_mapping"):
                if make is nested and name == "slot_mapping":
                    continue
                case = make(torch.float16)
                arguments = case.arguments()
                arguments.pop(name)
                for method in (case.connector.from_gpu, case.connector.to_gpu):
                    with self.subTest(make=make.__name__, name=name):
                        obj, before = case.blob(4, torch.float16), case.bytes
                        given = bits(obj.tensor)
                        with self.assertRaisesRegex(ValueError, f"'{name}' is missing"):
                            method(obj, 0, 4, **arguments)
                        self.assertEqual((given, before), (bits(obj.tensor), case.bytes))

    def test_no_tensor(self) -> None:
        """A memory object without a tensor is an AssertionError."""
        for make in CASES:
            case = make(torch.float16)
            for method in (case.connector.from_gpu, case.connector.to_gpu):
                with self.subTest(make=make.__name__), self.assertRaises(AssertionError):
                    method(MemoryObj(None, case.fmt), 0, 4, **case.arguments())

    def test_other_format(self) -> None:
        """A memory object of another format is a ValueError; V2's from_gpu sets the format."""
        for make in CASES:
            case = make(torch.float16)
            obj = case.blob(4, torch.float16)
            obj.metadata.fmt = MemoryFormat.UNDEFINED
            with self.subTest(make=make.__name__):
                with self.assertRaisesRegex(ValueError, "format is .*UNDEFINED"):
                    case.connector.to_gpu(obj, 0, 4, **case.arguments())
                if isinstance(case.connector, VLLMPagedMemGPUConnectorV2):
                    case.connector.from_gpu(obj, 0, 4, **case.arguments())
                    self.assertEqual(case.fmt, obj.metadata.fmt)
                else:
                    with self.assertRaisesRegex(ValueError, "expected KV_BLOB"):
                        case.connector.from_gpu(obj, 0, 4, **case.arguments())

    def test_what_does_not_fit(self) -> None:
        """Sizes that contradict each other are a ValueError, and nothing is copied."""
        case = paged_v2(torch.float16)
        good = case.arguments()
        whole = case.blob(4, torch.float16)
        k = case.kvcaches[0][0]
        refused: tuple[tuple[str, MemoryObj, int, int, dict[str, Any]], ...] = (
            ("memory object is", whole, 0, 5, good),
            ("memory object is", whole, -1, 3, good),
            ("memory object is", whole, 5, 1, good),
            ("slot_mapping is", whole, 0, 4, good | {"slot_mapping": SLOT_MAPPING[:3]}),
            ("slot_mapping is", whole, 0, 4, good | {"slot_mapping": SLOT_MAPPING.int()}),
            ("slot_mapping is", whole, 0, 4, good | {"slot_mapping": SLOT_MAPPING[None]}),
            ("slot 28", whole, 0, 4, good | {"slot_mapping": torch.full((4,), 28)}),
            ("2 layers", whole, 0, 4, good | {"kvcaches": case.kvcaches[:2]}),
            ("elements in", MemoryObj(whole.tensor.bfloat16()), 0, 4, good),
            ("elements in", whole, 0, 4, good | {"kvcaches": [(k[..., 1:], k[..., 1:])] * LAYERS}),
            ("a pair", whole, 0, 4, good | {"kvcaches": [(k,)] * LAYERS}),
            ("unknown layout", whole, 0, 4, good | {"kvcaches": [k[..., :6]] * LAYERS}),
            ("be more", whole, 0, 4, good | {"kvcaches": [k.new_zeros(2, 2, 4, 2, 8)] * LAYERS}),
        )
        before = case.bytes
        for words, obj, start, end, arguments in refused:
            for method in (case.connector.from_gpu, case.connector.to_gpu):
                with self.subTest(words=words), self.assertRaisesRegex(ValueError, words):
                    method(obj, start, end, **arguments)
        self.assertEqual(before, case.bytes)
        for make, caches in ((nested, [(k[:3], k[:3])] * LAYERS), (paged, [k] * LAYERS)):
            other = make(torch.float16)
            with self.subTest(make=make.__name__), self.assertRaises(ValueError):
                other.connector.from_gpu(whole, 0, 4, **(good | {"kvcaches": caches}))

    def test_constructor(self) -> None:
        """Sizes below one, and use_gpu without its three companions, are a ValueError."""
        for kind in (VLLMNestedTupleGPUConnector, VLLMPagedMemGPUConnector):
            with self.subTest(kind=kind.__name__), self.assertRaises(ValueError):
                kind(0, 3)
        with self.assertRaisesRegex(ValueError, "dtype, device"):
            VLLMPagedMemGPUConnectorV2(HIDDEN, LAYERS, use_gpu=True, chunk_size=4)
        with self.assertRaises(TypeError):
            GPUConnectorInterface()


class V2Test(unittest.TestCase):
    """What only today's connector has."""

    def test_shapes(self) -> None:
        """Memory objects are [2, layers, tokens, hidden]; of MLA, one array."""
        for make in CASES:
            expected = torch.Size([1 if make is latent else 2, LAYERS, 9, HIDDEN])
            with self.subTest(make=make.__name__):
                self.assertEqual(expected, make(torch.float16).connector.get_shape(9))

    def test_cached_tokens(self) -> None:
        """Tokens that the engine has already are not written."""
        for cached, first in ((0, 4), (4, 4), (7, 7), (10, 10), (99, 10)):
            with self.subTest(cached=cached):
                case, expected = fused(torch.float16), fused(torch.float16)
                obj = case.blob(6, torch.float16)

                case.connector.to_gpu(obj, 4, 10, vllm_cached_tokens=cached, **case.arguments())

                if first < 10:
                    rest = MemoryObj(obj.tensor[:, :, first - 4 :].contiguous())
                    expected.connector.to_gpu(rest, first, 10, **expected.arguments())
                self.assertEqual(expected.bytes, case.bytes)
        self.assertEqual(TOKENS, len(SLOT_MAPPING))
        self.assertTrue((SLOT_MAPPING >= 0).all())

    def test_remembered_caches(self) -> None:
        """Caches given in advance serve calls that pass none."""
        case = flash(torch.float16)
        obj = case.blob(4, torch.float16)
        case.connector.initialize_kvcaches_ptr(kvcaches=case.kvcaches)
        case.connector.initialize_kvcaches_ptr()

        case.connector.from_gpu(obj, 0, 4, slot_mapping=SLOT_MAPPING)

        self.assertEqual(bits(case.row(1, 2, 3)), bits(obj.tensor[1, 2, 3]))

    def test_fp8_by_other_names(self) -> None:
        """An engine may call its fp8 cache uint8."""
        case = fused(torch.uint8)
        obj = case.blob(4, torch.float8_e4m3fn)

        case.connector.from_gpu(obj, 0, 4, **case.arguments())

        self.assertEqual(bits(case.row(0, 1, 2)), bits(obj.tensor[0, 1, 2]))

    def test_objects_of_others(self) -> None:
        """Memory objects that are not ours are served, and keep their own kind of format."""

        class TheirFormat(Enum):
            UNDEFINED = 0
            KV_2LTD = 1

        case = fused(torch.float16)
        theirs: Any = SimpleNamespace(
            tensor=torch.zeros(case.connector.get_shape(4), dtype=torch.float16),
            metadata=SimpleNamespace(fmt=TheirFormat.UNDEFINED),
        )
        case.connector.from_gpu(theirs, 0, 4, **case.arguments())
        before = case.bytes
        case.connector.to_gpu(theirs, 0, 4, **case.arguments())

        self.assertIs(TheirFormat.KV_2LTD, theirs.metadata.fmt)
        self.assertEqual(before, case.bytes)

    @pytest.mark.thorough
    def test_alone(self) -> None:
        """The connectors need no LMCache, import no engine, and of VUA what copies tensors."""
        script = (
            "import sys, vua.lmcache.gpu_connector\n"
            "print(sorted({'lmcache', 'vllm', 'sglang', 'transformers'} & set(sys.modules)))\n"
            "print(*sorted(n for n, m in sys.modules.items()"
            " if n.startswith('vua.') and not hasattr(m, '__path__')))"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )

        engines, modules = done.stdout.splitlines()
        self.assertEqual("[]", engines)
        needed = "device.paged errors lmcache.gpu_connector"
        self.assertEqual([f"vua.{name}" for name in needed.split()], modules.split())


@pytest.mark.gpu
@unittest.skipUnless(torch.cuda.is_available(), "needs a CUDA device")
class GPUConformanceTest(ConformanceTest):
    """The same with the engine's cache on a GPU and memory objects in host memory."""

    device = "cuda:0"
