"""Does GPUDirect Storage work here? cuFile's own answer, and reads by it beside ordinary ones.

    python benchmarks/gpu/cufile.py [--dir DIRECTORY] [--json FILE] [--device cpu]

Makes the trial that VUA makes at start with `gds_mode`, then reads files of 8 MiB into device
memory, by cuFile and by reads and copies, and compares the bytes. Without the kernel module
nvidia-fs cuFile is in its compatibility mode, which passes through host memory, too; its rate says
nothing about GPUDirect Storage. The exit status is 1 where cuFile does not work. On the CPU there
are only the ordinary reads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from files import drop_from_page_cache
from harness import Bench, PosixMover, expect, once

from vua.device.gds import CuFileMover, Gds

FILES = 16


def rate(bench: Bench, mover: PosixMover | CuFileMover, paths: list[Path]) -> dict[str, float]:
    """GB/s of a mover, one file after the other, out of the page cache and from the disk."""
    nbytes = paths[0].stat().st_size
    memory = torch.zeros(nbytes, dtype=torch.uint8, device=bench.device)
    mover.attach(memory)
    opened = [os.open(path, os.O_RDONLY) for path in paths]
    handles = [mover.open(fd) for fd in opened]

    def read() -> None:
        for handle in handles:
            expect(mover.name, holds=mover.read(handle, memory, 0, nbytes, 0) == nbytes)

    drop_from_page_cache(paths)
    cold = once(bench, read)
    warm = statistics.median(once(bench, read) for _ in range(bench.rounds))
    expect(mover.name, holds=memory.cpu().numpy().tobytes() == paths[-1].read_bytes())
    for handle, fd in zip(handles, opened, strict=True):
        mover.close(handle)
        os.close(fd)
    mover.detach(memory)
    total = nbytes * len(paths) / 1e9
    return {"warm GB/s": round(total / warm, 2), "cold GB/s": round(total / cold, 2)}


def main() -> None:
    """Try, print, and write JSON if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dir", help="where the files lie for a while")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    gpu = device.type == "cuda"
    found: dict[str, object] = {"nvidia-fs": Path("/proc/driver/nvidia-fs").exists()}
    with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
        bench = Bench(device, Path(directory), 3, gpu)
        paths = [Path(directory, f"file-{number}") for number in range(FILES)]
        for path in paths:
            path.write_bytes(os.urandom(8 << 20 if gpu else 64 << 10))
        found["posix"] = rate(bench, PosixMover(), paths)
        if gpu:
            gds = Gds("auto", lambda: CuFileMover(device), Path(directory), device)
            found["trial"] = "well" if gds.mover is not None else gds.why
            if gds.mover is not None:
                found["cufile"] = rate(bench, gds.mover, paths)
            gds.close()
    print(json.dumps(found, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if found.get("trial", "well") != "well":
        sys.exit(f"cuFile does not work here: {found['trial']}")


if __name__ == "__main__":
    main()
