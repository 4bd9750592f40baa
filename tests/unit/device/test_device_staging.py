from __future__ import annotations

import unittest
from typing import Any
from unittest import mock

import pytest
import torch

from helpers import DirectoryTest, bits, keys_of, noise, save_chunk
from vua.device.paged import PagedCache, slots_of
from vua.device.staging import Staging
from vua.errors import InputError, LayoutError
from vua.format.identity import Identity
from vua.format.layout import KVLayout, Shard
from vua.store.namespace import Namespace

LAYOUT = KVLayout(layers=3, kv_heads=4, k_dim=8, v_dim=8, dtype="BF16", chunk_tokens=8)
SHARD = Shard(0, 3, 1, 3)
BLOCK, BLOCKS = 4, 13
NEEDS_CUDA = unittest.skipUnless(torch.cuda.is_available(), "needs a CUDA device")


def engine(device: str, seed: int) -> tuple[torch.Tensor, PagedCache]:
    """A rank's cache: all layers in one allocation, K and V fused, full of noise."""
    memory = noise(3, BLOCKS, SHARD.heads, BLOCK, 16, dtype=torch.bfloat16, seed=seed).to(device)
    return memory, PagedCache.of(memory, "LBHNC")


class StagingTest(DirectoryTest):
    """What goes out of one cache into files comes back into another one."""

    device = "cpu"

    def setUp(self) -> None:
        super().setUp()
        label = Identity(model="staging", kv_dtype="BF16", chunk_tokens=8)
        self.store = Namespace.create(self.root, label, [LAYOUT]).stores[0]
        self.keys = keys_of(range(32), 8)

    def staging(self, paged: PagedCache, *, chunks: int = 2, limit: int = 2) -> Staging:
        """A staging that is closed when the test ends."""
        staging = Staging([paged], LAYOUT, SHARD, chunks=chunks, limit=limit)
        self.addCleanup(staging.close)
        return staging

    def save_all(self, staging: Staging, ids: list[int]) -> None:
        """Store the four chunks, two at a time."""
        for at in (0, 2):
            staged = staging.take()
            fence = staging.save([staged], [slots_of(ids, BLOCK, 8 * at, 8 * at + 16).view(2, 8)])
            fence.wait()
            for place in (0, 1):
                memory = staged.memory
                save_chunk(self.store, self.keys[at + place], memory, shard=SHARD, place=place)
            staging.give_back(staged)

    def test_there_and_back(self) -> None:
        """Saved tokens come back into other blocks of another cache, and nothing else."""
        memory, paged = engine(self.device, seed=1)
        other, other_paged = engine(self.device, seed=2)
        out_ids, in_ids = [3, 1, 12, 0, 5, 7, 2, 9], [4, 12, 11, 0, 1, 2, 3, 6]
        self.save_all(self.staging(paged), out_ids)
        staging = self.staging(other_paged)
        start, stop = 6, 27  # neither is the end of a chunk or block
        expected = other.cpu()
        for token in range(start, stop):
            source = memory[:, out_ids[token // BLOCK], :, token % BLOCK]
            expected[:, in_ids[token // BLOCK], :, token % BLOCK] = source.cpu()

        for at in (0, 2):
            staged = staging.take()
            loaded = self.store.load(self.keys[at : at + 2], staged.memory, target=SHARD)
            self.assertEqual(2, loaded.chunks)
            first = 8 * at
            slots = slots_of(in_ids, BLOCK, first, first + 16, wanted=(start, stop)).view(2, 8)
            fence = staging.load(staged, [slots])
            fence.wait()
            self.assertTrue(fence.passed())
            staging.give_back(staged)

        self.assertEqual(bits(expected), bits(other.cpu()))
        self.assertTrue(bits(engine("cpu", seed=2)[0]) != bits(expected))

    def test_layers_with_tables_of_their_own(self) -> None:
        """Layers may lie in caches with other block sizes and other blocks; a fault moves none."""
        memory, paged = engine(self.device, seed=1)
        other = noise(1, 9, SHARD.heads, 8, 16, dtype=torch.bfloat16, seed=9).to(self.device)
        first = PagedCache([array[:2] for array in paged.arrays], paged.layout)
        parts = [first, PagedCache.of(other, "LBHNC")]
        staging = Staging(parts, LAYOUT, SHARD, chunks=1, limit=1)
        self.addCleanup(staging.close)
        staged = staging.take()

        out = [slots_of([3, 1], BLOCK, 0, 8).view(1, 8), slots_of([7], 8, 0, 8).view(1, 8)]
        staging.save([staged], out).wait()

        near = memory[:2, [3, 1]].permute(2, 0, 1, 3, 4).flatten(2, 3).cpu()  # [H, L, T, C]
        whole = torch.cat([near, other[:, 7].transpose(0, 1).cpu()], dim=1)
        k, v = (bits(array[0]) for array in staged.arrays)
        self.assertEqual([bits(whole[..., :8]), bits(whole[..., 8:])], [k, v])
        back = [slots_of([0, 2], BLOCK, 0, 8).view(1, 8), slots_of([4], 8, 0, 8).view(1, 8)]
        expected, expected_other = memory.cpu(), other.cpu()
        before = [bits(expected), bits(expected_other)]
        with self.assertRaisesRegex(InputError, "slot 72"):
            staging.load(staged, [back[0], back[1] + 33])
        self.assertEqual(before, [bits(memory.cpu()), bits(other.cpu())])
        staging.load(staged, back).wait()
        expected[:2, [0, 2]] = expected[:2, [3, 1]]
        expected_other[:, 4] = expected_other[:, 7]
        self.assertEqual(
            [bits(expected), bits(expected_other)], [bits(memory.cpu()), bits(other.cpu())]
        )

    def test_bounded_and_reused(self) -> None:
        """No more buffers than the limit are lent; what comes back is lent again."""
        staging = self.staging(engine(self.device, seed=1)[1], limit=2)
        first, second = staging.take(), staging.take()
        self.assertIsNotNone(first)
        self.assertIsNot(first, second)
        self.assertIsNone(staging.take())

        staging.give_back(second)

        self.assertIs(second, staging.take())
        staging.close()
        staging.give_back(first)
        self.assertIsNone(staging.take())

    def test_little_room_on_the_device(self) -> None:
        """Where it has no room for all buffers there are fewer of them."""
        empty, asked = torch.empty, list[int]()

        def little(room: Any, *rest: Any, **settings: Any) -> Any:  # it asks for slots first
            if isinstance(room, tuple):
                asked.append(room[1])
                if room[1] > 3:
                    raise torch.OutOfMemoryError
            return empty(room, *rest, **settings)

        paged = engine(self.device, seed=1)[1]
        for limit, wanted, left in ((12, [12, 6, 3], 3), (5, [5, 2], 2)):
            asked.clear()
            with mock.patch.object(torch, "empty", little):
                staging = Staging([paged], LAYOUT, SHARD, chunks=1, limit=limit)
            self.addCleanup(staging.close)
            self.assertEqual((wanted, left, left), (asked, staging.limit, staging.left))
            buffers = [staging.take() for _ in range(left)]
            self.assertEqual((left, None), (len(set(buffers)), staging.take()))

    def test_refused(self) -> None:
        """A cache that is not the shard, and slots that do not fit a buffer, are refused."""
        memory, paged = engine(self.device, seed=1)
        for shard in (Shard(0, 3, 0, 4), Shard(0, 2, 1, 3)):
            with self.subTest(shard=shard), self.assertRaises(LayoutError):
                Staging([paged], LAYOUT, shard, chunks=1, limit=1)
        staging = self.staging(paged)
        staged, before = staging.take(), bits(memory.cpu())
        for slots in (torch.zeros(3, 8), torch.zeros(0, 8), torch.zeros(8), torch.zeros(1, 7)):
            with self.subTest(shape=slots.shape), self.assertRaisesRegex(InputError, "1 to 2 chun"):
                staging.load(staged, [slots.long()])
        with self.assertRaisesRegex(InputError, "2 parts"):
            staging.load(staged, [torch.zeros(1, 8).long()] * 2)
        with self.assertRaisesRegex(InputError, "slot 52 is not"):
            staging.load(staged, [torch.full((1, 8), BLOCKS * BLOCK)])
        self.assertEqual(before, bits(memory.cpu()))


@pytest.mark.gpu
@NEEDS_CUDA
class GPUStagingTest(StagingTest):
    """The same on a GPU, and the order of what is queued there."""

    device = "cuda:0"

    def test_save_is_before_what_follows(self) -> None:
        """A block that the engine overwrites right after `save` is saved as it was before."""
        memory, paged = engine(self.device, seed=1)
        expected = bits(memory[:, :2, :, :, :8].permute(2, 0, 1, 3, 4).cpu())
        staging = self.staging(paged)
        staged = staging.take()
        torch.cuda.synchronize()
        final = torch.randn(memory.shape, device=self.device, dtype=memory.dtype)
        changed = memory.clone()
        memory.zero_()
        torch.cuda._sleep(200_000_000)  # the engine is computing...
        memory.copy_(changed)  # ...and writes the blocks late

        fence = staging.save([staged], [slots_of([0, 1], BLOCK, 0, 8).view(1, 8)])
        memory.copy_(final)
        fence.wait()

        self.assertEqual(expected, bits(staged.arrays[0][0]))
        torch.cuda.synchronize()
        self.assertEqual(bits(final.cpu()), bits(memory.cpu()))

    def test_load_is_after_the_mark(self) -> None:
        """It passes when the engine has done with the blocks' last life, and not earlier."""
        memory, paged = engine(self.device, seed=1)
        staging = self.staging(paged)
        staged = staging.take()
        staged.bytes[:] = 7
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        memory.zero_()

        mark = staging.mark()
        self.assertFalse(mark.passed())
        mark.wait()
        staging.load(staged, [slots_of([0, 1], BLOCK, 0, 8).view(1, 8)]).wait()

        found = memory.view(torch.uint8).cpu()
        self.assertEqual({7}, set(found[:, :2].flatten().tolist()))
        self.assertEqual({0}, set(found[:, 2:].flatten().tolist()))

    def test_join(self) -> None:
        """What the engine queues after a join is after the loads that were queued before it."""
        memory, paged = engine(self.device, seed=1)
        staging = self.staging(paged)
        staged = staging.take()
        staged.bytes[:] = 7
        torch.cuda.synchronize()
        with staging.aside():
            torch.cuda._sleep(200_000_000)

        staging.load(staged, [slots_of([0, 1], BLOCK, 0, 8).view(1, 8)])
        staging.join()
        memory.zero_()

        torch.cuda.synchronize()
        self.assertEqual({0}, set(memory.view(torch.uint8).cpu().flatten().tolist()))

    def test_pinned(self) -> None:
        """Buffers are page-locked while the staging is open."""
        staging = self.staging(engine(self.device, seed=1)[1])
        staged = staging.take()

        self.assertTrue(torch.from_numpy(staged.bytes).is_pinned())
        staging.give_back(staged)
        staging.close()
        self.assertFalse(torch.from_numpy(staged.bytes).is_pinned())
