"""Small errors in `capacity`, `store` and `connector`, and which tests notice them.

    python dev.py mutate [--mutants 60] [--seed 1] [--minutes 60]

Sites are found in the syntax trees: comparisons, `and` and `or`, `not`, numbers, truth values,
guards that leave a function, calls made for what they do. A sample is drawn by the text of each, so
that moving code does not change it. Every one is made in a copy of the source, and the quick tests
of its room run against it until one fails.

A mutant that changes nothing anybody could see also counts as survived: read the table.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from forks import forked

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
SOURCE = ROOT / "src"
ROOMS = ("capacity", "store", "connector")
QUICK = "not thorough and not soak and not gpu"
PYTEST = ("-q", "-p", "no:cacheprovider", "--assert=plain")
PRELOADED = ("torch", "numpy", "vllm.v1.outputs", "vllm.v1.core.sched.scheduler")
"""Imported once, before every mutant's process is forked. Nothing of VUA."""
SLOWER = 6
"""How much longer than without a mutant the tests may take; then it counts as noticed."""
FLIPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
}
TALK = ("log", "warnings", "logging")
LEAVES = (ast.Return, ast.Continue, ast.Break, ast.Raise)


class Mutant(NamedTuple):
    """One error."""

    path: str
    function: str
    """In which it is, with its class."""
    line: int
    number: int
    """Which one of its file's errors it is, in the order in which `Maker` meets them."""
    old: str
    new: str

    def draw(self, seed: int) -> bytes:
        """A number by which samples are drawn; whatever moves the code leaves it as it is."""
        key = f"{seed}:{self.function}:{self.old}:{self.new}"
        return hashlib.sha256(key.encode()).digest()


# -- making mutants --------------------------------------------------------------------------


def changed(node: ast.AST) -> ast.AST | None:
    """What stands in the place of a node that is wrong; None: it has no error."""
    found: ast.AST | None = None
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in FLIPPED:
        found = ast.Compare(node.left, [FLIPPED[type(node.ops[0])]()], node.comparators)  # type: ignore[list-item]
    elif isinstance(node, ast.BoolOp):
        found = ast.BoolOp(FLIPPED[type(node.op)](), node.values)  # type: ignore[arg-type]
    elif isinstance(node, ast.BinOp) and type(node.op) in FLIPPED:
        found = ast.BinOp(node.left, FLIPPED[type(node.op)](), node.right)  # type: ignore[arg-type]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        found = ast.Call(ast.Name("bool"), [node.operand], [])
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        is_bool = isinstance(node.value, bool)
        found = ast.Constant(not node.value if is_bool else node.value + 1)
    elif isinstance(node, ast.If) and isinstance(node.body[-1], LEAVES):
        found = ast.If(ast.Constant(value=False), node.body, node.orelse)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        found = ast.Pass()
    return found


def talks(node: ast.AST) -> bool:
    """Whether a node is only for people: messages, logs, docstrings, types."""
    if isinstance(node, ast.JoinedStr | ast.Raise):
        return True
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or talks(node.value)
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and ast.unparse(called.value) in TALK


class Maker(ast.NodeTransformer):
    """Finds the errors that a file's functions can have, and makes one of them."""

    def __init__(self, path: str, makes: int = -1) -> None:
        self.path, self.makes, self.inside = path, makes, ""
        self.runs = False
        self.found: list[Mutant] = []

    def visit(self, node: ast.AST) -> Any:
        """Note what can be wrong about a node, then about those below it."""
        if talks(node):
            return node
        before = self.inside, self.runs
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            self.inside = f"{self.inside}.{node.name}".lstrip(".")
            self.runs = self.runs or isinstance(node, ast.FunctionDef)
            node.body = [self.visit(one) for one in node.body]
        elif isinstance(node, ast.AnnAssign):
            node.value = node.value and self.visit(node.value)
        else:
            if self.runs and (new := changed(node)) is not None:
                old, text = (ast.unparse(one).partition("\n")[0] for one in (node, new))
                number = len(self.found)
                self.found.append(Mutant(self.path, self.inside, node.lineno, number, old, text))  # type: ignore[attr-defined]
                if number == self.makes:
                    return ast.copy_location(new, node)
            self.generic_visit(node)
        self.inside, self.runs = before
        return node


def mutants_of(text: str, path: str) -> list[Mutant]:
    """Every mutant of one file."""
    maker = Maker(path)
    maker.visit(ast.parse(text))
    return maker.found


