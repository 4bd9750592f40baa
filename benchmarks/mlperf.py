"""MLPerf Storage's KV cache workload, on VUA and on its own file backend, by turns.

    git clone https://github.com/mlcommons/storage
    python benchmarks/mlperf.py storage/kv_cache_benchmark --dir /mnt/nvme [--json FILE]
        [--rounds 3] [--arguments "--model tiny-1b --num-users 4 ..."]

By default with the arguments of "Max Storage Stress" in the rules of MLPerf Storage 3.0 (table
KVCache-1): the shape of Llama 3.1 8B, seed 42, 300 s, no memory above the storage, three trials.
Its 200 users are scaled to the disk and the memory. The rules score the first four figures. Users
of this workload share no prefix, so it shows nothing of what a prefix cache saves; it measures how
fast turns are written and read back.

`kv_cache_benchmark` draws users, prompts and conversations from a seed, and keeps the K and V of
each turn in a storage tier. Here that tier is the workload's own `NVMeBackend` in one arm (a .npy
file per turn, synced, not verified), and `VUABackend` in the others: once synced like that
(`durable`), once as VUA is by default. All drop what they read from the page cache before. Each arm
runs in a process and a directory of its own, the order changes from round to round. Prints the
workload's own figures, and as ratios over those of files: medians over the rounds. A read of VUA's
that brings anything but the whole turn fails the program.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vua.core import VUA, VUAConfig
from vua.format.keys import KeyChain, token_ids

ARGUMENTS = (
    "--model llama3.1-8b --num-users {users} --duration 300 --gpu-mem-gb 0 --cpu-mem-gb 0 "
    "--max-concurrent-allocs 16 --generation-mode none --seed 42 --log-level ERROR"
)
USERS, DISK_NBYTES = 200, 256 << 30
"""The users that MLPerf asks for, and the free disk that they need."""
USER_NBYTES, OWN_NBYTES = 2000 << 20, 5 << 29
"""Memory of a user's thread and of the workload, by its own estimate for this shape."""
FIGURES = {
    "GiB/s read": ("cache_stats", "tier_storage_read_bandwidth_gbps"),
    "tokens per second of storage": ("storage_throughput_tokens_per_sec",),
    "reads of the device, p95, ms": ("cache_stats", "storage_read_device_p95_ms"),
    "writes of the device, p95, ms": ("cache_stats", "storage_write_device_p95_ms"),
    "GiB/s written": ("cache_stats", "tier_storage_write_bandwidth_gbps"),
    "tokens per second of wall clock": ("avg_throughput_tokens_per_sec",),
    **{
        f"{way}, {part}, ms": ("cache_stats", f"storage_{way}_{part}_ms")
        for way in ("read", "write")
        for part in ("p95", "p99")
    },
}
"""What is compared, and where it stands in the workload's summary."""
CHUNK_TOKENS = 64
FILE, SYNCED, DEFAULT = "file", "VUA, synced", "VUA"
ARMS = (FILE, SYNCED, DEFAULT)


