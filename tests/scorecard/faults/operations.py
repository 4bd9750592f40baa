"""What VUA does to a directory, each as one operation that a campaign can kill or disturb."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from scorecard.faults.syscalls import copied
from scorecard.faults.world import World, layout_of
from vua.capacity.limits import Limits
from vua.capacity.spaces import TRASH
from vua.storage.names import TEMPORARY

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
        copied(self.template, self.world.root)


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
