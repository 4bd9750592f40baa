"""How long `vua ui` takes to show a directory: first boxes (a sample), the whole tree, answers.

python tests/forest.py DIR 1000000; PYTHONPATH=tests python benchmarks/page.py DIR
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from ui import served


def measure(directory: Path, longest_s: float) -> dict[str, float | int]:
    """Open the page's server, and ask what the page asks until the whole tree is there."""
    began_s = time.monotonic()
    found: dict[str, float | int] = {}
    answers_s: list[float] = []
    with served(directory) as page:
        while time.monotonic() - began_s < longest_s:
            asked_s = time.monotonic()
            overview = page.json("overview")
            boxes = 0
            if overview["namespaces"]:
                largest = max(overview["namespaces"], key=lambda one: int(one["nbytes"]))
                boxes = len(page.json(f"tree?namespace={largest['namespace']}")["boxes"])
            answers_s.append(time.monotonic() - asked_s)
            if boxes and "first_boxes_s" not in found:
                found |= {"first_boxes_s": time.monotonic() - began_s, "first_boxes": boxes}
            if overview["looked_s"]:
                found |= {"whole_s": time.monotonic() - began_s, "boxes": boxes}
                found["chunks"] = sum(one["chunks"] for one in overview["namespaces"])
                break
            time.sleep(0.1)
        answers_s.sort()
        found["median_answer_s"] = answers_s[len(answers_s) // 2]
        found["slowest_answer_s"] = answers_s[-1]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--longest-s", type=float, default=600.0)
    words = parser.parse_args()
    print(json.dumps(measure(words.directory, words.longest_s), indent=1))
