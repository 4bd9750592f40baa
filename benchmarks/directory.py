"""Times the tools on a directory of very many chunks.

    python benchmarks/directory.py /tmp/big 100000

Makes a cache of that many tiny chunks (valid entries of 4.2 KiB in prompts of 32 chunks; on ext4
each takes 8 KiB of the disk and three inodes), runs the commands on it, and removes it again.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np

from vua.cli import main as vua
from vua.directory import create_store
from vua.entry import EntryCodec
from vua.identity import Identity
from vua.keys import KeyChain, token_ids
from vua.layout import KVLayout

LAYOUT = KVLayout(layers=1, kv_heads=1, k_dim=16, v_dim=16, dtype="BF16", chunk_tokens=4)
PROMPT_CHUNKS = 32


def fill(root: Path, chunks: int) -> None:
    """Write the entries, without the bookkeeping that a store does for each."""
    identity = Identity(model="benchmark", kv_dtype="BF16", chunk_tokens=4, name="benchmark")
    create_store(root, identity, LAYOUT)
    codec = EntryCodec(identity.namespace, LAYOUT, LAYOUT.full)
    payload = bytes(codec.file_nbytes - codec.header_nbytes)
    import xxhash

    empty = [xxhash.xxh3_64_intdigest(bytes(n)) for n in codec.unit_nbytes()]
    sums = np.array(empty, dtype=np.uint64)
    base = root / identity.namespace
    for fan in range(256):
        (base / f"{fan:02x}").mkdir(exist_ok=True)
    for prompt in range(-(-chunks // PROMPT_CHUNKS)):
        tokens = [prompt, *range(1, 4 * PROMPT_CHUNKS)]
        keys = KeyChain(token_ids(tokens), 4).first(PROMPT_CHUNKS)
        stamp = time.time_ns()
        for place, key in enumerate(keys):
            chunk = f"{base}/{key.name[:2]}/{key.name}"
            Path(chunk).mkdir(0o700)
            fd = os.open(f"{chunk}/{LAYOUT.full.name}.safetensors", os.O_WRONLY | os.O_CREAT, 0o600)
            os.write(fd, codec.encode_header(key, sums, writer="benchmark") + payload)
            os.close(fd)
            os.utime(chunk, ns=(stamp - 1000 * place, stamp - 1000 * place))
        if prompt % 256 == 0:
            print(f"\r{prompt * PROMPT_CHUNKS} chunks", end="", file=sys.stderr)
    print(file=sys.stderr)


def timed(*arguments: str) -> None:
    """Run one command, print its time and the end of what it says."""
    out, began = io.StringIO(), time.monotonic()
    with redirect_stdout(out):
        code = vua(arguments)
    took = time.monotonic() - began
    shown = " ".join(part for part in arguments if not part.startswith("/"))
    last = out.getvalue().strip().splitlines()[-1][:110]
    print(f"{took:8.2f} s  exit {code}  vua {shown}\n            {last}", flush=True)


def main() -> None:
    """Fill, time, remove."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("chunks", type=int)
    parser.add_argument("--keep", action="store_true", help="do not remove it")
    options = parser.parse_args()
    root, chunks = options.directory, options.chunks
    root.mkdir()
    try:
        began = time.monotonic()
        fill(root, chunks)
        print(f"{time.monotonic() - began:8.2f} s  made {chunks} chunks", flush=True)
        where, nbytes = str(root), chunks * (4096 + 256)
        timed("du", where, "--quick")
        timed("du", where)
        timed("ls", where)
        timed("gc", where, "--quick", "--min-free", "0", "--max-bytes", str(nbytes))
        timed("gc", where, "--min-free", "0", "--max-bytes", str(nbytes))
        timed("gc", where, "--quick", "--min-free", "0", "--max-bytes", str(int(nbytes * 0.99)))
        timed("verify", where)
        timed("rm", where, "--all")
    finally:
        if not options.keep:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
