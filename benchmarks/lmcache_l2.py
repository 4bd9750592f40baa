"""VUA as LMCache's L2 tier beside LMCache's own: `lmcache bench l2`, taking turns, and verified.

After `dev.py lmcache`: `PYTHONPATH=src:$HOME/.cache/vua/engines/lmcache-0.5.6 .venv/bin/python
benchmarks/lmcache_l2.py [--turns 3]`. Every turn gives each adapter a fresh directory, stores and
loads objects, and loads them again in a new process. Printed are medians over the turns, of
each turn's median round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

OBJECTS, OBJECT_KIB, ROUNDS = 16, 8192, 5
QUIET = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_DISABLE_BANNER": "1",
}


def adapter(kind: str, folder: Path) -> dict[str, Any]:
    """The specification of an adapter, as LMCache's command line takes it."""
    if kind != "vua":
        return {"type": kind, "base_path": str(folder)}
    return {
        "type": "plugin",
        "module_path": "vua.lmcache.l2_adapter",
        "class_name": "VUAL2Adapter",
        "adapter_params": {"path": str(folder)},
    }


def measured(kind: str, folder: Path, report: Path, *only: str) -> dict[str, float]:
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


def main() -> int:
    """Let the adapters take turns and print what they reached."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    turns = parser.parse_args().turns
    kinds = ["vua", "fs", "fs_native"]
    speeds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for turn in range(turns):
        for kind in kinds[turn % 3 :] + kinds[: turn % 3]:
            with tempfile.TemporaryDirectory() as place:
                folder, report = Path(place, "kv"), Path(place, "report.json")
                for name, speed in measured(kind, folder, report).items():
                    speeds[name, kind].append(speed)
                again = measured(kind, folder, report, "--only", "load")
                speeds["Load after a restart", kind].append(again["Load"])
    for (name, kind), found in sorted(speeds.items()):
        ratio = median(found) / median(speeds[name, "fs"])
        print(f"{name:21} {kind:10} {median(found):7.0f} MiB/s ({ratio:.2f} of fs)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
