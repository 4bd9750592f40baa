"""Files straight into device memory: movers, the trial, checksums there, reads of chunks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import xxhash
from forms import HAS_TRITON, NEEDS_TRITON, compiled, triton_kernels

from gpu.harness import PosixMover
from helpers import SOON_S, DirectoryTest, flip, keys_of, save_chunk, swap
from vua.device import xxh3
from vua.device.buffers import StagingBuffer
from vua.device.gds import CuFileMover, DirectReader, Gds
from vua.device.paged import synchronize
from vua.errors import ConfigError, StorageError
from vua.format.identity import Identity
from vua.format.layout import KVLayout
from vua.store.namespace import Namespace

NEEDS_CUDA = unittest.skipUnless(torch.cuda.is_available(), "needs a CUDA device")
CPU = torch.device("cpu")


def content(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


class ChecksumsTest(unittest.TestCase):
    """Sums of pieces of memory against xxhash, piece by piece."""

    device = CPU
    kernel: xxh3.Digests | None = None

    def check(self, starts: list[int], lengths: list[int]) -> None:
        size = max(s + n for s, n in zip(starts, lengths, strict=True)) + 8
        data = content(size, seed=len(starts))
        places, sizes = np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64)
        on_device = data.to(self.device)

        found = xxh3.checksums(on_device, places, sizes, kernel=self.kernel)

        raw = data.numpy().tobytes()
        pieces = [raw[s : s + n] for s, n in zip(starts, lengths, strict=True)]
        self.assertEqual([xxhash.xxh3_64_intdigest(p) for p in pieces], found.tolist())
        at = int(np.argmax(sizes))
        on_device[starts[at] + lengths[at] // 2] ^= 1
        again = xxh3.checksums(on_device, places, sizes, kernel=self.kernel)
        self.assertNotEqual(found[at], again[at])

    def test_words(self) -> None:
        """Pieces in words of eight bytes, around the ends of stripes and blocks, of four, none."""
        lengths = [248, 256, 264, 1016, 1024, 1032, 1088, 2048, 2056, 3072, 4096]
        self.check(np.cumsum([0, *lengths[:-1]]).tolist(), lengths)
        self.check([4, 260, 1300], [244, 1028, 2052])
        none = np.array([], dtype=np.int64)
        self.assertEqual(0, len(xxh3.checksums(content(8).to(self.device), none, none)))

    @pytest.mark.thorough
    def test_a_checksum_block(self) -> None:
        """A file's whole checksum block of 128 KiB, and one of 16 KiB."""
        self.check([0, 131072], [131072, 16384])

    @pytest.mark.thorough
    def test_every_length(self) -> None:
        """All lengths from 0 to 1100, at any address."""
        self.check([0] * 241, list(range(241)))
        self.check([n % 9 for n in range(241, 1101)], list(range(241, 1101)))

    @pytest.mark.thorough
    def test_large(self) -> None:
        """A piece longer than a checksum block usually is, whose end is near none of XXH3's."""
        self.check([8], [3 * 131072 + 1000])


@NEEDS_TRITON
class InterpretedChecksumsTest(ChecksumsTest):
    """The Triton kernel, run by Triton's interpreter on the CPU."""

    def setUp(self) -> None:
        import triton.language as tl

        kernel = triton_kernels(interpreted=True)
        self.kernel = kernel.digests
        self.enterContext(mock.patch.object(tl.standard, "_sum_combine", kernel.add_pair))

    @pytest.mark.thorough
    def test_every_length(self) -> None:
        """Lengths around the ends of stripes and blocks up to 2 KiB, at any address."""
        edges = (256, 320, 960, 1024, 1088, 2048)
        lengths = [241, *(edge + n for edge in edges for n in (-1, 0, 1)), 983, 2049 + 63]
        self.check([n % 9 for n in lengths], lengths)

    test_large = None  # the interpreter takes milliseconds per KiB; see test_a_checksum_block

    @pytest.mark.thorough
    def test_compiles_for_hopper(self) -> None:
        """The kernel compiles without a GPU, and reads words of eight bytes."""
        kernel = triton_kernels(interpreted=False).digest_kernel
        pointers = ("starts", "lengths", "keys", "out")
        for word, access in ((8, ".b64"), (1, ".b8")):
            with self.subTest(word=word):
                ptx = compiled(kernel, {"WORD": word}, pointers)
                self.assertIn("ld.global", ptx)
                self.assertIn(access, ptx)


