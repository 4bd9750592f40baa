"""Two NFS clients use one cache: is what they get right, and how many RPCs does it take?

``clients.py MOUNT_A MOUNT_B NAME [PARTS]``: two mounts of an empty export, by two NFS clients. It
prints one JSON object per finding; exit status 1 when something is wrong. `run.py` starts it in a
guest; on a machine with NFS it runs as it is.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scorecard.world import ROOMY, World, WrongBytesError, layout_of
from vua.capacity.limits import Limits
from vua.catalog import open_catalog
from vua.catalog.collect import collect
from vua.errors import StorageError, VUAError
from vua.format.identity import Identity
from vua.format.keys import ChunkKey, KeyChain
from vua.format.layout import KVLayout
from vua.native import MemoryMap
from vua.storage.base import entry_name
from vua.store.namespace import Namespace
from vua.store.store import Store
from vua.store.tensors import memory_map
from vua.store.writer import EntryWriter

CHUNKS = 128
IDENTITY = Identity(model="nfs", kv_dtype="uint8", chunk_tokens=4, name="nfs")
RACE_S = 15.0
problems: list[str] = []


def report(**what: object) -> None:
    """Print one finding."""
    print(json.dumps(what), flush=True)


def rpcs(mount: Path) -> Counter[str]:
    """The RPCs that a mount has sent so far, by name."""
    found: Counter[str] = Counter()
    mine = False
    for line in Path("/proc/self/mountstats").read_text(encoding="ascii").splitlines():
        if line.startswith("device "):
            place = line.partition(" mounted on ")[2].partition(" ")[0]
            mine = " fstype nfs" in line and mount.is_relative_to(place)
        elif mine and line.startswith("\t") and ": " in line.strip():
            name, _, numbers = line.strip().partition(": ")
            if name.isupper() and len(numbers.split()) >= 8:
                found[name] = int(numbers.split()[0])
    return found


def counted(mount: Path, what: str, times: int, run: Callable[[int], object]) -> None:
    """Do something ``times`` times; report the RPCs and the milliseconds of one."""
    before, began = rpcs(mount), time.perf_counter()
    for turn in range(times):
        run(turn)
    ms = 1000 * (time.perf_counter() - began) / times
    spent = rpcs(mount)
    spent.subtract(before)
    by_name = {name: round(n / times, 2) for name, n in sorted(spent.items()) if n}
    total = round(sum(by_name.values()), 2)
    report(what=what, rpcs=total, by_name=by_name, ms=round(ms, 1))


def forget() -> None:
    """Let the kernel forget pages, names and attributes: a client that has just started."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")


def must(what: str, holds: bool, found: object = "") -> None:  # noqa: FBT001
    """Note whether something holds that has to."""
    report(what=what, holds=bool(holds), found=str(found))
    if not holds:
        problems.append(what)


# -- right or not ---------------------------------------------------------------------------------


class Client:
    """The cache of prompts of one chunk, as one client sees it."""

    def __init__(self, mount: Path, bounds: Limits = ROOMY) -> None:
        """Open it."""
        self.world = World(mount, layout_of(65536), prompts=2200, chunks=1, bounds=bounds)
        self.store = self.world.writer()

    def put(self, number: int) -> int:
        """How many chunks were written; none if it is stored, or refused."""
        try:
            return self.world.put(2 * number, self.store)
        except StorageError:
            return 0

    def look(self, number: int) -> str:
        """Get one prompt: hit, miss or wrong."""
        try:
            return "hit" if self.world.get(2 * number, self.store) else "miss"
        except WrongBytesError:
            return "WRONG"

    def chunk(self, number: int) -> str:
        """The name of its chunk."""
        return self.world.keys[2 * number][0].name

    def files(self, number: int) -> list[Path]:
        """Its files."""
        name = self.chunk(number)
        folder = self.world.root / self.world.identity.namespace / name[:2] / name
        return sorted(folder.glob("*.safetensors"))


