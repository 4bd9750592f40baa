from __future__ import annotations

import doctest
import random
import unittest
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from unittest import mock

import pytest
import torch
from forms import HAS_TRITON, NEEDS_TRITON, compiled, triton_kernels

import vua.device.paged
from helpers import bits, has_native, noise
from vua.device.paged import (
    Job,
    Move,
    PagedCache,
    choose,
    gather,
    move_on_cpu,
    proves,
    scatter,
    slots_of,
)
from vua.device.paged import move as torch_move
from vua.errors import InputError, LayoutError
from vua.serdes import DTYPES

LAYERS, BLOCKS, SLOTS, HEADS, DIM = 2, 5, 4, 2, 12
CPU = torch.device("cpu")

RowOf = Callable[[int, int, int, int, int], torch.Tensor]
"""Where the test says that a row lies: (layer, array, block, slot, head) -> its elements."""


@dataclass
class Engine:
    """An engine's cache: its whole memory, what it hands over, and the test's own idea of it."""

    memory: list[torch.Tensor]
    layers: torch.Tensor | Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]]
    axes: str
    row: RowOf
    dims: tuple[int, ...] = (DIM, DIM)
    heads: int = HEADS
    k_dim: int | None = None

    @property
    def paged(self) -> PagedCache:
        return PagedCache.of(self.layers, self.axes, k_dim=self.k_dim)


def made(
    order: str, axes: str, dims: tuple[int, ...] = (DIM, DIM), heads: int = HEADS
) -> Callable[..., Engine]:
    """Let an engine have tensors whose memory has axes in this order, and views with others."""

    def make(dtype: torch.dtype, device: torch.device = CPU) -> Engine:
        sizes = {"L": LAYERS, "B": BLOCKS, "2": 2, "N": SLOTS, "H": heads, "C": sum(dims)}
        sizes["N"] *= 1 if "B" in order else BLOCKS
        is_pair = len(dims) == 2 and not {"2", "C"} & {*order}
        memory = [
            noise(*((sizes | {"D": dim})[axis] for axis in order), dtype=dtype, seed=dim).to(device)
            for dim in (dims if is_pair else dims[:1])
        ]
        seen = axes if "L" in axes else f"L{axes}"
        views = [one.permute([order.index(axis) for axis in seen]) for one in memory]
        layers = list(zip(*views, strict=True)) if is_pair else list(views[0])

        def row(lay: int, a: int, b: int, n: int, h: int) -> torch.Tensor:
            n += 0 if "B" in order else b * SLOTS
            where = {"L": lay, "2": a, "B": b, "N": n, "H": h}
            found = memory[a * is_pair][tuple(where[axis] for axis in order[:-1])]
            return found.split(dims)[a] if "C" in order else found

        k_dim = dims[0] if "C" in order else None
        return Engine(memory, views[0] if "L" in axes else layers, axes, row, dims, heads, k_dim)

    return make


def cross_layer(dtype: torch.dtype, device: torch.device = CPU) -> Engine:
    """One int8 allocation whose blocks hold all layers, and padding; layers are views of it."""
    size = HEADS * SLOTS * 2 * DIM
    stride = LAYERS * size + 8
    memory = noise(BLOCKS * stride * dtype.itemsize, dtype=torch.int8).to(device)
    shape, strides = (BLOCKS, HEADS, SLOTS, 2 * DIM), (stride, SLOTS * 2 * DIM, 2 * DIM, 1)
    typed = memory.view(dtype)
    layers = [typed.as_strided(shape, strides, lay * size) for lay in range(LAYERS)]
    blocks = typed.view(BLOCKS, stride)[:, : LAYERS * size].unflatten(1, (LAYERS, *shape[1:]))
    return Engine(
        [memory], layers, "BHNC", lambda lay, a, b, n, h: blocks[b, lay, h, n].split(DIM)[a]
    )


