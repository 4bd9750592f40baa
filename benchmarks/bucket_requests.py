"""Counts the requests that each command sends to a bucket, and says what they cost for very many.

    python benchmarks/bucket_requests.py 3000 21000

Fills a bucket in memory with so many chunks (one object each, in prompts of 32 chunks, with the
objects `parents/` that engines write), runs every command that looks at all of it, and counts
requests by kind. Two sizes give the requests that every call needs and those for each chunk. So it
prints those for 10^6 and 10^8 chunks, and what they cost by the prices of
`vua.storage`. The entries of a second tensor-parallel rank are objects of their own,
and come on top.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout

import numpy as np
import xxhash

from directory import CODEC, IDENTITY, LAYOUT, PROMPT_CHUNKS, keys_of
from vua.cli import main as vua
from vua.format.parse import encode_header
from vua.storage import KINDS, PRICES, cost_dollars
from vua.storage.base import entry_name
from vua.storage.bucket import Bucket
from vua.storage.location import BucketPath
from vua.storage.names import entry_path
from vua.storage.object import FULL, write_parents
from vua.store.namespace import Namespace
from vua.store.place import locate

TOO_MUCH = "`gc`, a hundredth too much"
UNTOLD = "`gc`, the same without `parents/`"
COMMANDS = {
    "`ls`": ["ls", "URL"],
    "`du`": ["du", "URL"],
    "`top --once` (two looks)": ["top", "URL", "--once", "--interval", "0.001"],
    "`events`": ["events", "URL"],
    "`gc`, nothing to do": ["gc", "URL", "--max-bytes", "1P", "--yes"],
    TOO_MUCH: ["gc", "URL", "--max-bytes", "LESS", "--yes"],
    UNTOLD: ["gc", "URL", "--max-bytes", "LEAST", "--yes"],
    "`verify`": ["verify", "URL"],
    "`rm --all`": ["rm", "URL", "--all", "--yes"],
}
RARE = {
    (TOO_MUCH, "delete"): 100_000,
    (UNTOLD, "delete"): 100_000,
    (UNTOLD, "put"): FULL,
}
"""One request for so many chunks, of which the measured numbers have too few to tell."""
TOLD = 1024
"""Chunks that one object of a writer tells of."""


def fill(url: str, chunks: int) -> Bucket:
    """Write the objects of so many chunks."""
    namespace = Namespace.create(locate(url, create=True), IDENTITY, [LAYOUT])
    assert isinstance(namespace, Namespace)
    namespace.close()
    bucket = Bucket.at(url)
    place = BucketPath(bucket) / IDENTITY.namespace
    sums = [xxhash.xxh3_64_intdigest(bytes(nbytes)) for nbytes in CODEC.block_nbytes()]
    table = np.array(sums, dtype=np.uint64)
    payload, known = bytes(CODEC.file_nbytes - CODEC.header_nbytes), list[tuple[str, str]]()
    for number in range(chunks):
        keys = keys_of(number // PROMPT_CHUNKS)
        key = keys[number % PROMPT_CHUNKS]
        header = encode_header(CODEC, key, table, writer="benchmark")
        path = entry_path(entry_name(key.name, LAYOUT.full))
        bucket.put((place / path).key, header + payload)
        known.append((key.name, key.before.hex()))
    for start in range(0, chunks, TOLD):
        write_parents(place, known[start : start + TOLD])
    return bucket


def counted(url: str, bucket: Bucket, words: list[str]) -> Counter[str]:
    """The requests of one command."""
    before = bucket.counts.copy()
    with redirect_stdout(io.StringIO()), redirect_stderr(sys.stderr):
        code = vua([url if word == "URL" else word for word in words])
    if code:
        raise SystemExit(f"{words} ended with {code}")
    sent = bucket.counts - before
    return Counter({kind: sent[kind] for kind in KINDS})


def measured(number: int, chunks: int) -> dict[str, Counter[str]]:
    """The requests of all commands on so many chunks."""
    url = f"memory:///requests-{number}"
    bucket, found = fill(url, chunks), {}
    nbytes = chunks * CODEC.file_nbytes
    limits = {"LESS": f"{nbytes * 99 // 100}B", "LEAST": f"{nbytes * 98 // 100}B"}
    for name, words in COMMANDS.items():
        if name == UNTOLD:
            bucket.delete([one.key for one in bucket.walk() if "/parents/" in one.key])
        found[name] = counted(url, bucket, [limits.get(word, word) for word in words])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chunks", type=int, nargs=2)
    sizes = sorted(parser.parse_args().chunks)
    small, large = (measured(number, chunks) for number, chunks in enumerate(sizes))
    print(f"prices: {PRICES}")
    powers = (6, 8)
    print("| | " + " | ".join(f"10^{power} chunks | $" for power in powers) + " |")
    print("|---|" + "--:|--:|" * len(powers))
    for name in COMMANDS:
        row = []
        for power in powers:
            each = {
                kind: (large[name][kind] - small[name][kind]) / (sizes[1] - sizes[0])
                for kind in KINDS
            }
            fixed = {kind: large[name][kind] - each[kind] * sizes[1] for kind in KINDS}
            sent = {kind: round(max(0.0, fixed[kind]) + each[kind] * 10**power) for kind in KINDS}
            sent |= {
                kind: -(-(10**power) // chunks) for (one, kind), chunks in RARE.items()
                if one == name
            }  # fmt: skip
            kinds = ", ".join(f"{count:,} {kind.upper()}" for kind, count in sent.items() if count)
            row.append(f"{kinds} | {cost_dollars(sent):.4f}")
        print(f"| {name} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
