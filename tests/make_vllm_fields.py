"""Lists the fields of all configuration classes that a vLLM's ``VllmConfig`` reaches.

    python tests/make_vllm_fields.py vllm-0.28.0.whl vllm-0.32.0.whl ... > tests/vllm_fields.json

Reads the sources out of unpacked or packed wheels, and runs nothing of them. The output says for
each class which fields the releases have that are given: ``{class: {"0.28 0.32": "field field"}}``.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = "VllmConfig"


def sources(wheel: Path) -> Iterator[str]:
    """The sources of `vllm.config`, from a wheel or from a folder that holds `vllm`."""
    if wheel.is_dir():
        for path in sorted((wheel / "vllm" / "config").glob("*.py")):
            yield path.read_text()
        return
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            if re.fullmatch(r"vllm/config/\w+\.py", name):
                yield packed.read(name).decode()


def release(wheel: Path) -> str:
    """Major and minor number, out of the file's name."""
    found = re.search(r"(\d+\.\d+)", wheel.name)
    if found is None:
        sys.exit(f"{wheel}: no version in the name; call it like vllm-0.32.0")
    return found[1]


def is_config(node: ast.ClassDef) -> bool:
    """Whether a class is a dataclass, by its decorators (vLLM's own is called `config`)."""
    called = (each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)
    return any(isinstance(each, ast.Name) and each.id in ("config", "dataclass") for each in called)


def names_in(annotation: ast.expr) -> set[str]:
    """All names in an annotation, those in quoted ones too."""
    found = set()
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.update(re.findall(r"\w+", node.value))
    return found


class Sources:
    """The classes of one wheel's `vllm.config`, and what its other names stand for."""

    def __init__(self, wheel: Path) -> None:
        self.classes: dict[str, ast.ClassDef] = {}
        self.aliases: dict[str, set[str]] = defaultdict(set)
        for text in sources(wheel):
            for node in ast.parse(text).body:
                if isinstance(node, ast.ClassDef):
                    self.classes[node.name] = node
                elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                    self.add_alias(node, node.value)

    def add_alias(self, node: ast.Assign | ast.AnnAssign, value: ast.expr) -> None:
        """Note which names an assigned name may stand for."""
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                self.aliases[target.id] |= names_in(value)

    def fields(self, name: str) -> Iterator[tuple[str, set[str]]]:
        """The fields of a class and of its bases, with the names in their annotations."""
        node = self.classes.get(name)
        if node is None:
            return
        for base in node.bases:
            if isinstance(base, ast.Name):
                yield from self.fields(base.id)
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                names = names_in(line.annotation)
                if not names & {"ClassVar", "InitVar"}:
                    yield line.target.id, names

    def reached(self) -> dict[str, list[str]]:
        """The fields of each class that is reached from `ROOT`."""
        found: dict[str, list[str]] = {}
        waiting = [ROOT]
        while waiting:
            name = waiting.pop()
            if name not in self.classes or not is_config(self.classes[name]):
                waiting += self.aliases.pop(name, set())
            elif name not in found:
                fields = list(self.fields(name))
                found[name] = [field for field, _ in fields]
                for _, names in fields:
                    waiting += names
        return found


def main() -> None:
    """Print the lists of all wheels that are named."""
    has: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for wheel in sorted(map(Path, sys.argv[1:]), key=lambda path: float(release(path)[2:])):
        for name, fields in Sources(wheel).reached().items():
            for field in fields:
                has[name][field].append(release(wheel))
    lines = []
    for name in sorted(has):
        by_releases: dict[str, list[str]] = defaultdict(list)
        for field, releases in has[name].items():
            by_releases[" ".join(releases)].append(field)
        joined = {releases: " ".join(sorted(fields)) for releases, fields in by_releases.items()}
        lines.append(f" {json.dumps(name)}: {json.dumps(joined, indent=2)}")
    print("{\n" + ",\n".join(lines) + "\n}")


if __name__ == "__main__":
    main()
