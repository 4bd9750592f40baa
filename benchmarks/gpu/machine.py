"""What machine this is, and what page-locking memory takes: one JSON object on the standard output.

python benchmarks/gpu/machine.py [--dir DIRECTORY] [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import torch

from vua import native

PACKAGES = ("torch", "triton", "vllm", "cuda-bindings", "nvidia-cufile", "numpy", "xxhash")
COMMANDS = (("nvidia-smi", "-L"), ("nvidia-smi", "topo", "-m"))


def installed(package: str) -> str | None:
    """The version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def said(*command: str) -> str:
    """What a command prints, or why it cannot be run."""
    if shutil.which(command[0]) is None:
        return "not installed"
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return (done.stdout or done.stderr).strip()


def locking_ms(mebibytes: int) -> tuple[float, int]:
    """Milliseconds that locking touched memory takes, and the answer of CUDA (0: locked)."""
    memory = np.ones(mebibytes << 20, dtype=np.uint8)
    runtime = torch.cuda.cudart()
    start = time.perf_counter()
    status = int(runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
    took = time.perf_counter() - start
    if status == 0:
        runtime.cudaHostUnregister(memory.ctypes.data)
    return round(took * 1e3, 2), status


def main() -> None:
    """Look, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dir", default=".")
    parser.add_argument("--device", default="cuda:0")
    arguments = parser.parse_args()
    gpu = arguments.device != "cpu"
    found: dict[str, object] = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30,
        "packages": {package: installed(package) for package in PACKAGES},
        "native": str(native.status()),
        "file system": said("df", "-hT", arguments.dir),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
    }
    for command in COMMANDS if gpu else ():
        found[" ".join(command)] = said(*command)
    if gpu:
        torch.cuda.init()
        sizes = (8, 32, 128, 512)
        found["cudaHostRegister: MiB to (ms, status)"] = {n: locking_ms(n) for n in sizes}
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