def across(a: Path, b: Path) -> None:
    """What one client puts, deletes, damages or evicts is so for the other."""
    one, two = Client(a), Client(b)
    stored = [one.put(number) for number in range(20)]
    must("a puts, b gets", [two.look(n) for n in range(20)] == ["hit"] * 20, sum(stored))
    must("b finds it stored and writes nothing", not two.put(0))

    seen = two.look(100)
    one.put(100)
    began = time.monotonic()
    while (found := two.look(100)) == "miss" and time.monotonic() - began < 90:
        time.sleep(0.05)
    seconds = time.monotonic() - began
    must("after a miss, b sees what a puts", (seen, found) == ("miss", "hit"), f"{seconds:.1f} s")

    (path,) = one.files(1)
    name = entry_name(two.chunk(1), two.world.layout.full)
    fd, _ = two.store.storage.open_file(name)  # type: ignore[attr-defined]
    path.unlink()
    try:
        text = f"{len(os.pread(fd, 65536, 0))} bytes"
    except OSError as problem:
        text = f"{type(problem).__name__}: {problem.strerror}"
    os.close(fd)
    report(what="b reads on in a file that a has deleted", found=text)
    began = time.monotonic()
    while (found := two.look(1)) == "hit" and time.monotonic() - began < 90:
        time.sleep(0.05)  # b's kernel still has the name, and the right bytes
    seconds = time.monotonic() - began
    must("what a deletes is a miss for b", found == "miss", f"{seconds:.1f} s later")

    (path,) = one.files(2)
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)
    began = time.monotonic()
    while (found := two.look(2)) == "hit" and time.monotonic() - began < 90:
        time.sleep(0.05)  # b has the right bytes in its page cache: a hit, and right
    seconds = time.monotonic() - began
    must("what a damages is a miss for b", found == "miss", f"{seconds:.1f} s later")
    began = time.monotonic()
    while (found := two.look(2)) == "miss" and time.monotonic() - began < 90:
        one.put(2)  # does nothing while a believes that it is there
        time.sleep(0.05)
    seconds = time.monotonic() - began
    must("and a hit when a puts it again", found == "hit", f"{seconds:.1f} s later")

    given = Limits(max_bytes=10 * 70000, min_free_bytes=0)
    evicted = collect(open_catalog(str(a)), given).evicted.chunks
    after = Counter(two.look(number) for number in range(20))
    must("what a evicts is a miss for b, the rest is right", not after["WRONG"], (evicted, after))
    one.store.close()
    two.store.close()


def soon(a: Path, b: Path) -> None:
    """How soon b, which has just looked in vain, gets what a's `put` has stored."""
    one, two = Client(a), Client(b)
    waits_s, wrong = [], 0
    for number in range(40):
        wrong += two.look(1000 + number) != "miss"
        one.put(1000 + number)
        began = time.monotonic()
        while (found := two.look(1000 + number)) == "miss" and time.monotonic() - began < 90:
            time.sleep(0.002)
        waits_s.append(time.monotonic() - began)
        wrong += found != "hit"
    waits_s.sort()
    ms = {"median_ms": round(1000 * waits_s[20]), "worst_ms": round(1000 * waits_s[-1])}
    must("b gets what a has put, right and whole", not wrong, ms)
    one.store.close()
    two.store.close()


def race(a: Path, b: Path) -> None:
    """Two processes, one per client, put, get and delete the same keys within tight bounds."""
    children = {}
    for turn, mount in enumerate((a, b, a, b)):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = _racer(mount, turn)
            except BaseException:  # noqa: BLE001 - said, and the exit status tells
                traceback.print_exc()
            finally:
                os._exit(code)
        children[child] = turn
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    must(f"2 processes per client, {RACE_S:.0f} s: nothing wrong, nothing raised", not any(codes))


def _racer(mount: Path, turn: int) -> int:
    random.seed(turn)
    client, seen = Client(mount, Limits(max_bytes=12 * 70000, min_free_bytes=0)), Counter[str]()
    stop = time.monotonic() + RACE_S
    while time.monotonic() < stop:
        number = random.randrange(24)
        if random.random() < 0.5:
            seen["stored" if client.put(number) else "not stored"] += 1
        else:
            seen[client.look(number)] += 1
        if random.random() < 0.02:
            for path in client.files(number):
                path.unlink(missing_ok=True)
    report(what=f"process {turn}", found=dict(seen))
    return 1 if seen["WRONG"] or not seen["hit"] else 0


# -- RPCs -----------------------------------------------------------------------------------------


def prompt(number: int, chunks: int) -> list[ChunkKey]:
    """The keys of a prompt."""
    ids = (np.arange(4 * chunks, dtype="<u4") + 1_000_000 * (number + 1)).tobytes()
    chain = KeyChain(ids, 4)
    return [chain[place] for place in range(chunks)]


