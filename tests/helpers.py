"""What several test modules share: keys, bytes, memory with poisoned surroundings, damage."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import struct
import tempfile
import threading
import time
import traceback
import unittest
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch

from vua import native
from vua.capacity.upkeep import FOLDER
from vua.core import VUA
from vua.format.keys import ChunkKey, KeyChain, token_ids
from vua.format.layout import ITEMSIZE, KVLayout, Shard
from vua.native import ChunkNames, MemoryMap, bindings
from vua.native.entries import Deletions
from vua.storage.base import WRITTEN
from vua.storage.mark import UPKEEP, USES
from vua.storage.names import SUFFIX
from vua.store.namespace import Namespace
from vua.store.store import Store
from vua.store.writer import EntryWriter
from vua.weights import Weights, identify_weights

Arrays = list[npt.NDArray[np.uint8]]
"""Per array (K, V): ``[layers, heads, tokens, bytes of a row]``."""

T = TypeVar("T")

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent

POISON = 0xA5
PACKED = -1  # a memory in which chunks lie as they do in files
SOON_S = 120.0  # how long tests wait for what has to happen: only a failure takes so long
NOTES = {USES, FOLDER}  # folders of what is noted of requests
GUARD = 3  # tokens before and after those that a dense memory is about


def soak(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that runs for minutes; unittest, which knows no marks, leaves it out."""
    under_pytest = "PYTEST_VERSION" in os.environ
    return pytest.mark.soak(unittest.skipUnless(under_pytest, "runs for minutes")(test))


@functools.cache
def has_native() -> bool:
    """Whether the native code is built here (`python3 dev.py build`) and can be used."""
    return native.library() is not None


@contextmanager
def without_native_deletion() -> Iterator[None]:
    """Let Python delete each chunk that is evicted, by calls of `os`."""
    none = Deletions(0, np.zeros(0, dtype=bool), 0, is_unusual=True, aside="")
    with mock.patch("vua.capacity.evictor.delete_chunks", return_value=none):
        yield


def descriptors(below: Path) -> list[str]:
    """What is open in this process of a directory and what lies below it; each opening counts.

    Of a test's own directory: earlier tests may still be closing what lies in theirs.
    """
    found = []
    for number in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found.append(str(number.readlink()))
    return sorted(path for path in found if path.startswith(str(below)))


def save_step(side: Any, orders: Any) -> None:
    """Copy out what a step ordered of a `WorkerSide`, and have it written, as a connector does."""
    try:
        side.copy_out(orders)
    finally:
        side.saves.hand_over()


def namespace_of(vua: VUA) -> Namespace:
    """The open namespace of a cache, whose counts and parts engines see, and users do not."""
    found = vua.namespace()
    assert found is not None
    return found


@contextmanager
def native_code(mode: str) -> Iterator[None]:
    """Choose anew between the native code and Python, as VUA_NATIVE says: auto, off or require."""
    with (
        mock.patch.dict(os.environ, VUA_NATIVE=mode),
        mock.patch.object(bindings.choice, "status", None),
    ):
        yield


@contextmanager
def weights_known_later() -> Iterator[threading.Event]:
    """What begins to identify a model's weights in the block ends once the event is set."""
    go = threading.Event()

    def later(*args: Any, **settings: Any) -> Weights:
        go.wait(SOON_S)
        return identify_weights(*args, **settings)

    with mock.patch("vua.store.identified.identify_weights", later):
        yield go


def walked(root: Path) -> list[Path]:
    """All paths below a directory, in order, also while others delete there.

    Before Python 3.13 `Path.rglob` raises where a folder goes while it walks.
    """
    found = []
    for folder, below, files in os.walk(root):
        found += [Path(folder, name) for name in (*below, *files)]
    return sorted(found)


def entries_below(root: Path) -> list[Path]:
    """The files of chunks below a directory, in order, also while others delete there."""
    return [path for path in walked(root) if path.suffix == SUFFIX]


def occupied(root: Path) -> int:
    """The bytes of the files of chunks below a directory, also while others delete there."""
    found = 0
    for path in entries_below(root):
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_size
    return found


