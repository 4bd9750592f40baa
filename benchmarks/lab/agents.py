"""Makes traces for `dev.py replay --block-tokens 64` of agents' recorded requests.

    git clone https://github.com/LMCache/lmcache-agent-trace CLONE
    PYTHONPATH=src:benchmarks python -m lab.agents CLONE/magagent magagent.jsonl

The recordings hold texts (Apache-2.0). A block is 256 bytes of a request's text, about 64 tokens.
Its id stands for all of the text up to its end. All sessions run at their real times, and have
numbers: one for each file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

BLOCK_NBYTES = 256
BLOCK_TOKENS = 64


def converted(folder: Path) -> list[dict[str, object]]:
    """Return a folder's requests, in the order of time."""
    asked = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            one = json.loads(line)
            asked.append((int(one["timestamp"]), path.name, one["input"].encode()))
    asked.sort(key=lambda one: one[:2])
    ids: dict[bytes, int] = {}
    sessions: dict[str, int] = {}
    found: list[dict[str, object]] = []
    for time_us, name, text in asked:
        ends = range(BLOCK_NBYTES, len(text) + BLOCK_NBYTES, BLOCK_NBYTES)
        blocks = [ids.setdefault(text[:end], len(ids)) for end in ends]
        found.append({
            "timestamp": (time_us - asked[0][0]) // 1000,
            "input_length": len(text) * BLOCK_TOKENS // BLOCK_NBYTES,
            "session": sessions.setdefault(name, len(sessions)),
            "hash_ids": blocks,
        })  # fmt: skip
    return found


def main() -> None:
    """Convert one folder."""
    folder, target = map(Path, sys.argv[1:])
    lines = [json.dumps(one) + "\n" for one in converted(folder)]
    target.write_text("".join(lines), encoding="utf-8")
    print(f"{target}: {len(lines)} requests")


if __name__ == "__main__":
    main()
