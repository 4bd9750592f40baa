"""Which engines share what is stored: those with the same tensors, in whatever files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import PROMPT, Batch, EngineTest
from small_models import make_model

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

BATCH = Batch([PROMPT])


class WeightsTest(EngineTest):
    def test_ten_rows_of_the_embedding(self) -> None:
        """Trained tokens, in no page that is first, middle or last of a tensor: other weights."""
        from safetensors.torch import load_file, save_file

        model = make_model(self.root.parent / "model", seed=1)
        engine: dict[str, Any] = {"model": str(model)}
        before = self.fill(BATCH, engine=engine)
        tensors = load_file(model / "model.safetensors")
        tensors["model.embed_tokens.weight"][100:110] += 0.5
        tuned = Path(shutil.copytree(model, self.root.parent / "tuned"))
        save_file(tensors, tuned / "model.safetensors", {"format": "pt"})

        after = self.fill(BATCH, engine={"model": str(tuned)})  # nothing is loaded

        self.assertNotEqual(before, after)  # so what was stored would have been wrong
        self.assertEqual([640], self.serve(BATCH, engine=engine).cached)

    def test_other_files(self) -> None:
        """Two files and an index, other metadata, leftovers of training beside: all is loaded."""
        import json

        from safetensors.torch import load_file, save_file

        model = make_model(self.root.parent / "model", seed=1)
        expected = self.fill(BATCH, engine={"model": str(model)})
        other = Path(shutil.copytree(model, self.root.parent / "other"))
        tensors, index = load_file(other / "model.safetensors"), {}
        (other / "model.safetensors").unlink()
        for number, names in enumerate(([*tensors][:5], [*tensors][5:])):
            name = f"part-{number}.safetensors"
            save_file(
                {one: tensors[one] for one in names}, other / name, {"format": "pt", "n": "1"}
            )
            index |= dict.fromkeys(names, name)
        text = json.dumps({"weight_map": index})
        (other / "model.safetensors.index.json").write_text(text)
        shutil.copy(other / "part-0.safetensors", other / "duplicate.safetensors")
        (other / "training_args.bin").write_bytes(b"of no use")

        served = self.serve(BATCH, engine={"model": str(other)})

        self.assertEqual([expected, [640]], [served.tokens, served.cached])
