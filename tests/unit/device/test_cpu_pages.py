from __future__ import annotations

import importlib
import random
import sys
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from forms import column_form, shuffled_form

from helpers import has_native, native_code, noise
from vua import native
from vua.connector.cache_spec import UncachedError
from vua.device.paged import PagedKV, PageForm, fused_form, latent_form
from vua.errors import InputError, LayoutError
from vua.vllm.cache_spec import engine_writer, learn_cpu_form

SEED = 20251120
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.uint8)
HEADS, LAYERS, BLOCKS = 3, 5, 11


def words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(INTEGERS[tensor.element_size()])


def caches(order: str, form: PageForm, dtype: torch.dtype, blocks: int = BLOCKS) -> torch.Tensor:
    """All layers `[L, B, H, N, C]` in one allocation whose memory has the given order."""
    sizes = {"L": LAYERS, "B": blocks, "H": HEADS, "N": form.block_size, "C": form.width}
    memory = noise(*(sizes[axis] for axis in order), dtype=dtype, seed=SEED)
    return memory.permute([order.index(axis) for axis in "LBHNC"])


def scatter(
    pages: PagedKV, ids: list[int], start: int, k: torch.Tensor, v: torch.Tensor | None
) -> None:
    """Copy the tokens of one chunk into the cache."""
    pages.scatter_chunks(ids, start, k.shape[2], 0, k[None], None if v is None else v[None])


Make = Callable[[int, int], PageForm]


