"""Storage situations that users of caches have met, and what becomes of each way to use VUA there.

    python3 dev.py situations [--only moved,quota] [--faces library,CLI] [--markdown FILE]

Each cell of the table has a process, mounts and a directory of its own. A cache is opened and
filled; then something happens to its storage. *During* that, four old prompts and six new ones are
asked for and stored. When the storage can be used again, the time passes until a new prompt is
stored and found; then the old ones are asked for, and twelve new ones twice. What a cell counts:
prompts found with the right bytes, prompts not found (misses), wrong ones, and requests that
failed. The library and the commands may also *tell* of a problem, by an error of VUA's or an
exit code with a sentence; the faces of engines may not. Needs root, for mounts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, Final

from faces import FACES, ToldError, Transformers
from forks import forked
from places import MOST_NBYTES, SITUATIONS, NotRunError, Place, Situation, own_mounts

RECOVERY_S: Final = 30.0
"""So long is waited for a new prompt to be stored and found."""
CELL_S: Final = 900.0
_OLD: Final = range(4)
"""Prompts that are stored before."""


class Cell:
    def __init__(self, face: Any, place: Place) -> None:
        self.face, self.place, self.counts, self.why = face, place, Counter[str](), ""
        self.fresh = itertools.count(10)

    def ask(self, prompt: int, *, counted: bool = True) -> str:
        try:
            answer = self.face.ask(prompt)
        except ToldError as problem:
            self.why = self.why or str(problem)
            answer = "told" if self.face.tells else "failed"
        except Exception as problem:  # noqa: BLE001 - that is what is looked for
            self.why = f"{type(problem).__name__}: {problem}"
            traceback.print_exc()
            answer = "failed"
        if counted or answer in ("wrong", "failed"):
            self.counts[answer] += 1
        return answer

    def again(self, prompt: int, wait_s: float) -> str:
        """Ask until it is found: it is stored in the background."""
        stop_s = time.monotonic() + wait_s
        while (answer := self.ask(prompt, counted=False)) in ("miss", "told"):
            if time.monotonic() > stop_s:
                break
            time.sleep(0.01)
        return answer

    def soon(self) -> float:
        """Ask for new prompts until one of them is found when it is asked for again."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < RECOVERY_S:
            if self.again(next(self.fresh), 1.5) == "right":
                return time.monotonic() - began_s
        return float("inf")

    def run(self, happens: Situation) -> dict[str, Any]:
        steps = happens(self.place)
        try:
            self.face.open(next(steps) or str(self.place.root), **self.place.limits)
            self.soon()
            for prompt in _OLD:
                self.ask(prompt)
            self.counts.clear()
            if next(steps, None) == "during":
                for prompt in (*_OLD, *itertools.islice(self.fresh, 6)):
                    self.ask(prompt)
                next(steps, None)
        except NotRunError as problem:
            return {"not run": str(problem)}
        return self.after()

    def after(self) -> dict[str, Any]:
        """What it counts when the storage can be used again."""
        recovery_s = self.soon()
        for prompt in _OLD:
            self.ask(prompt)
        for prompt in itertools.islice(self.fresh, 12):
            self.ask(prompt, counted=False)
            self.counts[self.again(prompt, 2.0)] += 1
        if (hidden := self.place.hidden_nbytes) > 1.25 * MOST_NBYTES:
            self.why = f"{hidden} bytes in a place that nobody sees"
            self.counts["wrong"] += 1
        return {**self.counts, "recovery_s": max(recovery_s, self.soon()), "why": self.why}


def in_a_process(face: Any, happens: Situation) -> dict[str, Any]:
    """Run a cell in a fork; return what it counts."""
    folder = Path(tempfile.mkdtemp(prefix="vua-situations-"))

    def run() -> dict[str, Any]:
        own_mounts()
        return Cell(face, Place(folder)).run(happens)

    ended = forked(run, CELL_S)
    subprocess.run(["chattr", "-R", "-i", str(folder)], check=False, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)
    found: dict[str, Any] = ended.value or {"failed": 1, "why": f"{ended.how}: {ended.log[-2000:]}"}
    return found


def fault(cell: dict[str, Any]) -> str:
    """What is wrong with a cell; nothing where all is as promised."""
    if "not run" in cell:
        return ""
    if cell.get("wrong") or cell.get("failed"):
        return cell["why"] or "wrong bytes"
    return "" if cell["recovery_s"] < float("inf") else f"nothing is stored again ({cell['why']})"


def shown(cell: dict[str, Any] | None) -> str:
    """A cell as text: right, missed, wrong, failed; told; how soon it stores again."""
    if cell is None or "not run" in cell:
        return "not run"
    numbers = "/".join(str(cell.get(name, 0)) for name in ("right", "miss", "wrong", "failed"))
    told = f" {cell['told']} told" if cell.get("told") else ""
    seconds = cell.get("recovery_s", float("inf"))
    after = (
        "never" if seconds == float("inf") else "at once" if seconds < 0.3 else f"{seconds:.1f} s"
    )
    return f"{numbers}{told}, {after}"


def slowest(found: dict[str, dict[str, Any]]) -> str:
    """Within how many seconds the slowest way to use VUA stores again, and in which situations."""
    groups: dict[float, list[str]] = {}
    for name, cells in found.items():
        if seconds := [cell["recovery_s"] for cell in cells.values() if "recovery_s" in cell]:
            most = max(seconds)
            ends = most if most == float("inf") else max(1, math.ceil(most))
            groups.setdefault(ends, []).append(name[0].upper() + name[1:])
    lines = ["| stores again | after |", "|---|---|"]
    for most in sorted(groups):
        within = "never" if most == float("inf") else f"within {most} s"
        lines.append(f"| {within} | {'. '.join(groups[most])} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print each cell, and what is not as promised."""
    parser = argparse.ArgumentParser(prog="situations", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="words of names of situations, with commas")
    parser.add_argument("--faces", default=",".join(FACES), help="which of them (%(default)s)")
    parser.add_argument("--markdown", type=Path, help="put the table into this page")
    parser.add_argument("--json", type=Path, help="write all cells to this file")
    parser.add_argument("--verbose", action="store_true", help="show what is logged")
    asked = parser.parse_args(arguments)
    if os.geteuid():
        print("situations: needs root, for mounts")
        return 2
    if not asked.verbose:
        logging.disable(logging.CRITICAL)
    words = [word for word in asked.only.split(",") if word]
    names = [one for one in SITUATIONS if not words or any(word in one for word in words)]
    faces = asked.faces.split(",")
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    faults = []
    for face in faces:
        try:
            warmed = FACES[face]()
            if isinstance(warmed, Transformers):
                warmed.model()
        except ImportError as problem:
            for name in names:
                found[name][face] = {"not run": f"{face}: {problem}"}
            continue
        for name in names:
            cell = found[name][face] = in_a_process(warmed, SITUATIONS[name])
            print(f"{face}: {name}: {shown(cell)}  {fault(cell)}", flush=True)
            faults += [f"{face}: {name}"] if fault(cell) else []
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))
    if asked.markdown:
        page, mark = asked.markdown.read_text(), "<!-- situations -->"
        before, _, rest = page.partition(mark)
        asked.markdown.write_text(
            f"{before}{mark}\n{slowest(found)}\n<!-- /situations -->"
            + rest.partition("<!-- /situations -->")[2]
        )
    print(f"{len(faults)} cells are not as promised: {faults}" if faults else "all as promised")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