class DirectoryTest(unittest.TestCase):
    """A test with a directory of its own."""

    def setUp(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="vua-test-"))
        self.addCleanup(shutil.rmtree, self.root, ignore_errors=True)

    def files(self, pattern: str = "*.safetensors") -> list[Path]:
        """The files below the directory, in order of name, without those in quarantine."""
        found = (path for path in walked(self.root) if path.match(pattern))
        return [path for path in found if "quarantine" not in path.parts]

    def snapshot(self) -> dict[str, bytes]:
        """Every file below the directory with its bytes, but for what is noted of requests."""
        found = (path for path in walked(self.root) if NOTES.isdisjoint(path.parts))
        paths = (path for path in found if path.is_file())
        return {str(path.relative_to(self.root)): path.read_bytes() for path in paths}


def save_chunk(
    store: Store, key: ChunkKey, memory: MemoryMap, *, shard: Shard | None = None, place: int = 0
) -> bool:
    """Write one chunk; whether a file was written."""
    return EntryWriter(store, memory, shard=shard).save([key], place) == [WRITTEN]


def keys_of(tokens: Iterable[int], chunk_tokens: int) -> list[ChunkKey]:
    chain = KeyChain(token_ids(list(tokens)), chunk_tokens)
    return chain.first(len(chain))


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """A tensor in which every bit pattern is as likely as any other, NaNs included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    raw = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    """The tensor's values as bytes: unlike `==` these tell NaNs and zeros apart."""
    dense = tensor.detach().resolve_neg().contiguous().flatten()
    return dense.view(torch.uint8).numpy().tobytes()


def caches_of(
    *, layers: int, heads: int, tokens: int, dim: int, rows: int = 1, v_dim: int | None = None,
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> list[list[torch.Tensor]]:  # fmt: skip
    """A KV cache ``[layer][K, V]`` full of noise."""
    dims = (dim, dim if v_dim is None else v_dim)
    return [
        [
            noise(rows, heads, tokens, width, dtype=dtype, seed=1000 * seed + 2 * layer + array)
            for array, width in enumerate(dims)
        ]
        for layer in range(layers)
    ]


def kv_bits(cache: list[list[torch.Tensor]], tokens: int | None = None) -> list[list[bytes]]:
    """The bytes of a KV cache's first tokens."""
    return [[bits(tensor[:, :, :tokens]) for tensor in pair] for pair in cache]


def model_arrays(layout: KVLayout, chunks: int, seed: int = 0) -> Arrays:
    """The KV cache of a whole model as bytes."""
    random = np.random.default_rng(seed)
    tokens = chunks * layout.chunk_tokens
    return [
        random.integers(
            0, 256, (layout.layers, layout.kv_heads, tokens, dim * ITEMSIZE[layout.dtype])
        ).astype(np.uint8)
        for dim in layout.dims
    ]


def rectangle(arrays: Arrays, shard: Shard) -> Arrays:
    layers = slice(shard.layer_start, shard.layer_stop)
    heads = slice(shard.head_start, shard.head_stop)
    return [array[layers, heads] for array in arrays]


class Memory:
    """Memory for one shard, dense or paged, with poison wherever no token of it lies."""

    def __init__(
        self, layout: KVLayout, shard: Shard, chunks: int, *, block_tokens: int | None = None
    ) -> None:
        """Make a dense memory, or a paged one of blocks of ``block_tokens`` in random places.

        With PACKED the blocks are chunks, and heads stand outside of layers as they do in files.
        """
        self.layout, self.tokens = layout, chunks * layout.chunk_tokens
        self.packed = block_tokens == PACKED
        self.block_tokens = block_tokens = layout.chunk_tokens if self.packed else block_tokens
        rows = [dim * ITEMSIZE[layout.dtype] for dim in layout.dims]
        if block_tokens is None:
            shapes = [(shard.layers, shard.heads, self.tokens + 2 * GUARD, row) for row in rows]
        else:
            blocks = self.tokens // block_tokens
            self.blocks = np.random.default_rng(blocks).permutation(2 * blocks + 3)[:blocks]
            spare = 2 * blocks + 3
            shapes = [(shard.layers, spare, shard.heads, block_tokens, row) for row in rows]
        self.buffers = [np.full(shape, POISON, dtype=np.uint8) for shape in shapes]
        if self.packed:  # [blocks, heads, layers, ...], seen as [layers, blocks, heads, ...]
            self.buffers = [
                np.moveaxis(np.ascontiguousarray(np.moveaxis(buffer, 0, 2)), 2, 0)
                for buffer in self.buffers
            ]

    def fill(self, arrays: Arrays) -> Memory:
        """Put tokens into their places, from the first on."""
        for buffer, array in zip(self.buffers, arrays, strict=True):
            if self.block_tokens is None:
                buffer[:, :, GUARD : GUARD + array.shape[2]] = array
                continue
            for number in range(array.shape[2] // self.block_tokens):
                span = slice(number * self.block_tokens, (number + 1) * self.block_tokens)
                buffer[:, self.blocks[number]] = array[:, :, span]
        return self

    def map(self) -> MemoryMap:
        offsets, strides, bases = [], [], []
        segment = self.block_tokens or self.layout.chunk_tokens
        for buffer in self.buffers:
            address = buffer.ctypes.data
            if self.block_tokens is None:
                address += GUARD * buffer.strides[2]
                stride, places = buffer.strides[1], np.arange(self.tokens // segment)
                offsets.append((places * segment * buffer.strides[2]).astype(np.uint64))
            else:
                stride = buffer.strides[2]
                offsets.append((self.blocks * buffer.strides[1]).astype(np.uint64))
            layers = np.arange(buffer.shape[0], dtype=np.uint64) * np.uint64(buffer.strides[0])
            bases.append(np.uint64(address) + layers)
            strides.append(stride)
        return MemoryMap(tuple(bases), tuple(strides), tuple(offsets), segment, self.buffers)


def flip(path: Path, at: int, mask: int = 0x01) -> None:
    """Change bits of one byte of a file, in place."""
    with path.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ mask]))


def swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.replace(aside)
    other.replace(one)
    aside.replace(other)


def until(what: Callable[[], T]) -> T:
    """Ask again and again until the answer is true; return it. Fails after two minutes."""
    stop_s = time.monotonic() + SOON_S
    while not (answer := what()):
        if time.monotonic() > stop_s:
            raise AssertionError("that never became true")
        time.sleep(0.002)
    return answer


@contextmanager
def read_only(root: Path) -> Iterator[None]:
    """Make a directory that the process may read and not write, for root as for anybody."""
    paths = [root, *root.rglob("*")]
    modes = {path: path.stat().st_mode for path in paths}
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        for path, mode in modes.items():
            with contextlib.suppress(FileNotFoundError):
                path.chmod(mode)


def remove_tree(path: Path) -> None:
    """`rm -rf`, again while a process that writes there makes something in it meanwhile."""

    def gone() -> bool:
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()

    until(gone)


def contents(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def in_child(does: Callable[[], object]) -> str:
    """How a forked child ends that does this: "well", "badly" or "hung"."""
    child = os.fork()
    if child == 0:
        try:
            does()
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    stop = time.monotonic() + SOON_S
    while time.monotonic() < stop:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return "badly" if status else "well"
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung"


def write_log(root: Path, requests: Iterable[tuple[float, Sequence[str]]]) -> None:
    """Have requests in a directory's log: when they came, and their chunks (64 hex)."""
    folder = root / UPKEEP / USES
    folder.mkdir(parents=True, exist_ok=True)
    files = [b""]
    for time_s, chunks in requests:
        names = ChunkNames.of(chunks).numbers().tolist()
        record = struct.pack(f"<{3 + len(chunks)}Q", int(time_s * 1e6), 0, len(chunks), *names)
        if len(files[-1]) + len(record) > 1 << 20:  # a longer one is passed over
            files.append(b"")
        files[-1] += record
    for number, records in enumerate(files):
        (folder / f"{number:016x}.uses").write_bytes(b"VUAuses2" + records)
