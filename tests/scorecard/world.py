"""A cache directory of which every byte is known; operations on it, killed at any system call."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch

from vua.capacity.limits import Limits
from vua.capacity.removal import Collection
from vua.capacity.spaces import GRACE_S, TRASH
from vua.catalog import open_catalog
from vua.catalog.collect import collect
from vua.errors import VUAError
from vua.format.identity import Identity
from vua.format.keys import ChunkKey, KeyChain, token_ids
from vua.format.layout import KVLayout
from vua.io.memory import BufferPool
from vua.storage.base import WRITTEN
from vua.storage.mark import UPKEEP
from vua.storage.names import SUFFIX, TEMPORARY
from vua.store.namespace import Namespace
from vua.store.store import Store
from vua.store.tensors import allocate, memory_map
from vua.store.writer import EntryWriter

ROOMY: Final = Limits(max_bytes="1T", min_free_bytes=0)
"""Bounds that nothing in a test reaches."""


class WrongBytesError(AssertionError):
    """A reader got bytes that nobody put: the one thing that must never happen."""


def layout_of(file_nbytes: int, *, chunk_tokens: int = 8) -> KVLayout:
    """Return a layout of 2 layers whose chunk files have about ``file_nbytes`` bytes of payload."""
    heads = max(1, file_nbytes // (2 * 2 * chunk_tokens * 64 * 4))
    return KVLayout(2, heads, 64, 64, "I32", chunk_tokens)


class World:
    """Some prompts of a made-up model in a directory; see the module. For one thread at a time."""

    def __init__(
        self,
        root: Path,
        layout: KVLayout,
        *,
        prompts: int = 3,
        chunks: int = 3,
        bounds: Limits = ROOMY,
        durable: bool = False,
    ) -> None:
        """Prepare ``prompts`` prompts of ``chunks`` chunks; writes nothing.

        Prompts 2n and 2n + 1 share their first third (at least a chunk).
        """
        self.root, self.layout, self.bounds, self.durable = root, layout, bounds, durable
        self.identity = Identity(
            model=f"world {layout.kv_heads}", chunk_tokens=layout.chunk_tokens, name="world"
        )
        self.keys = [self._keys(number, chunks) for number in range(prompts)]
        self._content: dict[str, list[list[torch.Tensor]]] = {}

    def _keys(self, number: int, chunks: int) -> list[ChunkKey]:
        size, shared = self.layout.chunk_tokens, max(1, chunks // 3)
        tokens = np.arange(chunks * size) + 100_000 * (number + 1)
        tokens[: shared * size] = np.arange(shared * size) + 7 * (number // 2)
        chain = KeyChain(token_ids(torch.from_numpy(tokens)), size)
        return [chain[place] for place in range(chunks)]

    @property
    def prompts(self) -> range:
        return range(len(self.keys))

    def content(self, key: ChunkKey) -> list[list[torch.Tensor]]:
        """The right bytes of a chunk: ``[K, V][layer]``, each ``[heads, tokens, dim]``."""
        found = self._content.get(key.name)
        if found is None:
            layout = self.layout
            generator = np.random.default_rng(int(key.name[:16], 16))
            shape = (2, layout.layers, layout.kv_heads, layout.chunk_tokens, layout.k_dim)
            drawn = torch.from_numpy(generator.integers(0, 1 << 31, shape, dtype=np.int32))
            found = self._content[key.name] = [list(array) for array in drawn]
        return found

    # -- what is done to it ---------------------------------------------------------------------

    def writer(self) -> Store:
        """Open the namespace for writing, as an engine's process would. Raises VUAError."""
        return Namespace.create(
            self.root, self.identity, [self.layout], durable=self.durable, bounds=self.bounds
        ).stores[0]

    def put(self, number: int, store: Store | None = None) -> int:
        """Put a prompt; return how many chunks were written. Raises VUAError."""
        with contextlib.ExitStack() as stack:
            if store is None:
                store = self.writer()
                stack.callback(store.close)
            keys = self.keys[number]
            stored = store.lookup(keys)
            store.used(keys, stored, wait=True)
            size = self.layout.chunk_tokens
            statuses = [
                EntryWriter(store, memory_map(self.content(key), size)).save([key]) for key in keys
            ]
            return statuses.count([WRITTEN])

    def get(self, number: int, store: Store | None = None) -> int:
        """Return how many chunks of a prompt can be had. Raises WrongBytesError, nothing else."""
        with contextlib.ExitStack() as stack:
            if store is None:
                with contextlib.suppress(OSError):  # as `VUA.get_closest` does
                    namespace = Namespace.open(self.root / self.identity.namespace)
                    store = namespace.stores[0] if namespace else None
                if store is None:
                    return 0
                stack.callback(store.close)
            keys = self.keys[number]
            found = store.lookup(keys)
            arrays = allocate(self.layout, found, BufferPool(0), pinned=False) if found else []
            if not found:
                return 0
            loaded = store.load(keys[:found], memory_map(arrays, self.layout.chunk_tokens))
        self.judge(keys[: loaded.chunks], arrays)
        return loaded.chunks

    def judge(self, keys: list[ChunkKey], arrays: list[list[torch.Tensor]]) -> None:
        """Compare what was loaded with what is right. Raises WrongBytesError."""
        size = self.layout.chunk_tokens
        for place, key in enumerate(keys):
            for got, right in zip(arrays, self.content(key), strict=True):
                for layer, (mine, theirs) in enumerate(zip(got, right, strict=True)):
                    span = mine[:, place * size : (place + 1) * size]
                    if not np.array_equal(span.numpy(), theirs.numpy()):
                        raise WrongBytesError(f"chunk {key.name[:12]} (place {place}, {layer=})")

    # -- what is left of it ---------------------------------------------------------------------

    def check(self) -> list[int]:
        """Read everything; return the chunks found per prompt. Raises WrongBytesError."""
        return [self.get(number) for number in self.prompts]

    def heal(self) -> None:
        """Put every prompt again; afterwards all of it is there. Raises AssertionError if not."""
        before, self.bounds = self.bounds, ROOMY
        try:
            for number in self.prompts:
                self.put(number)
        finally:
            self.bounds = before
        found, wanted = self.check(), [len(keys) for keys in self.keys]
        if found != wanted:
            raise AssertionError(f"after putting everything again {found} of {wanted} are there")

    def leftovers(self) -> list[str]:
        """Paths of what no reader will ever look at: temporary and half-deleted things."""
        found = []
        for path in self.root.rglob("*"):
            is_lease = path.parent.name == UPKEEP and path.name.startswith("search-")
            if is_lease or path.name.startswith((TEMPORARY, TRASH)):
                found.append(path)
            elif len(path.name) == 64 and len(path.parent.name) == 2:
                names = [below.name for below in path.iterdir()] if path.is_dir() else []
                if not any(name.endswith(SUFFIX) or name.startswith(TEMPORARY) for name in names):
                    found.append(path)
        return [str(path.relative_to(self.root)) for path in found]

    def age(self, seconds: float = 2 * GRACE_S) -> None:
        """Let everything in the directory look older, by setting its times back."""
        paths = [self.root, *self.root.rglob("*")]
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                stamp = path.lstat().st_mtime_ns - int(seconds * 1e9)
                os.utime(path, ns=(stamp, stamp), follow_symlinks=False)

    def collect(self) -> Collection:
        return collect(open_catalog(str(self.root)), self.bounds)

    def sweep(self) -> None:
        """Age what is left and collect once. Raises AssertionError where that leaves anything."""
        self.age()
        self.collect()
        left = self.leftovers()
        if left:
            raise AssertionError(f"one collection left behind {left[:5]}")


