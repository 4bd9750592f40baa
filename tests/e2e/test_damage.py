"""Whatever happens to the directory, requests end, with the tokens they would have had without."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from e2e.damage import STRIKES, chunk_files, flip, stored, swap
from e2e.harness import PROMPT, RESET, Batch, EngineTest, Served, run, tokens

pytestmark = pytest.mark.vllm

OTHER = PROMPT[:192] + tokens(300, seed=3)
BATCH = Batch([PROMPT, OTHER])
WHOLE = [640, 448]


class FailedPassTest(EngineTest):
    def test_error_between_layers(self) -> None:
        """Nothing of a pass that failed is stored: its later layers hold K and V of before."""
        fails = {"raises": ["vllm.model_executor.models.llama.LlamaMLP.forward"]}

        (failed,) = run(self.phase(Batch([PROMPT]), trouble=fails))

        self.assertIn("LlamaMLP", failed.problem or "")
        self.assertEqual([], stored(self.root))


class DamagedTest(EngineTest):
    """Between two runs something happens to the files."""

    def setUp(self) -> None:
        """Two prompts that share three chunks are stored: 10 + 4 files."""
        super().setUp()
        self.expected = self.fill(BATCH)
        self.assertEqual(14, len(stored(self.root)))

    def file(self, index: int) -> Path:
        """The file of one of the first prompt's chunks."""
        (path,) = chunk_files(self.root, PROMPT, index)
        return path

    def check(self, loaded: int, **counts: int) -> Served:
        """Serve damaged, then healed: right tokens both times, everything loaded the second time.

        ``loaded``: tokens of the first prompt that are loaded while there is damage.
        """
        damaged = self.serve(Batch([PROMPT]))
        self.assertEqual(self.expected[:1], damaged.tokens)
        self.assertEqual(loaded, damaged.counts.get("tokens_loaded", 0))
        for event, count in counts.items():
            self.assertEqual(count, damaged.counts.get(event, 0), event)
        self.check_healed()
        return damaged

    def check_healed(self) -> None:
        """Both prompts are loaded as far as can be."""
        healed = self.serve(BATCH)

        self.assertEqual([self.expected, WHOLE], [healed.tokens, healed.cached])
        self.assertEqual({"chunks_loaded": 17, "tokens_loaded": sum(WHOLE)}, healed.counts)

    @pytest.mark.thorough
    def test_flipped_bit(self) -> None:
        """A chunk with one wrong bit is computed and stored again; the chunks before it load."""
        flip(self.file(5))

        damaged = self.check(320, corrupt=1, chunks_saved=1)

        self.assertIn("out of sight", damaged.log)

    @pytest.mark.thorough
    def test_deleted_file(self) -> None:
        """A hole in the middle ends what is loaded, and is filled."""
        self.file(8).unlink()

        self.check(512, corrupt=0, missing=1, chunks_saved=1)

    @pytest.mark.thorough
    def test_swapped_files(self) -> None:
        """Two valid files under each other's names are both refused, and both stored again."""
        swap(self.file(4), self.file(8))

        self.check(256, foreign=2, chunks_saved=2)

    @pytest.mark.thorough
    def test_first_chunk(self) -> None:
        """Without the first chunk nothing can be used, and no request waits for it for ever."""
        flip(self.file(0))

        self.check(0, corrupt=1, chunks_saved=1)

    @pytest.mark.thorough
    def test_all_files(self) -> None:
        """With every file damaged everything is computed, and stored anew."""
        for path in stored(self.root):
            flip(path)

        damaged, after = run(self.phase(Batch([PROMPT])), self.phase(Batch([OTHER])))

        self.assertEqual(self.expected, damaged.tokens + after.tokens)
        self.assertEqual({"corrupt": 10, "chunks_saved": 10}, damaged.counts)
        self.assertEqual(192, after.counts["tokens_loaded"])  # what the first one stored anew
        self.assertEqual(4, after.counts["corrupt"])
        self.check_healed()

    @pytest.mark.thorough
    def test_all_files_at_once(self) -> None:
        """Two requests that run into the same damaged files at the same time both end well."""
        for path in stored(self.root):
            flip(path)

        self.assertEqual(self.expected, self.serve(BATCH).tokens)
        self.assertEqual(self.expected, self.serve(BATCH).tokens)


class MeanwhileTest(EngineTest):
    """The directory changes while an engine uses it."""

    @pytest.mark.thorough
    def test_between_lookup_and_load(self) -> None:
        """Chunks that were there when a request was planned and then are not are computed."""
        in_turn = (Batch([PROMPT]), Batch([OTHER]), RESET, Batch([PROMPT]))
        cases = [(kind, kind == "truncate") for kind in STRIKES] + [("vanish", True)]
        for kind, prefix_caching in cases:
            with self.subTest(kind, prefix_caching=prefix_caching):
                engine = {"enable_prefix_caching": prefix_caching}
                shutil.rmtree(self.root, ignore_errors=True)
                together = self.fill(BATCH, engine=engine)
                expected = self.baseline(*in_turn, engine=engine)

                first, second = run(
                    self.phase(*in_turn, engine=engine, strike=kind),
                    self.phase(BATCH, engine=engine, strike=kind),
                )

                self.assertEqual([None, None], [first.problem, second.problem])
                self.assertEqual([expected, together], [first.tokens, second.tokens])
                self.assertEqual({"length"}, {*first.finish, *second.finish})
                self.assertEqual(0, first.counts.get("tokens_loaded", 0))

    @pytest.mark.thorough
    def test_load_failures_that_fail(self) -> None:
        """With the policy "fail", which is warned of, a damaged file costs its own request only."""
        self.fill(BATCH)
        (path,) = chunk_files(self.root, PROMPT, 8)
        flip(path)
        expected = self.baseline(BATCH)

        served = self.serve(BATCH, transfer={"kv_load_failure_policy": "fail"})

        self.assertEqual(["error", "length"], served.finish)
        self.assertEqual([[], expected[1]], served.tokens)
        self.assertEqual(1, served.log.count('kv_load_failure_policy is "fail"'))

    @pytest.mark.thorough
    def test_description_of_another_layout(self) -> None:
        """What the description says of the layout is not believed against the entries' headers."""
        expected = self.baseline(BATCH)
        self.fill(BATCH)
        (description,) = self.root.glob("*/namespace.json")
        text = description.read_text().replace('"layers": 2', '"layers": 3')
        description.write_text(text)

        served = self.serve(BATCH)

        self.assertEqual(expected, served.tokens)
        self.assertEqual([640, 448], served.cached)
        self.assertIn('"layers": 2', description.read_text())

    @pytest.mark.thorough
    def test_nothing_can_be_written(self) -> None:
        """Where no file can be made requests are served, and the log says so once."""
        expected = self.baseline(BATCH)
        (self.root).mkdir()
        self.serve(Batch([[7] * 10]))
        (namespace,) = self.root.glob("?" * 64)
        for number in range(256):  # files where the chunks' directories should be
            (namespace / f"{number:02x}").write_bytes(b"")

        served = self.serve(BATCH)

        self.assertEqual(expected, served.tokens)
        self.assertEqual(0, served.counts.get("chunks_saved", 0))
        self.assertEqual(1, served.log.count("chunks are not stored"))