@pytest.mark.gpu
@NEEDS_CUDA
class GPUChecksumsTest(ChecksumsTest):
    """What is chosen on a GPU."""

    device = torch.device("cuda:0")

    def test_choice(self) -> None:
        """The kernel is used where Triton is installed."""
        self.assertEqual(HAS_TRITON, xxh3.kernel_for(self.device) is not None)


class MoverTest(DirectoryTest):
    """A mover, on a file of random bytes."""

    device = CPU

    def mover(self) -> Any:
        return PosixMover()

    def test_reads(self) -> None:
        """Any range to any place, and nothing beside it; at the end of the file fewer bytes."""
        size = (5 << 20) + 123
        data = content(size)
        path = self.root / "file"
        path.write_bytes(data.numpy().tobytes())
        memory = torch.empty(size + 99, dtype=torch.uint8, device=self.device)
        mover = self.mover()
        mover.attach(memory)
        with path.open("rb") as stream:
            handle = mover.open(stream.fileno())
        for offset, at, nbytes in ((0, 0, size), (4096, 99, 5 << 20), (7, 13, 1001), (size, 0, 5)):
            memory.fill_(0x3C)
            synchronize(self.device)  # cuFile writes on a stream of its own
            expected = torch.full((size + 99,), 0x3C, dtype=torch.uint8)
            there = data[offset : offset + nbytes]
            expected[at : at + len(there)] = there

            self.assertEqual(len(there), mover.read(handle, memory, at, nbytes, offset))
            found = memory.cpu()
            found[at + len(there) : at + nbytes] = 0x3C  # behind the end of the file: undefined
            self.assertTrue(torch.equal(expected, found))
        mover.close(handle)
        mover.detach(memory)

    def test_proved(self) -> None:
        """The trial passes."""
        gds = Gds("required", self.mover, self.root, self.device)
        self.addCleanup(gds.close)
        self.assertIsNotNone(gds.mover)
        self.assertEqual([], list(self.root.iterdir()))


@pytest.mark.gpu
@NEEDS_CUDA
@unittest.skipUnless(importlib.util.find_spec("cuda"), "needs cuda-bindings and nvidia-cufile")
class CuFileMoverTest(MoverTest):
    """cuFile itself."""

    device = torch.device("cuda:0")

    def mover(self) -> Any:
        return CuFileMover(self.device)


class Broken(PosixMover):
    """A mover with one fault."""

    name = "broken"

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def read(self, handle: int, memory: torch.Tensor, at: int, nbytes: int, offset: int) -> int:
        if self.fault == "raises":
            raise OSError("no such thing")
        got = super().read(handle, memory, at, nbytes, offset)
        if self.fault == "one byte":
            memory[at] ^= 1
        if self.fault == "one too many":
            memory[at + got] = 0
        return got - (self.fault == "short")


class TrialTest(DirectoryTest):
    """Nothing is read by what does not work."""

    def test_faults(self) -> None:
        """Each of these is found by the trial: `required` refuses, `auto` goes on without."""
        for fault in ("raises", "one byte", "one too many", "short"):
            with self.subTest(fault):
                with self.assertRaisesRegex(ConfigError, "required"):
                    Gds("required", lambda fault=fault: Broken(fault), self.root, CPU)
                gds = Gds("auto", lambda fault=fault: Broken(fault), self.root, CPU)
                self.assertIsNone(gds.mover)
                gds.close()

    def test_hanging_driver(self) -> None:
        """A driver that does not answer in time holds up nobody, and is not used later on."""
        go = threading.Event()
        self.addCleanup(go.set)
        hanging: list[threading.Thread] = []

        def hang() -> Any:
            hanging.append(threading.current_thread())
            go.wait()
            return PosixMover()

        gds = Gds("auto", hang, self.root, CPU, timeout_s=0.05)
        self.assertIsNone(gds.mover)
        with self.assertRaisesRegex(ConfigError, "no answer for 0 s"):
            Gds("required", hang, self.root, CPU, timeout_s=0.05)
        go.set()
        for thread in hanging:
            thread.join(SOON_S)
        self.assertIsNone(gds.mover)
        gds.close()

    @pytest.mark.thorough
    def test_packages(self) -> None:
        """With both packages that the refusal names cuFile's library is found."""
        with (
            mock.patch.dict(sys.modules, {"cuda": None, "cuda.bindings": None}),
            self.assertRaisesRegex(StorageError, "cuda-bindings and nvidia-cufile"),
        ):
            CuFileMover(torch.device("cuda:0"))
        subprocess.run([sys.executable, "-m", "venv", self.root], check=True)
        python, here = (
            self.root / "bin" / "python",
            {"PYTHONPATH": str(Path(np.__path__[0]).parent)},
        )
        asks = [python, "-c", "from cuda.bindings import cufile; cufile.get_version()"]
        for package, found in (("cuda-bindings", False), ("nvidia-cufile", True)):
            subprocess.run([python, "-m", "pip", "install", "-q", package], check=True)
            asked = subprocess.run(asks, env=os.environ | here, capture_output=True, check=False)
            self.assertEqual(found, asked.returncode == 0, asked.stderr)