ENGINES: dict[str, Callable[..., Engine]] = {
    "fused": made("LBHNC", "BHNC"),
    "a V that is shorter than K, pages in NHD order": made("LBNHC", "BHNC", (DIM, 4)),
    "blocks of all layers": cross_layer,
    "one tensor": made("BLNHC", "BLNHC"),
    "flash": made("L2BNHD", "2BNHD"),
    "flash, HND": made("L2BHND", "2BHND"),
    "flashinfer": made("LB2NHD", "B2NHD"),
    "flashinfer, heads outside of slots in memory": made("LB2HND", "B2NHD"),
    "MLA: rows of 72 bytes or more that no power of two divides": made("LBND", "BND", (72,), 1),
    "MLA of vLLM 0.29, rows longer than one access": made("LBHND", "BHND", (288,), 1),
    "pairs with different row lengths": made("LBNHD", "BNHD", (DIM, 2 * DIM)),
    "pairs of long arrays": made("LNHD", "NHD"),
}
FUSED, LATENT = (made("LBHNC", "BHNC"), made("LBND", "BND", (72,), 1))


def draw_slots(chunks: int, tokens: int, seed: int, *, holes: bool = True) -> torch.Tensor:
    """Different slots in any order; some tokens have none."""
    draw = random.Random(seed)
    slots = torch.tensor(draw.sample(range(BLOCKS * SLOTS), chunks * tokens))
    if holes:
        slots[draw.sample(range(chunks * tokens), chunks * tokens // 4)] = -draw.randint(1, 9)
    return slots.view(chunks, tokens)


def copy_by_hand(
    engine: Engine, slots: torch.Tensor, chunks: list[torch.Tensor], *, store: bool
) -> None:
    """The obvious copy, one row after the other."""
    count, heads, layers, tokens, _ = chunks[0].shape
    places = product(range(count), range(heads), range(layers), range(tokens))
    for (c, h, lay, t), (array, chunk) in product(list(places), enumerate(chunks)):
        slot = int(slots[c, t])
        if slot < 0:
            continue
        row = engine.row(lay, array, slot // SLOTS, slot % SLOTS, h)
        source, target = (chunk[c, h, lay, t], row) if store else (row, chunk[c, h, lay, t])
        target.view(torch.uint8).copy_(source.view(torch.uint8))


class MovesTest(unittest.TestCase):
    """Both means of moving rows against the obvious copy; subclasses name the means."""

    move: Move | None = staticmethod(torch_move)
    device = CPU
    dtypes = tuple(DTYPES.values())
    sizes: tuple[tuple[int, int, bool], ...] = ((1, 7, False), (2, 5, True))
    """Chunks, tokens, and whether some tokens have no slot."""

    def assert_moves(
        self, make: Callable[..., Engine], dtype: torch.dtype, slots: torch.Tensor
    ) -> None:
        """Gather and scatter change what the obvious copy changes, in cache and chunks alike."""
        engine, expected = make(dtype, self.device), make(dtype)
        count, tokens = slots.shape
        for store in (False, True):
            given = chunks_of(engine, dtype, count, tokens)
            chunks = [chunk.to(self.device, copy=True) for chunk in given]
            wanted = [chunk.clone() for chunk in given]
            copy = scatter if store else gather

            copy(engine.paged, slots, *chunks, move=self.move)

            copy_by_hand(expected, slots, wanted, store=store)
            self.assertEqual([bits(t) for t in wanted], [bits(t.cpu()) for t in chunks])
            after = [bits(t.cpu()) for t in engine.memory]
            self.assertEqual([bits(t) for t in expected.memory], after)

    @pytest.mark.thorough
    def test_every_layout(self) -> None:
        """Every layout, with tokens left alone and without, in one chunk and in several."""
        for name, (count, tokens, holes) in product(ENGINES, self.sizes):
            slots = draw_slots(count, tokens, seed=count, holes=holes)
            with self.subTest(name, count=count, holes=holes):
                self.assert_moves(ENGINES[name], torch.bfloat16, slots)

    def test_every_dtype(self) -> None:
        """Every dtype's bits survive, NaNs included, whatever word they are moved by."""
        for dtype in self.dtypes:
            with self.subTest(dtype=dtype):
                self.assert_moves(cross_layer, dtype, draw_slots(1, 5, seed=dtype.itemsize))

    def test_cache_of_inference_mode(self) -> None:
        """A cache that was made in inference mode, as vLLM's is, can be written outside of it."""
        with torch.inference_mode():
            engine = FUSED(torch.bfloat16, self.device)
        before, slots = bits(engine.memory[0].cpu()), draw_slots(1, 5, seed=1, holes=False)
        chunks = [c.to(self.device) for c in chunks_of(engine, torch.bfloat16, 1, 5)]
        again = [torch.zeros_like(chunk) for chunk in chunks]

        scatter(engine.paged, slots, *chunks, move=self.move)
        gather(engine.paged, slots, *again, move=self.move)

        self.assertEqual([bits(c.cpu()) for c in chunks], [bits(c.cpu()) for c in again])
        self.assertTrue(before != bits(engine.memory[0].cpu()))

    def test_proof(self) -> None:
        """The trial that a kernel has to pass passes."""
        self.assertTrue(proves(self.move or choose(self.device), self.device))


def chunks_of(engine: Engine, dtype: torch.dtype, count: int, tokens: int) -> list[torch.Tensor]:
    """Arrays full of noise, cut from larger ones."""
    shape = (count, engine.heads, LAYERS, tokens + 1)
    return [noise(*shape, dim, dtype=dtype, seed=dim)[..., 1:, :] for dim in engine.dims]


@unittest.skipUnless(has_native(), "native code is not built: python3 dev.py build")
class HostTest(MovesTest):
    """What is chosen on a CPU: the loop in C."""

    move = staticmethod(move_on_cpu)

    def setUp(self) -> None:
        self.enterContext(mock.patch("vua.device.paged.move", side_effect=AssertionError))

    def test_proof(self) -> None:
        with mock.patch("vua.device.paged.move", torch_move):
            super().test_proof()

    def test_repeated_slots(self) -> None:
        """Where two tokens share a slot one of them is there, whole: PyTorch copies these."""
        paged = PagedCache.of(torch.zeros(1, 2, 1, SLOTS, 2 * 64, dtype=torch.int16), "LBHNC")
        k, v = torch.stack([torch.arange(1.0, 4)] * 64, 1).to(torch.int16).expand(2, 1, 1, 3, 64)
        never = mock.patch("vua.native.copy_strided", side_effect=AssertionError)
        with mock.patch("vua.device.paged.move", torch_move), never:
            scatter(paged, torch.tensor([1, 2, 1]), k, v)

        rows = paged.arrays[0][0][0, :, 0]
        self.assertEqual({2}, set(rows[2].tolist()))
        self.assertIn(set(rows[1].tolist()), ({1}, {3}))

    def test_blocks(self) -> None:
        """Slots as a request's blocks give them, cut by chunks and by what is wanted."""
        for name, make in ENGINES.items():
            slots = slots_of([3, 1, 2, 4, 0], SLOTS, 0, 20, wanted=(1, 18)).view(2, 10)
            with self.subTest(name):
                self.assert_moves(make, torch.bfloat16, slots)

    def test_without_native(self) -> None:
        """Without the loop in C Python copies the same."""
        with mock.patch("vua.native.entries.library", return_value=None):
            self.test_blocks()


@NEEDS_TRITON
class InterpretedKernelTest(MovesTest):
    """The Triton kernel, run by Triton's interpreter on the CPU."""

    dtypes = tuple(DTYPES[name] for name in ("BF16", "F8_E4M3", "F8_E5M2", "U8", "F32", "F64"))
    sizes = ((2, 5, True),)  # the interpreter takes milliseconds per program

    def setUp(self) -> None:
        self.move = triton_kernels(interpreted=True).move

    @pytest.mark.thorough
    def test_several_tiles(self) -> None:
        """Chunks longer than what one program moves are moved whole."""
        kernels = triton_kernels(interpreted=True)
        with mock.patch.object(kernels, "_TILE_NBYTES", 64):
            for make in (FUSED, LATENT):
                self.assert_moves(make, torch.bfloat16, draw_slots(2, 7, seed=3))

    @pytest.mark.thorough
    def test_same_as_torch(self) -> None:
        """Random sizes: kernel and PyTorch leave the same bytes, in both directions."""
        draw = random.Random(20)
        for case in range(12):
            heads, dim, blocks = draw.randint(1, 3), draw.choice((1, 3, 8, 20, 64, 80)), 9
            block_size, tokens = draw.choice((1, 2, 3, 16)), draw.randint(2, blocks)
            dtype = draw.choice((torch.uint8, torch.bfloat16, torch.float32))
            memory = noise(2, blocks, heads, block_size, 2 * dim, dtype=dtype, seed=case)
            slots = torch.tensor(draw.sample(range(blocks * block_size), tokens))
            with self.subTest(case=case, heads=heads, dim=dim, block_size=block_size, dtype=dtype):
                after = []
                for move in (self.move, torch_move):
                    mine = memory.clone()
                    k, v = noise(2, heads, 2, tokens, dim, dtype=dtype, seed=case)
                    paged = PagedCache.of(mine, "LBHNC")
                    gather(paged, slots, k, v, move=move)
                    scatter(paged, slots.flip(0), k, v, move=move)
                    after.append([bits(t) for t in (mine, k, v)])

                self.assertEqual(*after)
                self.assertTrue(bits(memory) != after[0][0])

    def test_compiles_for_hopper(self) -> None:
        """The kernel compiles without a GPU, and where it may, it takes 16 bytes per access."""
        longer = dict.fromkeys(("K_ROW", "V_ROW"), 144) | {
            "K_WIDTH": 16,
            "V_WIDTH": 16,
            "TOKENS": 16,
        }
        kernel = triton_kernels(interpreted=False).move_kernel
        for sizes in (HOPPER_SIZES, HOPPER_SIZES | longer):  # rows of 256 bytes, and of 1152
            with self.subTest(sizes=sizes):
                ptx = compiled(kernel, sizes, pointers=("table", "slots", "k", "v"))
                self.assertIn("ld.global.v2.b64", ptx)
                self.assertIn("st.global.v2.b64", ptx)


@pytest.mark.gpu
@unittest.skipUnless(torch.cuda.is_available(), "needs a CUDA device")
class GPUMovesTest(MovesTest):
    """What is chosen on a GPU (the Triton kernel, if Triton is there), on the GPU."""

    device = torch.device("cuda:0")

    def setUp(self) -> None:
        self.move = choose(self.device)

    def test_choice(self) -> None:
        """The kernel is used where Triton is installed."""
        expected = "vua.device.kernels" if HAS_TRITON else "vua.device.paged"
        self.assertEqual(expected, choose(self.device).__module__)


class NegativeControlTest(unittest.TestCase):
    """Moves that are wrong in one way each are told from right ones."""

    def test_wrong_moves(self) -> None:
        """The trial refuses a move that shifts a token, forgets V, or writes slots it must not."""

        def shifted(job: Job, *, store: bool) -> None:
            torch_move(replace(job, slots=job.slots.roll(1)), store=store)

        def without_v(job: Job, *, store: bool) -> None:
            torch_move(replace(job, chunks=(job.chunks[0], job.chunks[0].clone())), store=store)

        def careless(job: Job, *, store: bool) -> None:
            torch_move(replace(job, slots=job.slots.clamp(min=0)), store=store)

        def wrong_way(job: Job, *, store: bool) -> None:
            torch_move(job, store=not store)

        for wrong in (shifted, without_v, careless, wrong_way):
            with self.subTest(wrong=wrong.__name__):
                self.assertFalse(proves(wrong, CPU))


class PagesTest(unittest.TestCase):
    """What is refused, and how it is said."""

    def test_bad_tensors(self) -> None:
        """Tensors that do not have the axes they are said to have are refused."""
        t = torch.zeros
        refused = (
            (("one tensor", "axis L"), t(9, 2, 4, 8), "BHNC", None),
            (("not describe a paged cache",), [t(9, 2, 4, 8)], "BHNX", None),
            (("not describe a paged cache",), [t(9, 2, 4, 8)], "BHDC", None),
            (("not describe a paged cache",), [t(9, 2, 4, 8)], "BNNC", None),
            (("shape (9, 4, 8)",), [t(9, 4, 8)], "BHNC", None),
            (("2 in axis 2",), [t(3, 9, 4, 2, 8)], "2BNHD", None),
            (("stride 1 in axis D",), [t(9, 4, 2, 8).transpose(2, 3)], "BNHD", None),
            (("do not overlap",), [t(1, 4, 2, 8).expand(9, 4, 2, 8)], "BNHD", None),
            (("found none",), [], "BHNC", None),
            (("one shape",), [t(9, 2, 4, 8), t(9, 2, 4, 6)], "BHNC", None),
            (("one shape",), [t(9, 2, 4, 8), t(9, 2, 4, 8).half()], "BHNC", None),
            (("16 bytes",), [t(9, 2, 4, 8, dtype=torch.complex128)], "BHNC", None),
            (("one element",), [t(9, 2, 4, 8)], "BHNC", 8),
            (("blocks, slots",), [t(0, 2, 4, 8)], "BHNC", None),
            (("pairs (K, V)",), [(t(9, 4, 2, 8),)], "BNHD", None),
            (("pairs (K, V)",), [(t(9, 4, 2, 8),) * 2], "BNHC", None),
            (("K and V differ",), [(t(9, 4, 2, 8), t(8, 4, 2, 8))], "BNHD", None),
            (("K and V differ",), [(t(9, 4, 2, 8), t(9, 4, 2, 8).half())], "BNHD", None),
        )
        for words, layers, axes, k_dim in refused:
            with self.subTest(words=words, axes=axes), self.assertRaises(LayoutError) as caught:
                PagedCache.of(layers, axes, k_dim=k_dim)
            for word in words:
                self.assertIn(word, str(caught.exception))

    def test_bad_moves(self) -> None:
        """Arguments that do not fit each other are refused, and nothing is copied."""
        paged = FUSED(torch.float16).paged
        k = torch.zeros(1, HEADS, LAYERS, 3, DIM, dtype=torch.float16)
        slots = torch.tensor([1, 2, 3])
        before = bits(paged.arrays[0][0])
        refused = (
            (LayoutError, "K alone", slots, k, None),
            (LayoutError, "V is", slots, k, k[..., 1:]),
            (LayoutError, "K is", slots, k[:, :1], k[:, :1]),
            (LayoutError, "bytes per element", slots, k.float(), k.float()),
            (LayoutError, "K is", slots, k[0, 0], k[0, 0]),
            (LayoutError, "gaps", slots, k, torch.zeros(*k.shape[:-1], 2 * DIM).half()[..., ::2]),
            (LayoutError, "on meta", slots, k.to("meta"), k.to("meta")),
            (InputError, "2 slots", slots[:2], k, k),
            (InputError, "int32", slots.int(), k, k),
            (InputError, f"slot {BLOCKS * SLOTS} is not", slots + BLOCKS * SLOTS - 3, k, k),
        )
        for error, words, *arguments in refused:
            for copy in (gather, scatter):
                with self.subTest(words=words), self.assertRaises(error) as caught:
                    copy(paged, *arguments)
                self.assertIn(words, str(caught.exception))
        self.assertEqual(before, bits(paged.arrays[0][0]))
        with self.assertRaisesRegex(LayoutError, "one latent"):
            gather(LATENT(torch.float16).paged, slots, k, k)


class DocumentationTest(unittest.TestCase):
    def test_examples(self) -> None:
        """The examples in the docstrings give what they say."""
        done = doctest.testmod(vua.device.paged)

        self.assertEqual((0, True), (done.failed, done.attempted > 0))


class SlotsTest(unittest.TestCase):
    """Slots of a request's tokens."""

    def test_against_the_obvious(self) -> None:
        """Tokens have the slots their blocks give them; others, and unwanted ones, -1."""
        ids = [7, 0, 3]
        for size, start, length, first in product((1, 4), (0, 1), (0, 1, 2, 3), (-2, 0, 1)):
            stop, wanted = start + length, (start + first, start + 2)
            expected = [
                ids[t // size] * size + t % size if max(0, wanted[0]) <= t < wanted[1] else -1
                for t in range(start, stop)
            ]
            if wanted[0] < 0:
                wanted = (0, wanted[1])
            with self.subTest(size=size, start=start, stop=stop, wanted=wanted):
                self.assertEqual(expected, slots_of(ids, size, start, stop, wanted=wanted).tolist())

    def test_refused(self) -> None:
        """A wanted token without a block is an error, an unwanted one is not."""
        self.assertEqual([22, 23, -1], slots_of([5], 4, 2, 5, wanted=(0, 4)).tolist())
        for arguments in (([5], 4, 2, 5), ([5], 0, 0, 1), ([5], 4, 3, 2), ([5, -1], 4, 0, 5)):
            with self.subTest(arguments=arguments), self.assertRaises(InputError):
                slots_of(*arguments)


HOPPER_SIZES = {
    "HEADS": 8, "LAYERS": 32, "BLOCK_SIZE": 16, "K_ROW": 32, "V_ROW": 32, "K_WIDTH": 32,
    "V_WIDTH": 32, "TOKENS": 64, "ALIGNED": True, "STORE": False,
}  # fmt: skip
