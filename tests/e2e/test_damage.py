"""Whatever happens to the directory, requests end, with the tokens they would have had without."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from e2e.damage import chunk_files, flip, stored, truncate
from e2e.harness import PROMPT, RESET, Batch, EngineTest, Exchange, run, tokens

pytestmark = pytest.mark.vllm

OTHER = PROMPT[:192] + tokens(300, seed=3)
BATCH = Batch([PROMPT, OTHER])


class FailedPassTest(EngineTest):
    def test_error_between_layers(self) -> None:
        """Nothing of a pass that failed is stored: its later layers hold K and V of before."""
        fails = {"raises": ["vllm.model_executor.models.llama.LlamaMLP.forward"]}

        (failed,) = run(self.phase(Batch([PROMPT]), trouble=fails))

        self.assertIn("LlamaMLP", failed.problem or "")
        self.assertEqual([], stored(self.root))


@pytest.mark.thorough
class DamagedTest(EngineTest):
    def setUp(self) -> None:
        super().setUp()
        self.expected = self.fill(BATCH)
        self.assertEqual(14, len(stored(self.root)))

    def file(self, index: int) -> Path:
        """The file of one of the first prompt's chunks."""
        (path,) = chunk_files(self.root, PROMPT, index)
        return path

    def test_files(self) -> None:
        """What lies before the first damaged chunk loads; the rest is computed and stored anew."""
        steps: list[Batch | Exchange] = []
        for number, paths in enumerate(
            ([self.file(5)], [self.file(8)], [self.file(0)], stored(self.root))
        ):
            sound = [path.read_bytes() for path in paths]
            for path in paths:
                (truncate if number == 1 else flip)(path)
            hurt = Path(shutil.copytree(self.root, self.root.with_name(f"hurt{number}")))
            steps += [RESET, Exchange(hurt, self.root), RESET, Batch([PROMPT]), RESET, BATCH]
            for path, data in zip(paths, sound, strict=True):
                path.write_bytes(data)

        served = self.serve(*steps)

        self.assertEqual((self.expected[:1] + self.expected) * 4, served.tokens)
        ordered = [640, 640, 448] * 2 + [0, 640, 448] * 2  # by vLLM, also what does not come then
        self.assertEqual(ordered, served.cached)
        loaded = [320, 512, 0, 0, *[640 + 448] * 3, 640 + 192]
        self.assertEqual(sum(loaded), served.counts["tokens_loaded"])
        self.assertIn("out of sight", served.log)

    def test_all_files_at_once(self) -> None:
        """Two requests that run into the same damaged files at the same time both end well."""
        for path in stored(self.root):
            flip(path)
        for _ in range(2):
            self.assertEqual(self.expected, self.serve(BATCH).tokens)

    def test_load_failures_that_fail(self) -> None:
        """With the policy "fail", which is warned of, a damaged file costs its own request only."""
        flip(self.file(8))

        served = self.serve(BATCH, transfer={"kv_load_failure_policy": None})  # vLLM's default

        self.assertEqual(["error", "length"], served.finish)
        self.assertEqual([[], self.expected[1]], served.tokens)
        self.assertEqual(1, served.log.count('kv_load_failure_policy is "fail"'))

    def test_nothing_can_be_written(self) -> None:
        """Where no file can be made requests are served, and the log says so once."""
        for path in self.root.glob("?" * 64 + "/??"):
            shutil.rmtree(path)
        (namespace,) = self.root.glob("?" * 64)
        for number in range(256):  # files where the chunks' directories should be
            (namespace / f"{number:02x}").write_bytes(b"")

        served = self.serve(BATCH)

        self.assertEqual(self.expected, served.tokens)
        self.assertEqual(0, served.counts.get("chunks_saved", 0))
        self.assertEqual(1, served.log.count("chunks are not stored"))
