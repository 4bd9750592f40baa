"""Caches in two places, and how tests wait for what travels between them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from helpers import caches_of, namespace_of
from vua.core import VUA, VUAConfig

CONFIG = VUAConfig(split_factor=16, model="tiny")
KV = caches_of(layers=2, heads=2, tokens=64, dim=8, seed=1)


def prompt(number: int) -> torch.Tensor:
    """The tokens of one of many prompts without a common prefix."""
    return torch.arange(64) + 1000 * number


def until(true: Callable[[], bool]) -> None:
    stop_s = time.monotonic() + 300
    while not true():
        if time.monotonic() > stop_s:
            raise AssertionError("it never came")
        time.sleep(0.01)


def wait_for_travel(vua: VUA) -> None:
    """Wait until nothing is on its way from the nearest place."""
    until(lambda: not namespace_of(vua).travel.waiting)
