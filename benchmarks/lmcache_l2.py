"""VUA as LMCache's L2 tier beside LMCache's own: `lmcache bench l2`, taking turns, and verified.

After `dev.py lmcache`: `PYTHONPATH=src:$HOME/.cache/vua/engines/lmcache-0.5.6 .venv/bin/python
benchmarks/lmcache_l2.py [--turns 3]`. Every turn gives each adapter a fresh directory, stores and
loads objects, and loads them again in a new process. Printed are medians over the turns, of
each turn's median round, and what every adapter delivers of objects that were damaged on the disk.
With `--url s3://...` VUA alone, on a bucket.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lmcache.cli.commands.bench.l2_adapter_bench import data
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

OBJECTS, OBJECT_KIB, ROUNDS = 16, 8192, 5
QUIET = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_DISABLE_BANNER": "1",
}


def adapter(kind: str, folder: Path | str) -> dict[str, Any]:
    """The specification of an adapter, as LMCache's command line takes it."""
    if kind != "vua":
        return {"type": kind, "base_path": str(folder)}
    return {
        "type": "plugin",
        "module_path": "vua.lmcache.l2_adapter",
        "class_name": "VUAL2Adapter",
        "adapter_params": {"path": str(folder), "plain_engines": True, "label": "bench"},
    }


def measured(kind: str, folder: Path | str, report: Path, *only: str) -> dict[str, float]:
    """MiB/s of the median round of each operation, by LMCache's own benchmark in a new process."""
    subprocess.run(
        [
            *(sys.executable, "-m", "lmcache.cli.main", "bench", "l2", "--no-skip-verify", "-q"),
            *("--num-keys", str(OBJECTS), "--data-size-kb", str(OBJECT_KIB)),
            *("--rounds", str(ROUNDS), "--format", "json", "--output", str(report), *only),
            *("--l2-adapter", json.dumps(adapter(kind, folder))),
        ],
        env={**os.environ, **QUIET},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    found = {}
    for one in json.loads(report.read_text())["metrics"].values():
        if (name := one.get("operation")) in ("Store", "Load"):
            if one["total_success"] != one["total_keys"]:
                sys.exit(f"{kind}: not all objects came through: {one}")
            found[name] = OBJECTS * OBJECT_KIB / 1024 / (one["duration_p50_ms"] / 1000)
    return found


def opened(kind: str, folder: Path) -> Any:
    """A new adapter in this process."""
    given = argparse.Namespace(l2_adapter=[json.dumps(adapter(kind, folder))])
    return create_l2_adapter(parse_args_to_l2_adapters_config(given).adapters[0])


def flip(file: Path) -> None:
    """Flip one bit near a file's end."""
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)


def damaged(kind: str, folder: Path) -> tuple[int, int]:
    """Store objects, flip a bit in each of their files, and load them with a new adapter.

    Returns how many it says to have loaded, and how many of those are not what was stored.
    """
    nbytes = OBJECT_KIB << 10
    keys, memory = data.make_object_keys(OBJECTS), data.make_aligned_tensor(2 * OBJECTS * nbytes)
    stored = data.make_memory_objects(memory, OBJECTS, nbytes, 0)
    loaded = data.make_memory_objects(memory, OBJECTS, nbytes, OBJECTS * nbytes, 1)
    with contextlib.closing(opened(kind, folder)) as first:
        first.submit_store_task(keys, stored)
        while not (done := first.pop_completed_store_tasks()):
            data.wait_eventfd(first.get_store_event_fd())
        if not all(one.is_successful() for one in done.values()):
            sys.exit(f"{kind}: not all objects were stored")
    files = [one for one in folder.rglob("*") if one.is_file() and one.stat().st_size >= nbytes]
    for file in files:
        flip(file)
    if len(files) != OBJECTS:
        sys.exit(f"{kind}: {len(files)} files of {OBJECTS} objects")
    with contextlib.closing(opened(kind, folder)) as second:
        task = second.submit_load_task(keys, loaded)
        while (told := second.query_load_result(task)) is None:
            data.wait_eventfd(second.get_load_event_fd())
    given = [at for at in range(OBJECTS) if told.test(at)]
    wrong = [at for at in given if not torch.equal(stored[at].raw_data, loaded[at].raw_data)]
    return len(given), len(wrong)


def turn(kind: str, folder: Path | str) -> dict[str, float]:
    """MiB/s of one adapter in an empty place, also after a restart."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place, "report.json")
        found = measured(kind, folder, report)
        again = measured(kind, folder, report, "--only", "load")
    return found | {"Load after a restart": again["Load"]}


def main() -> int:
    """Let the adapters take turns and print what they reached."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--url", help="an empty place in a bucket: VUA there, once, and no other")
    options = parser.parse_args()
    if options.url:
        for name, speed in turn("vua", options.url).items():
            print(f"{name:21} {speed:7.0f} MiB/s")
        return 0
    kinds = ["vua", "fs", "fs_native"]
    speeds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(options.turns):
        for kind in kinds[number % 3 :] + kinds[: number % 3]:
            with tempfile.TemporaryDirectory() as folder:
                for name, speed in turn(kind, Path(folder, "kv")).items():
                    speeds[name, kind].append(speed)
        print(
            f"turn {number + 1}", {key: round(one[-1]) for key, one in speeds.items()}, flush=True
        )
    for (name, kind), found in sorted(speeds.items()):
        ratio = median(found) / median(speeds[name, "fs"])
        print(f"{name:21} {kind:10} {median(found):7.0f} MiB/s ({ratio:.2f} of fs)")
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            given, wrong = damaged(kind, Path(folder, "kv"))
        print(f"{OBJECTS} objects damaged: {kind} delivers {given}, {wrong} of them wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
