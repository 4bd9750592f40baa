"""What moving KV caches to and from a GPU costs, each number beside its limit in the same run.

    python benchmarks/gpu/transfers.py [--only G1 G5] [--json FILE] [--dir DIRECTORY] [--device cpu]

G1  gather and scatter of paged blocks         / copy of the same bytes inside the device
G2  one 256-token chunk over PCIe, by path     / rate of a large pinned memcpy
G3  loads and saves at once                    / both one after the other
G4  matrix products while chunks are loaded    / alone
G5  files to blocks, verified, warm and cold   / slower one of preadv and PCIe; and other libraries
G6  blocks to files                            / transfer alone; raw write
G7  one 64-token chunk, from order to usable   / memcpy of 4 KiB
G8  layers loaded while earlier ones compute   / the longer one of both alone

The arms of a case take turns; medians of the rounds are compared. Whatever was moved is compared
with what it should be. A GPU machine needs torch with CUDA and Triton, numpy, safetensors, xxhash
and this repository (``PYTHONPATH=src``), and for G5's GDS arms cuda-bindings and nvidia-cufile; no
network. Meant to take under eight minutes on one GPU (more than that: ``--rounds 10``). With
``--device cpu`` sizes are tiny and streams do not exist: that only shows that the script works.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from files import fixed_cost, load_files, save_files
from harness import Bench
from memory import beside_compute, both_ways, gather_scatter, layer_by_layer, one_chunk

from vua.device.paged import choose

PARTS: dict[str, tuple[Callable[[Bench], None], bool]] = {
    "G1": (gather_scatter, False), "G2": (one_chunk, False), "G3": (both_ways, False),
    "G4": (beside_compute, True), "G5": (load_files, False), "G6": (save_files, False),
    "G7": (fixed_cost, False), "G8": (layer_by_layer, True),
}  # fmt: skip
"""Each part, and whether it makes no sense without a GPU."""


def main() -> None:
    """Run the parts asked for, and print one line per arm."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dir", help="where the files of G5 to G7 lie for a while")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if gpu else "CPU, tiny sizes"
    print(f"{name}; torch {torch.__version__}; rows moved by {choose(device).__module__}")
    with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
        bench = Bench(device, Path(directory), arguments.rounds, gpu)
        for part in arguments.only:
            run, needs_gpu = PARTS[part]
            if needs_gpu and not gpu:
                print(f"{part}  not without a GPU")
                continue
            start = time.monotonic()
            run(bench)
            print(f"    {part} took {time.monotonic() - start:.1f} s", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(bench.rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
