"""SGLang on a bucket, warmed by `vua warm`."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path
from typing import Any

import pytest

from buckets import seaweedfs, speaking_to
from commands import run_json
from e2e.damage import CHUNK
from e2e.sglang_server import PYTHON, Server, environment, extra_config, needs_sglang
from helpers import until
from real_model import first_layers, wheel_file

pytestmark = [pytest.mark.thorough]


@needs_sglang
@unittest.skipUnless(wheel_file(), "the real model is not installed")
class WarmTest(unittest.TestCase):
    def setUp(self) -> None:
        """An empty place in a bucket, and prompts."""
        self.enterContext(speaking_to(seaweedfs().endpoint))
        self.url = seaweedfs().place()
        folder = Path(tempfile.mkdtemp(prefix="vua-test-"))
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        self.prompts, self.near = folder / "prompts.jsonl", folder / "near"
        self.model = first_layers(folder / "model")

    def warm(self, texts: list[str], *words: str, status: int = 0) -> list[dict[str, Any]]:
        self.prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
        done = subprocess.run(
            [str(PYTHON), "-m", "vua", "warm", str(self.prompts), "--json", *words],
            check=False, capture_output=True, text=True, env=environment(),
        )  # fmt: skip
        self.assertEqual(status, done.returncode, done.stderr[-4000:])
        return list(json.loads(done.stdout)["prompts"])

    def test_server(self) -> None:
        """What a server with a directory before the bucket stores is found again."""
        one, other = (
            "".join(f"Box {at} is {name}. " for at in range(40)) for name in ("red", "new")
        )
        extra = extra_config(self.url, shared_storage_path=[str(self.near), self.url])
        server = Server(self.model, backend="dynamic", extra=extra, texts=True)
        self.addCleanup(server.close)
        (first,) = self.warm([one], "--server", server.url)
        whole = first["tokens"] // CHUNK * CHUNK
        self.assertEqual((0, ""), (first["found"], first["problem"]))
        until(lambda: self.stored() == whole // CHUNK)
        server.forget()
        old, new = self.warm([one, other], "--server", server.url)
        self.assertEqual((whole, 0), (old["found"], new["found"]))
        until(lambda: self.stored() == whole // CHUNK + new["tokens"] // CHUNK)

    def stored(self) -> int:
        return int(run_json("du", self.url)[1]["chunks"])
