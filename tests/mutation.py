"""Small errors in `capacity`, `store` and `connector`, and which tests notice them.

    python dev.py mutate [--mutants 60] [--seed 1] [--minutes 60] [--map FILE]

Sites are found in the syntax trees: comparisons, `and` and `or`, `not`, numbers, truth values,
guards that leave a function, calls made for what they do. A sample is drawn by the text of each, so
that moving code does not change it. Every one is made in a copy of the source, and the quick tests
that call the function run against it, the fastest first, until one fails. Tests of other functions
are not run.

A mutant that changes nothing anybody could see also counts as survived: read the table.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
SOURCE = ROOT / "src"
ROOMS = ("capacity", "store", "connector")
QUICK = "not thorough and not soak and not gpu"
PYTEST = ("-q", "-p", "no:cacheprovider", "--assert=plain")
BELONG = ("capacity", "store", "connector", "vllm", "format", "testing", "cli", "device")
"""Folders of tests/unit that call these rooms; so does tests/unit/test_core.py."""
PRELOADED = ("torch", "numpy", "vllm.v1.outputs", "vllm.v1.core.sched.scheduler")
"""Imported once, before every mutant's process is forked. Nothing of VUA."""
TESTS_S = 10.0
"""A mutant meets the fastest of its tests, so many seconds of them."""
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
PR_SET_PDEATHSIG = 1  # linux/prctl.h: nobody is left behind
LEAVES = (ast.Return, ast.Continue, ast.Break, ast.Raise)


@dataclass(frozen=True)
class Mutant:
    """One error: a text that stands in a file exactly there is replaced by another one."""

    path: str
    function: str
    """In which it is, with its class."""
    line: int
    start: int
    stop: int
    old: str
    new: str

    def text(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.stop :]

    def draw(self, seed: int) -> bytes:
        """A number by which samples are drawn; whatever moves the code leaves it as it is."""
        key = f"{seed}:{self.function}:{self.old}:{self.new}"
        return hashlib.sha256(key.encode()).digest()


# -- making mutants --------------------------------------------------------------------------


