"""Mirrors `vua.io.files`: modes that hold under any umask, and where `chmod` is refused."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import vua
from helpers import SOON_S, TESTS, DirectoryTest

SOURCE = Path(vua.__file__).parent
MAKERS = {"mkdir", "makedirs", "chmod", "fchmod", "lchmod", "mkdtemp", "mkstemp", "touch"}
MAKERS |= {"write_text", "write_bytes", "mknod", "mkfifo"}
ALLOWED = {"io/files.py": "the functions that all others call"}
PERHAPS = re.compile(rf"""\.({"|".join(MAKERS)})\(|O_CREAT|open\(.*['"][wax]b?\+?['"]""")
CYCLE = """
    import os, sys, torch
    from unittest import mock
    root, how, out = sys.argv[1], sys.argv[2], os.path.join(os.path.dirname(sys.argv[1]), "out")
    if how == "refused":
        refused = PermissionError(1, "Operation not permitted")
        os.chmod = os.fchmod = os.lchmod = mock.Mock(side_effect=refused)
        os.umask(0o022)
    else:
        os.umask(0o777)
    from commands import run
    from helpers import caches_of, until
    from vua.core import VUA, VUAConfig
    from vua.format.keys import token_ids
    def put(vua, number):
        tokens = torch.arange(64) + 1000 * number
        return vua.put(tokens, caches_of(layers=1, heads=1, tokens=64, dim=8))
    def found(vua, number):
        return vua.get_closest(torch.arange(64) + 1000 * number).num_tokens
    settings = {"split_factor": 4, "model": "m", "max_bytes": 200_000, "min_free_bytes": 0}
    with VUA(VUAConfig(**settings), root) as vua:
        for number in range(20):
            assert put(vua, number) == 16, number
        assert found(vua, 19) == 64
        counts = vua.namespace().capacity.counts
        assert counts["chunks_evicted"] and not counts["chunks_refused"], counts
    name = VUA(VUAConfig(split_factor=4, model="m"), root).namespace().keys(
        token_ids(torch.arange(64) + 19000)
    )[15].name
    for words in (
        ["pin", root, name], ["pin", root], ["pin", root, name, "--remove"],
        ["ttl", root, "1h"], ["ls", root], ["du", root], ["verify", root], ["events", root],
        ["export", root, out, "--all"], ["gc", root, "--max-bytes", "100K", "--min-free", "0"],
        ["import", root, out], ["key", os.path.join(os.path.dirname(root), "key")],
        ["gc", root, "--set", "--max-bytes", "1G"], ["doctor", root],
    ):
        code, said, failed = run(*words)
        assert code == 0 or words[0] == "doctor", (words, code, said, failed)
        assert "Traceback" not in failed, failed
        assert "probe failed" not in said, said
    with VUA(VUAConfig(split_factor=4, model="m"), root) as vua:
        assert found(vua, 19) == 64
        assert put(vua, 30) == 16
    for above, folders, files in os.walk(root):
        for name in folders + files:
            mode = os.lstat(os.path.join(above, name)).st_mode & 0o777
            assert mode & 0o600 == 0o600, (above, name, oct(mode))
            assert how == "refused" or mode in (0o700, 0o600), (above, name, oct(mode))
    print("done")
"""


class TestModes(DirectoryTest):
    """Everything that is made."""

    def test_no_other_maker(self) -> None:
        """No file and no directory is made, and no mode changed, outside of `vua.io.files`."""
        found = {
            str(path.relative_to(SOURCE))
            for path in SOURCE.rglob("*.py")
            if "testing" not in path.parts
            and PERHAPS.search(text := path.read_text("utf-8"))
            and any(makers(ast.parse(text)))
        }
        self.assertEqual(set(ALLOWED), found)

    def cycle(self, how: str) -> None:
        """Run all that writes, as one for whom modes hold, in a process of its own."""
        place = self.root / "place"
        place.mkdir(mode=0o700)
        code = f"import sys; sys.path.insert(0, {str(TESTS)!r})\n{textwrap.dedent(CYCLE)}"
        drop = [
            "setpriv",
            "--bounding-set",
            "-dac_override,-dac_read_search",
        ]  # modes hold for root
        done = subprocess.run(
            [*drop * (os.geteuid() == 0), sys.executable, "-c", code, str(place / "kv"), how],
            capture_output=True,
            text=True,
            timeout=4 * SOON_S,
            check=False,
            env=os.environ | {"HOME": str(place), "XDG_CACHE_HOME": str(place / "cache")},
        )
        self.assertEqual("done", done.stdout[-5:].strip(), done.stdout + done.stderr)

    @pytest.mark.thorough
    def test_umask(self) -> None:
        """Under a umask that takes all rights a cache is written, read, evicted from and kept."""
        self.cycle("umask")

    @pytest.mark.thorough
    def test_no_chmod(self) -> None:
        """So it is where every `chmod` is refused."""
        self.cycle("refused")


def makers(tree: ast.Module) -> Iterator[ast.Call]:
    """Yield calls that make a file or a directory, or change a mode."""
    creating = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and "O_CREAT" in ast.unparse(node.value)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        name = node.func.id if isinstance(node.func, ast.Name) else name
        if name in MAKERS and not (name == "touch" and node.args):
            yield node
        elif name == "open":
            said = ast.unparse(node)
            names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
            by_mode = re.search(r"""open\((?!fd|os\.open|make_file).*['"][wax]b?\+?['"]""", said)
            if "O_CREAT" in said or creating & names or by_mode:
                yield node