class DirectReaderTest(DirectoryTest):
    """Chunks of a store into what stands for device memory."""

    device = CPU
    layout = KVLayout(layers=20, kv_heads=2, k_dim=32, v_dim=16, dtype="BF16", chunk_tokens=16)

    def mover(self) -> Any:
        return PosixMover()

    def setUp(self) -> None:
        super().setUp()
        self.store = Namespace.create(
            self.root, Identity(model="m", chunk_tokens=16), [self.layout]
        ).stores[0]
        self.keys = keys_of(range(80), 16)
        self.buffer = StagingBuffer(self.layout, self.layout.full, 5)
        self.buffer.bytes[:] = content(len(self.buffer.bytes)).numpy()
        for place, key in enumerate(self.keys):
            save_chunk(self.store, key, self.buffer.memory, place=place)
        self.gds = Gds("required", self.mover, self.root, self.device)
        self.addCleanup(self.gds.close)
        codec = self.store.codec(self.layout.full)
        self.reader = DirectReader(self.gds, codec, self.store.storage)
        size = len(self.buffer.bytes)
        self.memory = torch.full((size,), 0x77, dtype=torch.uint8, device=self.device)

    def file(self, place: int) -> Path:
        return next(path for path in self.files() if path.parent.name == self.keys[place].name)

    def test_all(self) -> None:
        """What was stored is there, as many whole chunks as there is room for."""
        before, chunk = self.memory.clone(), len(self.memory) // 5
        self.assertEqual((2, False), self.reader.read(self.keys, self.memory[: 3 * chunk - 1]))
        self.assertTrue(torch.equal(before[2 * chunk :], self.memory[2 * chunk :]))
        self.assertEqual((5, False), self.reader.read(self.keys, self.memory))
        self.assertEqual(self.buffer.bytes.tobytes(), self.memory.cpu().numpy().tobytes())

    def test_damage(self) -> None:
        """Whatever is wrong with a file, the chunks before it are handed out and it is not."""

        def cut(path: Path) -> None:
            os.truncate(path, path.stat().st_size - 1)

        def link(path: Path) -> None:
            target = path.rename(path.with_name("elsewhere"))
            path.symlink_to(target)

        last = self.store.codec(self.layout.full).file_nbytes - 1
        first = self.store.codec(self.layout.full).header_nbytes
        cases: dict[str, Any] = {
            "payload": lambda path: flip(path, last),
            "first byte": lambda path: flip(path, first),
            "checksum": lambda path: flip(path, first - 3),
            "header": lambda path: flip(path, 60),
            "cut": cut,
            "gone": Path.unlink,
            "link": link,
            "another chunk's": lambda path: swap(path, self.file(4)),
        }
        for name, strike in cases.items():
            with self.subTest(name):
                path = self.file(2)
                kept, other = path.read_bytes(), self.file(4)
                also = other.read_bytes()
                strike(path)

                doubted = name in ("payload", "first byte")
                self.assertEqual((2, doubted), self.reader.read(self.keys, self.memory))

                for there, data in ((path, kept), (other, also)):
                    there.unlink(missing_ok=True)
                    there.write_bytes(data)
                self.assertEqual((5, False), self.reader.read(self.keys, self.memory))

    def test_given_up(self) -> None:
        """After some failures in a row nothing is tried any more; a success counts anew."""
        mover = self.gds.mover
        for _ in range(3):
            with mock.patch.object(mover, "read", side_effect=OSError("no")):
                self.assertEqual((0, False), self.reader.read(self.keys, self.memory))
            self.assertEqual((5, False), self.reader.read(self.keys, self.memory))
        with mock.patch.object(mover, "read", side_effect=OSError("no")):
            for _ in range(2):
                self.assertEqual((0, False), self.reader.read(self.keys, self.memory))
        self.assertIsNone(self.gds.mover)
        self.assertEqual((0, False), self.reader.read(self.keys, self.memory))


@pytest.mark.gpu
@NEEDS_CUDA
@unittest.skipUnless(importlib.util.find_spec("cuda"), "needs cuda-bindings and nvidia-cufile")
class CuFileReaderTest(DirectReaderTest):
    """The same by cuFile."""

    device = torch.device("cuda:0")

    def mover(self) -> Any:
        return CuFileMover(self.device)
