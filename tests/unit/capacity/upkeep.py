"""A small library with bounds, and prompts for it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from helpers import caches_of
from vua.core import VUA, VUAConfig

TOKENS = 64
USER = 12345


def config(nbytes: int | str, model: str = "model", **settings: object) -> VUAConfig:
    return VUAConfig(split_factor=4, model=model, max_bytes=nbytes, min_free_bytes=0, **settings)


def put(vua: VUA, first: int, tokens: int = TOKENS) -> int:
    """Store a prompt of sixteen chunks that no other has; return how many were written."""
    kv = caches_of(layers=1, heads=1, tokens=tokens, dim=8)
    return vua.put(torch.arange(first * 1000, first * 1000 + tokens), kv)


def store_as_user(directory: Path, nbytes: int, numbers: range) -> int:
    """Become another user for good and store prompts; return how many were stored wholly."""
    os.setgroups([])
    os.setgid(USER)
    os.setuid(USER)
    with VUA(config(nbytes), directory) as vua:
        return sum(put(vua, number) == 16 for number in numbers)