def opened(mount: Path, nbytes: int) -> Store:
    """The cache as a process that has just started sees it."""
    identity = Identity(model=f"nfs {nbytes}", kv_dtype="uint8", chunk_tokens=4, name="nfs")
    bounds = Limits(max_bytes="1T", min_free_bytes=0)
    layout = layout_of(nbytes, chunk_tokens=4)
    return Namespace.create(mount, identity, [layout], bounds=bounds).stores[0]


def memory_of(layout: KVLayout, value: int = 0) -> MemoryMap:
    """Memory of one chunk, full of one value."""
    shape = (layout.kv_heads, layout.chunk_tokens, layout.k_dim)
    both = [[torch.full(shape, value, dtype=torch.int32) for _ in range(layout.layers)]
            for _ in range(2)]  # fmt: skip
    return memory_map(both, layout.chunk_tokens)


def saved(store: Store, keys: list[ChunkKey]) -> None:
    """Save a prompt, front to back."""
    for key in keys:
        EntryWriter(store, memory_of(store.layout, 1)).save([key])


def costs(a: Path, b: Path) -> None:
    """Lookups of 128 chunks, saves and loads: RPCs and milliseconds."""
    writer = opened(a, 65536)
    whole, half = prompt(0, CHUNKS), prompt(1, CHUNKS)
    saved(writer, whole)
    saved(writer, half[: CHUNKS // 2])
    writer.close()
    for name, keys in (("all", whole), ("half", half), ("nothing", prompt(2, CHUNKS))):
        lookups(b, name, keys)
    for nbytes, label in ((65536, "64 KiB"), (2 << 20, "2 MiB")):
        keys = prompt(3, 36)
        saves(a, nbytes, label, keys)
        loads(b, nbytes, label, keys)


def lookups(mount: Path, name: str, keys: list[ChunkKey]) -> None:
    """Look a prompt up, first as a client that has just started."""
    forget()
    reader = opened(mount, 65536)
    for when, times in (("first", 1), ("again", 5)):
        what = f"lookup of 128 chunks, {name} stored, {when}"
        counted(mount, what, times, lambda _: reader.lookup(keys))
    reader.close()


def saves(mount: Path, nbytes: int, label: str, keys: list[ChunkKey]) -> None:
    """Save chunks of a prompt of which the first are there, then save the same again."""
    store = opened(mount, nbytes)
    saved(store, keys[:20])
    memory = memory_of(store.layout, 2)
    writer = EntryWriter(store, memory)
    for how in ("", " that is there"):
        what = f"save of a chunk of {label}{how}"
        counted(mount, what, 16, lambda turn: writer.save([keys[20 + turn]]))
    store.close()


def loads(mount: Path, nbytes: int, label: str, keys: list[ChunkKey]) -> None:
    """Load chunks, first as a client that has just started."""
    forget()
    reader = opened(mount, nbytes)
    memory = memory_of(reader.layout)
    for when in ("cold", "warm"):
        what = f"load of a chunk of {label}, {when}"
        counted(mount, what, 16, lambda turn: reader.load([keys[turn]], memory))
    reader.close()


def grown(a: Path, _: Path) -> None:
    """What grows with the number of chunks, in RPCs: see `benchmarks/scale.py`."""
    program, out = Path(__file__).resolve().parents[1] / "scale.py", Path("/run/scale.json")
    sizes = os.environ.get("SIZES", "10000,30000,100000")
    served = Path("/run/export") / a.name / "kv"
    words = [a / "kv", "--served", served, "--sizes", sizes, "--rounds", "1", "--out", out]
    command = [sys.executable, program, *words]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    must("scale", holds=not done.returncode, found=done.stderr[-500:])
    report(scale=json.loads(out.read_text(encoding="utf-8")))


def main() -> int:
    """Do everything; return the exit status."""
    a, b, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    report(nfs=name)
    steps = {
        "across": across,
        "race": race,
        "costs": costs,
        "soon": soon,
        "scale": grown,
    }
    for part in sys.argv[4].split(",") if len(sys.argv) > 4 else list(steps)[:-2]:
        for mount in (a, b):
            (mount / part).mkdir(exist_ok=True)
        try:
            steps[part](a / part, b / part)
        except (OSError, VUAError) as problem:
            traceback.print_exc()
            must(part, holds=False, found=f"{type(problem).__name__}: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
