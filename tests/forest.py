"""Plants many chunks in a cache directory: names, headers and times as of real ones, no tensors."""

from __future__ import annotations

import hashlib
import os
import random
import time
from pathlib import Path
from typing import Final

import torch

from helpers import caches_of
from vua.core import VUA, VUAConfig

FILE: Final = "l0-1.h0-1.safetensors"
CHUNK_TOKENS: Final = 64


def plant(root: Path, chunks: int, *, seed: int = 0, nbytes: int = 4096, model: str = "") -> Path:
    """Store so many chunks of prompts that share prefixes; return their namespace's directory.

    Half of the prompts go on from where an earlier one was at some point, as conversations do. The
    same seed makes the same tree; all times are within the last week.
    """
    with VUA(VUAConfig(split_factor=CHUNK_TOKENS, model=model or "planted"), root) as vua:
        cache = caches_of(layers=1, heads=1, tokens=CHUNK_TOKENS, dim=8)
        vua.put(torch.arange(CHUNK_TOKENS), cache)
    space = next(
        path.parent for path in root.glob("*/namespace.json") if (model or "planted").encode()
        in path.read_bytes()
    )  # fmt: skip
    dice, names = random.Random(seed), list[tuple[str, int]]()
    now_ns, made = time.time_ns(), set[str]()
    while len(names) < chunks:
        before, place = ("", 0)
        if names and dice.random() < 0.5:
            before, place = names[int(len(names) * dice.random() ** 2)]
        age_ns = int(dice.expovariate(8) * 7 * 86400e9)
        for _ in range(min(chunks - len(names), 1 + int(dice.expovariate(1 / 24)))):
            name = hashlib.sha256(f"{seed}/{len(names)}".encode()).hexdigest()
            _write(space, name, before, place, nbytes, made)
            os.utime(space / name[:2] / name, ns=(now_ns, now_ns - age_ns - place))
            before, place = name, place + 1
            names.append((name, place))
    return space


def _write(space: Path, name: str, before: str, place: int, nbytes: int, made: set[str]) -> None:
    fan = space / name[:2]
    if name[:2] not in made:
        fan.mkdir(exist_ok=True)
        made.add(name[:2])
    (fan / name).mkdir()
    start = place * CHUNK_TOKENS
    said = f'"format":"vua.entry.v1","parent":"{before or "-"}","tokens":"{start:010d}-"'
    head = f'{{"__metadata__":{{{said}}}}}'
    fd = os.open(f"{fan}/{name}/{FILE}", os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(fd, head.encode())
    os.truncate(fd, nbytes)
    os.close(fd)