class VUABackend:
    """A storage tier of the workload: each turn is a prompt of its own, in chunks of 64 tokens.

    What comes back is verified. The last chunk is filled up with zeros, so that all of a turn is
    stored. The workload has tokens before heads; they are exchanged by one copy, which is quicker
    than to store rows of a single head.
    """

    durable = False
    """Whether it syncs what it writes."""
    failed = 0
    """Reads that did not bring the whole turn; the workload itself counts them as hits."""

    def __init__(self, base_path: str) -> None:
        """Keep turns below a directory."""
        self.base_path = Path(base_path)
        config = VUAConfig(model="mlperf", split_factor=CHUNK_TOKENS, durable=self.durable)
        self._vua = VUA(config, self.base_path)

    def write(self, key: str, data: npt.NDArray[Any]) -> Any:
        """Store ``data``, [layers, 2, tokens, heads, dim]."""
        whole = -(-data.shape[2] // CHUNK_TOKENS) * CHUNK_TOKENS
        ids = self._ids(key, whole)
        began = time.perf_counter()
        layer_count, pair, tokens, heads, dim = data.shape
        kv = np.zeros((layer_count, pair, 1, heads, whole, dim), dtype=data.dtype)
        kv[:, :, 0, :, :tokens] = data.swapaxes(2, 3)
        layers = torch.from_numpy(kv)
        self._vua.put(ids, [[layer[0], layer[1]] for layer in layers])
        (self.base_path / f"{key}.tokens").write_text(str(whole), encoding="utf-8")
        return timing(began)

    def read(self, key: str) -> tuple[Any, Any]:
        """Return K and V per layer, as the library does; raises KeyError unless all is there."""
        tokens = int((self.base_path / f"{key}.tokens").read_text(encoding="utf-8"))
        ids, files = self._ids(key, tokens), self._files(key, tokens)
        began = time.perf_counter()
        for file in files:
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        found = self._vua.get_closest(ids)
        if found.num_tokens != tokens:
            VUABackend.failed += 1
            raise KeyError(key)
        return found.data, timing(began)

    def delete(self, key: str) -> None:
        """Delete a turn's chunks."""
        record = self.base_path / f"{key}.tokens"
        for file in self._files(key, int(record.read_text(encoding="utf-8"))):
            shutil.rmtree(file.parent, ignore_errors=True)
        record.unlink()

    def _ids(self, key: str, tokens: int) -> torch.Tensor:
        """Tokens for a key, which share no prefix with those of another one."""
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
        return torch.from_numpy(np.random.default_rng(seed).integers(0, 1 << 31, tokens))

    def _files(self, key: str, tokens: int) -> list[Path]:
        chain = KeyChain(token_ids(self._ids(key, tokens).tolist()), CHUNK_TOKENS)
        names = [chain[at].name for at in range(len(chain))]
        (space,) = (path for path in self.base_path.iterdir() if len(path.name) == 64)
        return [file for name in names for file in (space / name[:2] / name).iterdir()]


def timing(began: float) -> Any:
    """What the workload wants to know of a read or a write."""
    from kv_cache.backends import StorageBackend

    total = time.perf_counter() - began
    return StorageBackend.IOTiming(total=total, device=total, host=0.0)


def be_arm(arm: str, checkout: str, arguments: list[str]) -> None:
    """Run the workload in this process, with one of the two backends."""
    sys.path.insert(0, checkout)
    from kv_cache import cache, cli

    if arm != FILE:
        cache.NVMeBackend = VUABackend
        VUABackend.durable = arm == SYNCED
    sys.argv = ["kv-cache.py", *arguments]
    cli.main()
    if VUABackend.failed:
        print(f"{VUABackend.failed} reads did not bring what was written")
    sys.stdout.flush()
    # Users' threads may still read. At a normal end C++ code of theirs would end the process by a
    # signal now and then.
    os._exit(1 if VUABackend.failed else 0)


def measured(arm: str, checkout: Path, arguments: str, work: Path) -> dict[str, float]:
    """Run one arm in a new process; its figures."""
    report = work / "report.json"
    with tempfile.TemporaryDirectory(dir=work) as place:
        told = ["--cache-dir", place, "--output", str(report), *shlex.split(arguments)]
        done = subprocess.run(
            [sys.executable, __file__, "--arm", arm, str(checkout), "--", *told],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(done.stdout[-4000:])
    summary = json.loads(report.read_text(encoding="utf-8"))
    summary = summary | summary["summary"]
    found = {}
    for name, path in FIGURES.items():
        value: Any = summary
        for part in path:
            value = value[part]
        found[name] = float(value)
    return found


def table(rounds: list[dict[str, dict[str, float]]]) -> str:
    """Markdown: the medians of files, and of each arm's ratios to them (least to greatest)."""
    others = ARMS[1:]
    lines = [f"| | {FILE} | {' | '.join(f'{arm}, of that' for arm in others)} |"]
    lines.append(f"|---|{'--:|' * len(ARMS)}")
    for figure in FIGURES:
        middle = statistics.median(found[FILE][figure] for found in rounds)
        cells = [f"{middle:,.0f}" if middle >= 100 else f"{middle:.3g}"]
        for arm in others:
            ratios = [found[arm][figure] / found[FILE][figure] for found in rounds]
            low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        lines.append(f"| {figure} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="kv_cache_benchmark of mlcommons/storage")
    parser.add_argument("--arguments", default=ARGUMENTS, help="of the workload")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="work there: on the file system to measure")
    parser.add_argument("--json", type=Path, help="a file of figures, whose `mlperf` this writes")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.arm:
        be_arm(asked.arm, str(asked.checkout), asked.rest)
        return
    free = shutil.disk_usage(asked.dir or tempfile.gettempdir()).free
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    users = min(USERS, USERS * free // DISK_NBYTES, (memory - OWN_NBYTES) // USER_NBYTES)
    users = max(1, users)
    arguments = asked.arguments.replace("{users}", str(users))
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory(prefix="vua-mlperf-", dir=asked.dir) as name:
        for turn in range(asked.rounds):
            order = ARMS[turn % len(ARMS) :] + ARMS[: turn % len(ARMS)]
            found = {arm: measured(arm, asked.checkout, arguments, Path(name)) for arm in order}
            rounds.append(found)
            print(f"round {turn + 1} of {asked.rounds}", file=sys.stderr)
    print(table(rounds))
    if asked.json:
        report = json.loads(asked.json.read_text("utf-8")) if asked.json.exists() else {}
        report["mlperf"] = {
            "date": datetime.now(timezone.utc).date().isoformat(), "cpus": os.cpu_count(),
            "machine": platform.machine(), "arguments": arguments, "rounds": rounds,
        }  # fmt: skip
        asked.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