def chosen(many: int, seed: int) -> list[Mutant]:
    """A sample, as many of each room and one of a function at most."""
    samples = list[list[Mutant]]()
    for room in ROOMS:
        paths = sorted((SOURCE / "vua" / room).rglob("*.py"))
        texts = {str(path.relative_to(SOURCE)): path.read_text() for path in paths}
        every = [mutant for path, text in texts.items() for mutant in mutants_of(text, path)]
        drawn = sorted(every, key=lambda mutant: mutant.draw(seed))
        one_each = {(mutant.path, mutant.function): mutant for mutant in reversed(drawn)}
        samples.append(sorted(one_each.values(), key=drawn.index)[: many // len(ROOMS)])
    return [mutant for row in zip(*samples, strict=False) for mutant in row]


# -- running ---------------------------------------------------------------------------------


class Failed:
    """A pytest plugin that notes which tests fail, and files that cannot even be imported."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.names += [report.nodeid] if report.failed else []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.names += [report.nodeid] if report.failed else []


def failing(room: str, source: Path, *options: str) -> list[str]:
    """Which of a room's quick tests fail with the VUA of a folder. For a child."""
    sys.path[:0] = [str(source), str(TESTS)]
    os.environ["PYTHONPATH"] = f"{source}:{TESTS}"
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp()
    Path(os.environ["TMPDIR"]).chmod(0o711)  # some tests are another user for a while
    failed = Failed()
    tests = [f"tests/unit/{room}", "tests/unit/test_core.py", "-m", QUICK]
    pytest.main([*tests, *PYTEST, *options], plugins=[failed])
    shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
    return failed.names


class Room:
    """A room's tests, and how long they take without a mutant."""

    def __init__(self, name: str, source: Path) -> None:
        """Run them once; those that fail by themselves are left out."""
        began_s = time.monotonic()
        ended = forked(lambda: failing(name, source), 3600)
        if ended.how != "well" or any("::" not in one for one in ended.value):  # not imported
            raise RuntimeError(ended.log[-4000:])
        self.name, self.took_s = name, time.monotonic() - began_s
        self.left_out = [f"--deselect={one}" for one in ended.value]

    def judged(self, mutant: Mutant, copy: Path) -> str:
        """What became of a mutant: the test that noticed it, or that none did."""
        target = copy / mutant.path
        sound = target.read_text()
        wrong = Maker(mutant.path, mutant.number).visit(ast.parse(sound))
        target.write_text(ast.unparse(ast.fix_missing_locations(wrong)))
        try:
            ended = forked(
                lambda: failing(self.name, copy, "-x", *self.left_out), SLOWER * self.took_s + 60
            )
        finally:
            target.write_text(sound)
        if ended.how != "well":
            return f"killed: the tests are {ended.how}"
        return f"killed: {ended.value[0]}" if ended.value else "**survived**"


def table(results: list[tuple[Mutant, str]]) -> str:
    """The count, and those that survived, in Markdown."""
    alive = [one for one in results if not one[1].startswith("killed")]
    lines = [
        f"{len(results) - len(alive)} of {len(results)} were noticed. These survived:",
        "",
        "| where | error |",
        "|---|---|",
    ]
    for mutant, _ in alive:
        old, new = (" ".join(part.split()).replace("|", "\\|") for part in (mutant.old, mutant.new))
        where = f"{mutant.path.removeprefix('vua/')} `{mutant.function}`"
        lines.append(f"| {where} | `{old}` -> `{new}` |")
    return "\n".join(lines)


def main() -> int:
    """Make the mutants, run the tests, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=60, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="those whose path or function has this word")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin none after that")
    asked = parser.parse_args()
    os.chdir(ROOT)
    mutants = [
        mutant
        for mutant in chosen(asked.mutants, asked.seed)
        if asked.only in f"{mutant.path} {mutant.function}"
    ]
    os.environ["OMP_NUM_THREADS"] = "1"  # threads of OpenMP do not survive a fork
    for module in PRELOADED:
        importlib.import_module(module)
    # the next mutant of a file may have its size and its second: Python would run the last one's
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    results = []
    with tempfile.TemporaryDirectory(prefix="vua-mutants-") as name:
        copy = Path(shutil.copytree(SOURCE, Path(name, "src")))
        Path(name).chmod(0o711)
        rooms = {one: Room(one, copy) for one in sorted({Path(m.path).parts[1] for m in mutants})}
        stop_s = time.monotonic() + 60 * asked.minutes
        for mutant in mutants:
            if time.monotonic() > stop_s:
                break
            outcome = rooms[Path(mutant.path).parts[1]].judged(mutant, copy)
            results.append((mutant, outcome))
            print(f"{mutant.path}:{mutant.line} {mutant.old!r} -> {mutant.new!r}: {outcome}")
            sys.stdout.flush()
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