_TRACED: Final = "%file,%desc"
"""All calls that take a path or a descriptor: no other one can change a directory."""
_CALL: Final = re.compile(r"^(\w+)\(")
_NAMELESS: Final = "syscall_0x"
"""A call that this strace is too old to know: it cannot tamper with it. cachestat, which only
asks."""
_LIMIT_S: Final = 60
_GO: Final = (signal.SIGUSR1,)
_DONE: Final = "done"
_END: Final = "/vua-operation-ended"
"""Asked for at the end of an operation, so that strace's log shows where that is."""


class Outcome(NamedTuple):
    """How an operation ended."""

    killed: bool
    text: str
    """``done``, ``refused`` (a VUAError), or what else was raised, with its traceback."""
    log: str


def why_not() -> str | None:
    """Return why system calls cannot be tampered with here, or None."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    try:
        outcome = run_tampered(lambda: os.close(os.open("/", os.O_RDONLY)), "close:signal=SIGKILL")
    except OSError as problem:
        return f"strace cannot be used: {problem}"
    return None if outcome.killed else "strace may not trace here (ptrace is forbidden?)"


def run_tampered(operation: Callable[[], object], inject: str | None = None) -> Outcome:
    """Run ``operation`` in a child of which strace tampers with what ``inject`` says.

    Args:
        operation: called in a forked child; what it returns is ignored.
        inject: after ``-e inject=``, e.g. ``pwritev:error=ENOSPC:when=2``; None only traces.

    Raises OSError where strace does not attach.
    """
    said, say = socket.socketpair()  # no operation sends: what is said is never tampered with
    signal.pthread_sigmask(signal.SIG_BLOCK, _GO)
    child = os.fork()
    if child == 0:
        _be_child(operation, say)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _GO)
    say.close()
    with tempfile.NamedTemporaryFile("r", prefix="vua-strace-") as log:
        command = ["strace", "-o", log.name, "-p", str(child), "-e", f"trace={_TRACED}"]
        command += ["-e", f"inject={inject}"] if inject else []
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
            try:
                line = tracer.stderr.readline() if tracer.stderr else ""
                if "attached" not in line:
                    os.kill(child, signal.SIGKILL)
                    raise OSError(line.strip() or "strace said nothing")
                os.kill(child, signal.SIGUSR1)
                text = b"".join(iter(lambda: said.recv(1 << 16), b"")).decode()
            finally:
                _, status = os.waitpid(child, 0)
                said.close()
            tracer.communicate(timeout=_LIMIT_S)
        return Outcome(os.WIFSIGNALED(status), text, log.read())


def _be_child(operation: Callable[[], object], say: socket.socket) -> None:
    try:
        gc.disable()  # a collection closes what the parent left open, at a moment of its own
        signal.alarm(_LIMIT_S)
        signal.sigwait(_GO)
        try:
            operation()
            text = _DONE
        except VUAError:
            text = "refused"
        except OSError as problem:
            text = f"{type(problem).__name__}: {traceback.format_exc()}"
        except BaseException:  # noqa: BLE001 - whatever it is, the parent shall hear of it
            text = traceback.format_exc()
        with contextlib.suppress(OSError):
            Path(_END).stat()
        say.sendall(text.encode())
    finally:
        os._exit(0)


def calls_of(operation: Callable[[], object]) -> Counter[str]:
    """Return how often an operation makes each system call on paths or descriptors.

    Raises AssertionError when it fails by itself.
    """
    outcome = run_tampered(operation)
    if outcome.text != _DONE:
        raise AssertionError(f"the operation fails by itself: {outcome.text}")
    lines = outcome.log.splitlines()
    own = next(n for n, line in enumerate(lines) if _END in line)
    found = (_CALL.match(line) for line in lines[:own])  # the rest is how the child ends
    names = Counter(match[1] for match in found if match)
    return Counter({name: n for name, n in names.items() if not name.startswith(_NAMELESS)})


_NBYTES = 16 << 10


class Operation(NamedTuple):
    """Something to do to a copy of a prepared directory."""

    name: str
    template: Path
    world: World
    run: Callable[[], object]
    orphans: int
    """How many leftovers one kill may add; a collection that is killed leaves those it found."""

    def may_end(self, text: str) -> bool:
        """Whether a call that fails may have this outcome (see `syscalls.Outcome`)."""
        if text == "done" or (text == "refused" and not self.name.startswith("get")):
            return True
        return self.name == "collection" and "Error: [Errno" in text

    def prepare(self) -> None:
        """Begin with a fresh copy of the template, times included."""
        shutil.rmtree(self.world.root, ignore_errors=True)
        shutil.copytree(self.template, self.world.root, symlinks=True)


def operations(directory: Path) -> list[Operation]:
    """Prepare puts, gets, an eviction and a collection below ``directory``."""
    made = []
    for name, orphans, prepare, options, run in (
        ("first put", 1, _nothing, {}, lambda world: world.put(0)),
        ("put", 1, lambda world: world.put(1), {}, lambda world: world.put(0)),
        ("durable put", 1, lambda world: world.put(1), {"durable": True}, lambda w: w.put(0)),
        ("get", 0, World.heal, {}, lambda world: world.get(0)),
        ("get of damage", 1, _damage, {}, lambda world: world.get(0)),
        ("eviction", 2, _fill, {"bounds": _TIGHT}, lambda world: world.put(2)),
        ("collection", 99, _litter, {"bounds": _TIGHT}, World.collect),
    ):
        template = directory / f"{name.replace(' ', '-')}.template"
        template.mkdir(parents=True)
        prepare(World(template, layout_of(_NBYTES)))
        world = World(directory / name.replace(" ", "-"), layout_of(_NBYTES), **options)
        for number in world.prompts:
            for key in world.keys[number]:
                world.content(key)  # drawn here, not in the child
        made.append(Operation(name, template, world, _bound(run, world), orphans))
    return made


_TIGHT = Limits(max_bytes=6 * _NBYTES, min_free_bytes=0)


def _bound(run: Callable[[World], object], world: World) -> Callable[[], object]:
    return lambda: run(world)


def _nothing(world: World) -> None:
    """An empty directory."""


def _fill(world: World) -> None:
    world.put(0)
    world.put(1)
    world.age(600)


def _damage(world: World) -> None:
    """All prompts, and a byte of the last chunk of the first one is another."""
    world.heal()
    path = _chunk(world, 0, -1) / f"{world.layout.full.name}.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x10
    path.write_bytes(data)


def _litter(world: World) -> None:
    """All prompts, one with a gap; temporary files, trash, an empty chunk; all of it old."""
    world.heal()
    shutil.rmtree(_chunk(world, 2, 1))
    space = world.root / world.identity.namespace
    for folder in (world.root, space):
        (folder / f"{TEMPORARY}{'0' * 16}").write_bytes(b"{\n")
    (_chunk(world, 0, 0) / f"{TEMPORARY}host-{'0' * 8}-1-1").write_bytes(b"half")
    trash = space / f"{TRASH}{'0' * 16}"
    trash.mkdir()
    (trash / f"{world.layout.full.name}.safetensors").write_bytes(b"half")
    (space / "ab" / ("ab" * 32)).mkdir(parents=True)
    world.age()


def _chunk(world: World, number: int, place: int) -> Path:
    name = world.keys[number][place].name
    return world.root / world.identity.namespace / name[:2] / name