class Reference:
    """The obvious copy: each element from its place to its place."""

    def __init__(self, layers: list[torch.Tensor], form: PageForm, block_size: int) -> None:
        self.layers, self.form, self.block_size = layers, form, block_size

    def _places(self, ids: list[int], start: int, count: int, index: torch.Tensor) -> Any:
        token = torch.arange(start, start + count)
        slot = torch.tensor(ids)[token // self.block_size] * self.block_size
        slot += token % self.block_size
        places = index[slot % self.form.block_size]
        page = (slot // self.form.block_size)[:, None]
        return page, slice(None), places // self.form.width, places % self.form.width

    def gather(self, ids: list[int], start: int, count: int, index: torch.Tensor) -> torch.Tensor:
        """The chunk that holds these tokens, as integers."""
        places = self._places(ids, start, count, index)
        return torch.stack([words(one)[places].permute(2, 0, 1) for one in self.layers], dim=1)

    def scatter(self, ids: list[int], start: int, chunk: torch.Tensor, index: torch.Tensor) -> None:
        places = self._places(ids, start, chunk.shape[2], index)
        for number, layer in enumerate(self.layers):
            own = layer.view(INTEGERS[layer.element_size()])
            own[places] = words(chunk)[:, number].permute(1, 2, 0)


class PagedTestCase(unittest.TestCase):
    def run(self, result: unittest.TestResult | None = None) -> unittest.TestResult | None:
        """One test, with one thread: small copies on a busy machine wait for their threads."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return super().run(result)
        finally:
            torch.set_num_threads(threads)

    @contextmanager
    def native(self, *, wanted: bool) -> Iterator[None]:
        """Copy with the loop in C where there is a compiler, or without it."""
        with native_code("auto" if wanted else "off"):
            self.assertEqual(wanted and has_native(), native.library() is not None)
            yield

    def assert_same(self, expected: torch.Tensor, actual: torch.Tensor) -> None:
        self.assertTrue(torch.equal(words(expected), words(actual)), "bytes differ")

    def assert_moves(
        self,
        layers: list[torch.Tensor],
        memory: torch.Tensor,
        form: PageForm,
        *,
        block_size: int,
        tokens: tuple[int, int],
    ) -> None:
        """Gather and scatter do what the reference does, in the caches and around them."""
        start, count = tokens
        draw = random.Random(f"{SEED} {tokens}")
        blocks = layers[0].shape[0] * form.block_size // block_size
        ids = draw.sample(range(blocks), -(-(start + count) // block_size))
        pages, reference = PagedKV(layers, form, block_size), Reference(layers, form, block_size)
        shape = (layers[0].shape[1] if layers[0].dim() == 4 else 1, len(layers), count)
        seed = start * 1000 + count
        buffer = noise(4, *shape, form.k_index.shape[1], dtype=memory.dtype, seed=seed)
        k, v = buffer[1].clone(), buffer[2].clone() if form.v_index.shape[1] else None
        before = memory.clone()
        with self.native(wanted=bool(draw.getrandbits(1))):
            pages.gather(ids, start, count, k, v)
        self.assert_same(before, memory)
        self.assert_same(reference.gather(ids, start, count, form.k_index), k)
        if v is not None:
            self.assert_same(reference.gather(ids, start, count, form.v_index), v)
        k, v = buffer[1], None if v is None else buffer[2]
        with self.native(wanted=False):
            scatter(pages, ids, start, k, v)
        after = memory.clone()
        memory.copy_(before)
        with self.native(wanted=True):
            scatter(pages, ids, start, k, v)
        self.assert_same(after, memory)
        memory.copy_(before)
        reference.scatter(ids, start, k, form.k_index)
        if v is not None:
            reference.scatter(ids, start, v, form.v_index)
        self.assert_same(memory, after)


class MoveTest(PagedTestCase):
    @pytest.mark.thorough
    def test_every_form_dtype_and_block_size(self) -> None:
        """Tokens go to and from their places, and nothing else changes, for every combination."""
        forms: tuple[Make, ...] = (fused_form, column_form, shuffled_form, latent_form)
        for make, dtype, size in product(forms, DTYPES, (16, 32, 48, 128)):
            form = make(size, 8)
            for chunk in (16, 64) if size == 16 else (64,):
                with self.subTest(form=make.__name__, dtype=dtype, block=size, chunk=chunk):
                    memory = caches("LBHNC", form, dtype, blocks=9)
                    tokens = (chunk, chunk) if size != 48 else (chunk + 5, chunk)
                    self.assert_moves(list(memory), memory, form, block_size=size, tokens=tokens)

    def test_chunks_that_follow_each_other(self) -> None:
        """Several chunks at once, the first from its middle on, the last not to its end."""
        form, size, dtype = column_form(16, 8), 24, torch.bfloat16
        chunks = noise(2, 3, HEADS, LAYERS, size, 8, dtype=dtype, seed=SEED)
        for wanted, (skip, count) in product((True, False), ((0, 72), (5, 60), (23, 2), (4, 0))):
            with self.subTest(native=wanted, skip=skip, count=count), self.native(wanted=wanted):
                memory = caches("LBHNC", form, dtype)
                before, ids = memory.clone(), [7, 2, 9, 4, 0, 5]
                PagedKV(list(memory), form, 16).scatter_chunks(ids, 13, count, skip, *chunks)
                after = memory.clone()
                self.assertNotEqual(count > 0, torch.equal(words(before), words(after)))
                memory.copy_(before)
                reference = Reference(list(memory), form, 16)
                for half, index in zip(chunks, (form.k_index, form.v_index), strict=True):
                    tokens = half.permute(1, 2, 0, 3, 4).reshape(HEADS, LAYERS, 3 * size, 8)
                    reference.scatter(ids, 13, tokens[:, :, skip : skip + count], index)
                self.assert_same(memory, after)

    def test_places(self) -> None:
        """Any order in memory, layers at any distance, blocks of several neighbouring pages."""
        every, column = [*range(LAYERS)], (column_form, "LBHNC")
        orders = ("LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC", "LHBNC")
        chosen = (every, [0, 2, 4], [0, 1, 3, 4], every[::-1], [0, 3])
        forms: tuple[Make, ...] = (fused_form, shuffled_form, latent_form)
        for make, order, some, block, tokens in (
            *((*one, every, 16, (9, 50)) for one in product(forms, orders)),
            *((*column, some, 16, (5, 40)) for some in chosen),
            *((make, "LBHNC", every, 64, (50, 100)) for make in forms[:2]),
        ):
            with self.subTest(form=make.__name__, order=order, layers=some, block=block):
                form = make(16, 8)
                memory = caches(order, form, torch.bfloat16, blocks=12)
                layers = [memory[number] for number in some]
                self.assert_moves(layers, memory, form, block_size=block, tokens=tokens)

    def test_latent_pages_without_a_head_dimension(self) -> None:
        """MLA caches of three dimensions have one head and no V."""
        form = latent_form(16, 9)
        memory = caches("LBHNC", form, torch.bfloat16)[:, :, :1].contiguous()
        layers = list(memory[:, :, 0])
        k = torch.zeros(1, LAYERS, 20, 9, dtype=torch.bfloat16)
        PagedKV(layers, form, 16).gather([4, 2], 7, 20, k, None)
        self.assert_same(memory[:, 4, :, 7:].transpose(0, 1), k[:, :, :9])
        self.assert_same(memory[:, 2, :, :11].transpose(0, 1), k[:, :, 9:])


class RefusalTest(PagedTestCase):
    def setUp(self) -> None:
        self.form = fused_form(16, 8)
        self.memory = caches("LBHNC", self.form, torch.bfloat16)
        self.pages = PagedKV(list(self.memory), self.form, 16)
        self.k, self.v = torch.zeros(2, HEADS, LAYERS, 20, 8, dtype=torch.bfloat16)

    def test_tokens_that_are_not_there(self) -> None:
        """A range outside the table, or a block outside the cache, moves nothing."""
        before = self.memory.clone()
        for ids, start in (([1], 0), ([1, 2], 13), ([1, 2], -1), ([1, BLOCKS], 0), ([-1, 1], 0)):
            with self.subTest(ids=ids, start=start), self.assertRaises(InputError):
                scatter(self.pages, ids, start, self.k, self.v)
        self.assert_same(before, self.memory)

    def test_more_tokens_than_chunks(self) -> None:
        """Tokens that the chunks do not have are refused before anything is copied."""
        before = self.memory.clone()
        chunks = torch.zeros(2, 3, HEADS, LAYERS, 16, 8, dtype=torch.bfloat16)
        for skip, count in ((0, 49), (16, 33), (-1, 4), (2, -1)):
            with self.subTest(skip=skip, count=count), self.assertRaises(InputError):
                self.pages.scatter_chunks([1, 2, 3, 4], 0, count, skip, *chunks)
        with self.assertRaises(LayoutError):
            self.pages.scatter_chunks([1, 2, 3, 4], 0, 8, 0, chunks[0], chunks[1, :2])
        self.assert_same(before, self.memory)

    def test_chunks_that_do_not_fit(self) -> None:
        """A chunk of another shape or item size moves nothing."""
        before = self.memory.clone()
        for k, v in (
            (self.k, self.v[..., :7]),
            (self.k.float(), self.v),
            (self.k, None),
            (self.k, self.v[:, :, :19]),
            (self.k.to("meta"), self.v),
        ):
            with self.assertRaises(LayoutError):
                scatter(self.pages, [1, 2], 0, k, v)
        self.assert_same(before, self.memory)

    def test_caches_that_do_not_fit(self) -> None:
        """Caches that differ from the form, or from each other, are refused."""
        layers = list(self.memory)
        for wrong, size in (
            ([], 16),
            (layers, 24),
            ([layer[..., :15] for layer in layers], 16),
            ([layers[0], layers[1][:5]], 16),
            ([layers[0], layers[1].float()], 16),
            ([layer[None] for layer in layers], 16),
            ([layer.to("meta") for layer in layers], 16),
        ):
            with self.assertRaises(LayoutError):
                PagedKV(wrong, self.form, size)

    def test_forms_that_lose_elements(self) -> None:
        """A form with one place for two elements, or a place outside the page, cannot exist."""
        k, v = self.form.k_index, self.form.v_index
        for wrong in ((k, k), (k - 1, v), (k, v + 1)):
            with self.assertRaises(LayoutError):
                PageForm(*wrong, 16)


@contextmanager
def writer(write: object) -> Iterator[None]:
    """Put a function in the place of vLLM's writer."""
    with mock.patch("vua.vllm.cache_spec.engine_writer", return_value=write):
        yield


class FakeEngineTest(PagedTestCase):
    """What is learnt from writers that behave like no real one."""

    def test_learns_any_permutation(self) -> None:
        """A writer that scatters elements at random is learnt, element by element."""
        form = shuffled_form(32, 16)

        def write(cache: torch.Tensor, slots: torch.Tensor, *rows: torch.Tensor) -> None:
            for at, slot in enumerate(slots.tolist()):
                page = cache[slot // 32].view(cache.shape[1], -1)
                for index, some in zip((form.k_index, form.v_index), rows, strict=True):
                    page[:, index[slot % 32]] = some[at]

        for dtype in DTYPES[:3]:
            with writer(write):
                learnt = learn_cpu_form(dtype, 32, 16)
            self.assertTrue(torch.equal(form.k_index, learnt.k_index))
            self.assertTrue(torch.equal(form.v_index, learnt.v_index))

    def test_refuses_what_it_cannot_prove(self) -> None:
        """A writer that rounds, loses, disturbs, or depends on the block is not understood."""

        def plain(cache: torch.Tensor, slots: torch.Tensor, *rows: torch.Tensor) -> None:
            cache[slots // 32, :, slots % 32] = torch.cat(rows, dim=-1)

        def rounds(cache: torch.Tensor, slots: torch.Tensor, *rows: torch.Tensor) -> None:
            plain(cache, slots, *((row.float() * 1.01).to(row.dtype) for row in rows))

        def loses(cache: torch.Tensor, slots: torch.Tensor, *rows: torch.Tensor) -> None:
            plain(cache, slots, rows[0], rows[0])

        def disturbs(cache: torch.Tensor, slots: torch.Tensor, *rows: torch.Tensor) -> None:
            plain(cache, slots, *rows)
            if len(slots) < 32:
                cache[slots[0] // 32, 0, (slots[0] + 1) % 32, 0] = 0

        def depends(cache: torch.Tensor, slots: torch.Tensor, *rows: torch.Tensor) -> None:
            plain(cache, slots ^ (slots // 64), *rows)

        def raises(cache: torch.Tensor, slots: torch.Tensor, *rows: torch.Tensor) -> None:
            raise NotImplementedError("Unsupported CPU attention configuration")

        with writer(plain):
            learn_cpu_form(torch.bfloat16, 32, 16)
        for write in (rounds, loses, disturbs, depends, raises):
            with self.subTest(write.__name__), writer(write), self.assertRaises(UncachedError):
                learn_cpu_form(torch.bfloat16, 32, 16)

    def test_refuses_quantized_caches(self) -> None:
        """A cache of bytes is refused before anything is written."""
        for dtype in (torch.uint8, torch.float8_e4m3fn):
            with self.assertRaises(UncachedError):
                learn_cpu_form(dtype, 32, 16)

    def test_refuses_without_the_engine(self) -> None:
        """Without vLLM there is no form, and no other error."""
        with mock.patch.dict(sys.modules, {"vllm": None}), self.assertRaises(UncachedError):
            learn_cpu_form(torch.bfloat16, 32, 16)


@pytest.mark.vllm
@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class VllmTest(PagedTestCase):
    """vLLM's own operator is the truth."""

    def setUp(self) -> None:
        importlib.import_module("vllm._custom_ops")
        if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
            self.skipTest("this vLLM was built without CPU attention")

    def writers(self, dtype: torch.dtype, size: int, dim: int) -> Iterator[tuple[str | None, Any]]:
        """The choice of vLLM, and every packing that its writer has on this machine."""
        rows = torch.zeros(size, 1, dim, dtype=dtype)
        cache = torch.zeros(1, 1, size, 2 * dim, dtype=dtype)
        for isa in (None, "vec", "vec16", "amx", "neon", "vxe", "vsx", "rvv"):
            if isa in (None, "vec16") or size % 32 == 0:
                write = engine_writer(dtype, size, dim, isa)
                with suppress(RuntimeError):
                    write(cache, torch.arange(size), rows, rows)
                    yield isa, write

    @pytest.mark.thorough
    def test_same_bytes_as_the_engine(self) -> None:
        """Gather reads what vLLM wrote; scatter leaves the very bytes that vLLM would have."""
        sizes = ((16, 80), (32, 32), (32, 128), (48, 64), (64, 80), (128, 64))
        for dtype, (size, dim) in product(DTYPES[:3], sizes):
            for isa, write in self.writers(dtype, size, dim):
                with self.subTest(dtype=dtype, block=size, dim=dim, isa=isa):
                    form = learn_cpu_form(dtype, size, dim, isa)
                    theirs = caches("LBHNC", form, dtype, blocks=5)
                    ours, ids = theirs.clone(), [3, 0, 4]
                    tokens, start = size + size // 2, size // 3
                    rows = noise(2, LAYERS, tokens, HEADS, dim, dtype=dtype, seed=SEED)
                    slots = torch.arange(start, start + tokens)
                    slots = torch.tensor(ids)[slots // size] * size + slots % size
                    for number, layer in enumerate(theirs):
                        write(layer, slots, *rows[:, number])
                    chunks = rows.permute(0, 3, 1, 2, 4)
                    back = torch.zeros_like(chunks).contiguous()
                    PagedKV(list(theirs), form, size).gather(ids, start, tokens, *back)
                    self.assert_same(chunks, back)
                    scatter(PagedKV(list(ours), form, size), ids, start, *chunks)
                    self.assert_same(theirs, ours)

    def test_unsupported_variant(self) -> None:
        """A variant this machine does not have is an unknown form."""
        with self.assertRaises(UncachedError):
            learn_cpu_form(torch.bfloat16, 32, 64, "no such isa")
