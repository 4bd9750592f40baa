"""A small library with bounds, and prompts for it; as a program: what another user stores."""

from __future__ import annotations

import os
import sys

import torch

from helpers import caches_of
from vua.core import VUA, VUAConfig

TOKENS = 64
USER = 12345


def config(nbytes: int | str, model: str = "model", **settings: object) -> VUAConfig:
    """A library with so much room."""
    return VUAConfig(split_factor=4, model=model, max_bytes=nbytes, min_free_bytes=0, **settings)


def put(vua: VUA, first: int, tokens: int = TOKENS) -> int:
    """Store a prompt of sixteen chunks that no other has; return how many were written."""
    kv = caches_of(layers=1, heads=1, tokens=tokens, dim=8)
    return vua.put(torch.arange(first * 1000, first * 1000 + tokens), kv)


def main(directory: str, nbytes: int, numbers: range) -> int:
    """Store prompts as another user; return how many were stored wholly."""
    os.setgroups([])
    os.setgid(USER)
    os.setuid(USER)
    with VUA(config(nbytes), directory) as vua:
        return sum(put(vua, number) == 16 for number in numbers)


if __name__ == "__main__":
    said = map(int, sys.argv[2:])
    sys.stdout.write(f"{main(sys.argv[1], next(said), range(*said))}\n")
