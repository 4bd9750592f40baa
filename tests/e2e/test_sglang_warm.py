"""SGLang on a bucket, warmed by `vua warm`: by an engine of its own, and by a server."""

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
from e2e.damage import CHUNK
from e2e.sglang_server import PYTHON, Server, environment, extra_config, needs_sglang
from vua.testing.real_model import real_model, wheel_file

pytestmark = [pytest.mark.thorough]

ENGINE = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "skip_server_warmup": True,
    "max_total_tokens": 8192,
    "context_length": 512,
    "hicache_io_backend": "direct",
    "hicache_size": 1,
}


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

    def warm(self, texts: list[str], *words: str, status: int = 0) -> list[dict[str, Any]]:
        """What the command says of each prompt."""
        self.prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
        done = subprocess.run(
            [str(PYTHON), "-m", "vua.cli", "warm", str(self.prompts), "--json",
             "--path", self.url, *words],
            check=False, capture_output=True, text=True, env=environment(),
        )  # fmt: skip
        self.assertEqual(status, done.returncode, done.stderr[-4000:])
        return list(json.loads(done.stdout)["prompts"])

    def test_both(self) -> None:
        """A server with a directory before the bucket finds a prompt in it, and sends another."""
        one, other = (
            "".join(f"Box {at} is {name}. " for at in range(40)) for name in ("red", "new")
        )
        words = ("--engine", "sglang", "--model", str(real_model()))
        first, long = self.warm(
            [one, 9 * one], *words, "--engine-args", json.dumps(ENGINE), status=1
        )
        whole = first["tokens"] // CHUNK * CHUNK
        self.assertEqual((0, whole, ""), (first["found"], first["stored"], first["problem"]))
        self.assertEqual((None, 0), (long["found"], long["stored"]))
        self.assertIn("512", long["problem"])

        tiers = [str(self.near), self.url]
        extra = extra_config(self.url, shared_storage_path=tiers)
        server = Server(real_model(), backend="dynamic", extra=extra, texts=True)
        self.addCleanup(server.close)
        old, new = self.warm([one, other], "--server", server.url)
        self.assertEqual((whole, 0), (old["found"], old["stored"]))
        self.assertEqual((0, new["tokens"] // CHUNK * CHUNK), (new["found"], new["stored"]))
        server.forget()
        (again,) = self.warm([other], "--server", server.url)
        self.assertEqual((new["stored"], 0), (again["found"], again["stored"]))


if __name__ == "__main__":
    unittest.main()