def changed(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """What can be wrong about one node: the part to replace, and by what text."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in FLIPPED:
        flipped = FLIPPED[type(node.ops[0])]()
        yield node, ast.unparse(ast.Compare(node.left, [flipped], node.comparators))  # type: ignore[list-item]
    elif isinstance(node, ast.BoolOp):
        flipped = FLIPPED[type(node.op)]()
        yield node, f"({ast.unparse(ast.BoolOp(flipped, node.values))})"  # type: ignore[arg-type]
    elif isinstance(node, ast.BinOp) and type(node.op) in FLIPPED:
        flipped = FLIPPED[type(node.op)]()
        yield node, f"({ast.unparse(ast.BinOp(node.left, flipped, node.right))})"  # type: ignore[arg-type]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"bool({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield node, str(node.value + 1)
    elif isinstance(node, ast.If) and isinstance(node.body[-1], LEAVES):
        yield node.test, "False"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, "pass"


def talks(node: ast.AST) -> bool:
    """Whether a node is only for people: messages, logs, docstrings, types."""
    if isinstance(node, ast.JoinedStr | ast.Raise):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and ast.unparse(called.value) in TALK


def within(
    node: ast.AST, path: str, lines: list[bytes], inside: str = "", *, runs: bool = False
) -> Iterator[Mutant]:
    """Every mutant of the functions below a node of a file with these lines.

    ``inside``: the function or class that the node is in; ``runs``: it is a function.
    """
    runs = runs or isinstance(node, ast.FunctionDef)
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        inside = f"{inside}.{node.name}" if inside else node.name
    below = node.body if isinstance(node, ast.FunctionDef) else list(ast.iter_child_nodes(node))
    for child in below:
        if talks(child) or (isinstance(child, ast.Expr) and talks(child.value)):
            continue
        if isinstance(child, ast.AnnAssign):
            child.annotation = ast.Constant(None)
        for part, new in changed(child) if runs else ():
            yield placed(part, new, path, lines, inside)
        yield from within(child, path, lines, inside, runs=runs)


def placed(part: Any, new: str, path: str, lines: list[bytes], inside: str) -> Mutant:
    """The mutant that replaces a part of a file by a text."""
    before = [0]
    for line in lines:
        before.append(before[-1] + len(line))
    start = before[part.lineno - 1] + part.col_offset
    stop = before[part.end_lineno - 1] + part.end_col_offset
    old = b"".join(lines)[start:stop].decode()
    return Mutant(path, inside, part.lineno, start, stop, old, new)


def mutants_of(text: str, path: str) -> list[Mutant]:
    """Every mutant of one file, those left out that would not change or not compile."""
    source = text.encode()
    found = within(ast.parse(text), path, source.splitlines(keepends=True))
    return [mutant for mutant in dict.fromkeys(found) if compiles(mutant.text(source), mutant)]


def compiles(text: bytes, mutant: Mutant) -> bool:
    """Whether it is a program, and another one."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return mutant.old != mutant.new


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


# -- which tests call what -------------------------------------------------------------------


class Calls:
    """A pytest plugin that notes which functions each test calls, and how long it takes."""

    def __init__(self) -> None:
        self.tests: dict[str, tuple[float, set[str]]] = {}
        self.failed: set[str] = set()
        self._now: set[str] = set()
        self._start = f"{SOURCE}/"

    def _look(self, frame: FrameType, event: str, _: Any) -> None:
        """Called by the interpreter when a function is; returns None: not for its lines."""
        code = frame.f_code
        if code.co_filename.startswith(self._start):
            self._now.add(f"{code.co_filename.removeprefix(self._start)}:{code.co_firstlineno}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Leave out a test that fails without a mutant."""
        if report.failed:
            self.failed.add(report.nodeid)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._now, began = set(), time.monotonic()
        threading.settrace(self._look)
        sys.settrace(self._look)
        yield
        sys.settrace(None)
        self.tests[item.nodeid] = (time.monotonic() - began, self._now)


def function_lines(path: str) -> dict[str, int]:
    """Where the functions of a file begin, by name with class; decorators count."""
    found = {}

    def look(node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = inside
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                name = f"{inside}.{child.name}" if inside else child.name
                found[name] = min([child.lineno, *(d.lineno for d in child.decorator_list)])
            look(child, name)

    look(ast.parse((SOURCE / path).read_text()), "")
    return found


def in_child(work: Callable[[], Any], source: Path, timeout_s: float) -> Any:
    """What ``work`` returns in a forked process that imports VUA from ``source``; None: no end.

    Raises RuntimeError with what it printed when it broke.
    """
    with tempfile.TemporaryDirectory(prefix="vua-mutation-") as folder:
        Path(folder).chmod(0o711)  # some tests are another user for a while
        answer, pid = Path(folder, "answer"), os.fork()
        if pid == 0:
            try:
                os.setsid()
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                log = os.open(Path(folder, "log"), os.O_WRONLY | os.O_CREAT, 0o600)
                os.dup2(log, 1)
                os.dup2(log, 2)
                sys.path[:0] = [str(source), str(TESTS)]
                os.environ["PYTHONPATH"] = f"{source}:{TESTS}"
                os.environ["TMPDIR"] = tempfile.tempdir = folder
                answer.write_text(json.dumps(work()))
            except BaseException:  # noqa: BLE001 - the parent shows it
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)
        stop_s = time.monotonic() + timeout_s
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > stop_s:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return None
            time.sleep(0.05)
        if not answer.exists():
            raise RuntimeError(Path(folder, "log").read_text()[-4000:])
        return json.loads(answer.read_text())


def call_map() -> dict[str, tuple[float, list[str]]]:
    """Per test how long it takes, and the functions (``path:line``) that it calls. For a child."""
    calls = Calls()
    folders = [f"tests/unit/{name}" for name in BELONG]
    asked = [*folders, "tests/unit/test_core.py", "-m", QUICK, *PYTEST]
    if pytest.main(asked, plugins=[calls]) not in (0, 1) or not calls.tests:
        raise RuntimeError("the tests cannot be run")
    return {
        test: (seconds, sorted(found))
        for test, (seconds, found) in calls.tests.items()
        if test not in calls.failed
    }


# -- running ---------------------------------------------------------------------------------


class Failed:
    """A pytest plugin that notes the first test that fails."""

    def __init__(self) -> None:
        self.first: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.first is None:
            self.first = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that cannot even be imported."""
        if report.failed and self.first is None:
            self.first = f"{report.nodeid} (import)"


def first_failing(tests: list[str]) -> str | None:
    """The first of these tests that fails. For a child."""
    failed = Failed()
    pytest.main([*tests, "-x", *PYTEST], plugins=[failed])
    return failed.first or ""


def judged(mutant: Mutant, tests: list[tuple[float, str]], copy: Path) -> str:
    """What became of a mutant: the test that noticed it, or that none did."""
    if not tests:
        return "survived: no quick test calls it"
    target, seconds, names = copy / mutant.path, 0.0, list[str]()
    for took, name in sorted(tests):
        if names and seconds + took > TESTS_S:
            break
        seconds += took
        names.append(name)
    sound = target.read_bytes()
    target.write_bytes(mutant.text(sound))
    try:
        found = in_child(lambda: first_failing(names), copy, SLOWER * seconds + 60)
    finally:
        target.write_bytes(sound)
    if found is None:
        return "killed: the tests hang"
    where = found.removeprefix("tests/unit/")
    return f"killed: {where}" if found else f"**survived** {len(names)} tests"


def table(results: list[tuple[Mutant, str]]) -> str:
    """The count, and those that survived, in Markdown."""
    alive = [one for one in results if not one[1].startswith("killed")]
    lines = [
        f"{len(results) - len(alive)} of {len(results)} were noticed. These survived:",
        "",
        "| where | error | unnoticed by |",
        "|---|---|---|",
    ]
    for mutant, outcome in alive:
        old, new = (" ".join(part.split()).replace("|", "\\|") for part in (mutant.old, mutant.new))
        where = f"{mutant.path.removeprefix('vua/')} `{mutant.function}`"
        by = outcome.removeprefix("**survived** ")
        lines.append(f"| {where} | `{old}` -> `{new}` | {by} |")
    return "\n".join(lines)


def main() -> int:
    """Make the mutants, run the tests, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=60, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="those whose path or function has this word")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin none after that")
    parser.add_argument("--map", type=Path, help="which test calls what: kept, or taken from here")
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
    if asked.map and asked.map.exists():
        calls = json.loads(asked.map.read_text())
    else:
        calls = in_child(call_map, SOURCE, 3600)
        if asked.map:
            asked.map.write_text(json.dumps(calls))
    callers = defaultdict(list)
    for test, (seconds, functions) in calls.items():
        for function in functions:
            callers[function].append((seconds, test))
    results = []
    with tempfile.TemporaryDirectory(prefix="vua-mutants-") as name:
        copy = Path(shutil.copytree(SOURCE, Path(name, "src")))
        stop_s = time.monotonic() + 60 * asked.minutes
        for mutant in mutants:
            if time.monotonic() > stop_s:
                break
            line = function_lines(mutant.path)[mutant.function]
            outcome = judged(mutant, callers[f"{mutant.path}:{line}"], copy)
            results.append((mutant, outcome))
            print(f"{mutant.path}:{mutant.line} {mutant.old!r} -> {mutant.new!r}: {outcome}")
            sys.stdout.flush()
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
