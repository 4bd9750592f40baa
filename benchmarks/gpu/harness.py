"""What the parts of transfers.py share: timing against a limit, and random caches."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from vua.device.paged import PagedCache
from vua.format.layout import KVLayout

Arms = dict[str, Callable[[], object]]


class PosixMover:
    """Ordinary reads, and a copy to the device: what cuFile is compared with."""

    name = "posix"

    def attach(self, memory: torch.Tensor) -> None:
        """Do nothing."""

    def detach(self, memory: torch.Tensor) -> None:
        """Do nothing."""

    def open(self, fd: int) -> int:
        """Keep the file open."""
        return os.dup(fd)

    def read(self, handle: int, memory: torch.Tensor, at: int, nbytes: int, offset: int) -> int:
        """Read into page-locked memory, then copy."""
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=memory.device.type == "cuda")
        got = os.preadv(handle, [host.numpy()], offset)
        memory[at : at + got].copy_(host[:got])
        return got

    def close(self, handle: int) -> None:
        """Close the file."""
        os.close(handle)


@dataclass
class Bench:
    """The device, the sizes, and the rows found so far."""

    device: torch.device
    directory: Path
    rounds: int
    big: bool
    rows: list[dict[str, object]] = field(default_factory=list)

    def sync(self) -> None:
        """Wait for all work on the device."""
        if self.big:
            torch.cuda.synchronize(self.device)

    def time(self, arms: Arms, rounds: int | None = None) -> dict[str, float]:
        """Seconds per arm, the median of rounds in which the arms take turns, warmed up."""
        found: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range((rounds or self.rounds) + 1):
            for name, work in arms.items():
                self.sync()
                start = time.perf_counter()
                work()
                self.sync()
                if turn:
                    found[name].append(time.perf_counter() - start)
        return {name: statistics.median(times) for name, times in found.items()}

    def report(self, number: str, case: str, seconds: dict[str, float], nbytes: int) -> None:
        """Note each arm against the first one, the limit."""
        limit = next(iter(seconds.values()))
        for name, took in seconds.items():
            row = {
                "id": number, "case": case, "arm": name, "us": round(took * 1e6, 1),
                "GB/s": round(nbytes / took / 1e9, 2), "of limit": round(limit / took, 3),
            }  # fmt: skip
            self.rows.append(row)
            print("{id}  {case:38} {arm:22} {us:>11} us {GB/s:>9} GB/s {of limit:>7}".format(**row))

    def layout(self, tokens: int) -> KVLayout:
        """Llama-3-8B's, or a tiny one."""
        return KVLayout(*(32, 8, 128, 128) if self.big else (4, 2, 16, 16), "BF16", tokens)

    def cache(self, layout: KVLayout, blocks: int, block: int = 16) -> PagedCache:
        """A paged cache as today's vLLM has it, NHD in memory, full of random bits."""
        shape = (layout.layers, blocks, block, layout.kv_heads, 2 * layout.k_dim)
        return PagedCache.of(self.random(*shape), "LBNHC")

    def random(self, *shape: int) -> torch.Tensor:
        """Random bits as bfloat16 on the device."""
        return torch.randint(-32768, 32767, shape, dtype=torch.int16, device=self.device).view(
            torch.bfloat16
        )

    def host(self, nbytes: int) -> torch.Tensor:
        """Touched, pinned host memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.big).fill_(1)


def once(bench: Bench, work: Callable[[], object]) -> float:
    """Seconds of one call, not warmed up."""
    bench.sync()
    start = time.perf_counter()
    work()
    bench.sync()
    return time.perf_counter() - start


def medians(found: dict[str, list[float]]) -> dict[str, float]:
    """The median per arm."""
    return {name: statistics.median(times) for name, times in found.items()}


def expect(what: str, *, holds: bool) -> None:
    """A number for wrong bytes would mean nothing."""
    if not holds:
        sys.exit(f"{what}: the bytes are not what they should be")
