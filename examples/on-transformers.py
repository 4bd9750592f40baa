"""Generates once, storing the prompt's KV cache, then again from what was stored.

Both runs must give the same tokens; the second one computes only the end of the prompt. Without
arguments it needs no network: it makes a small model with random weights.

    python examples/on-transformers.py [--model PATH] [--path DIR] [--device cpu]
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from small_models import make_model
from vua.transformers import PrefixCache


class FirstToken(BaseStreamer):
    """Notes when the first new token appears."""

    def __init__(self) -> None:
        self.start_s = time.perf_counter()
        self.seconds: float | None = None
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt first, then with each new token."""
        del value
        if self._prompt_seen and self.seconds is None:
            self.seconds = time.perf_counter() - self.start_s
        self._prompt_seen = True

    def end(self) -> None:
        """Called at the end."""


def run(
    model: PreTrainedModel, ids: torch.Tensor, path: Path, *, load: bool, new_tokens: int
) -> tuple[list[int], int, float]:
    """Generate, with the stored prefix or without; return new tokens, tokens loaded, seconds."""
    with PrefixCache(model, path) as prefixes:
        prefixes.ready()  # the weights are identified: once, then remembered
        clock = FirstToken()  # loading counts
        prefix = prefixes.load(ids if load else ids[:, :1])  # of one token nothing is loaded
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=prefix.cache,
            max_new_tokens=new_tokens,
            do_sample=False,
            streamer=clock,
        )
        prefixes.save(output, prefix.cache)
    return output[0, ids.shape[1] :].tolist(), prefix.num_tokens, clock.seconds or 0.0


def prompt_ids(model_path: Path, length: int) -> torch.Tensor:
    """Return a prompt of some ``length`` tokens."""
    if (model_path / "vua-test-model.json").exists():  # its words are "t4", "t5" ...
        return torch.randint(4, 4096, (1, length), generator=torch.Generator().manual_seed(0))
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    sentences = (f"Shelf {n} of the library holds {n * n % 97} books. " for n in range(length))
    return tokenizer("".join(sentences), return_tensors="pt")["input_ids"][:, :length]


def main() -> int:
    """Run the example; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a local model (default: a small random one)")
    parser.add_argument("--path", type=Path, help="the store (default: a temporary directory)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=16)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    with tempfile.TemporaryDirectory() as folder:
        model_path = options.model or make_model(
            Path(folder, "model"), hidden_size=512, heads=8, head_dim=64, layers=8, vocab_size=4096
        )
        path = options.path or Path(folder, "kv")
        model = AutoModelForCausalLM.from_pretrained(model_path).to(options.device)
        ids = prompt_ids(model_path, options.prompt_tokens).to(options.device)
        model.generate(ids[:, :64], max_new_tokens=2, do_sample=False)  # warms up
        first, _, without_s = run(model, ids, path, load=False, new_tokens=options.new_tokens)
        second, loaded, with_s = run(model, ids, path, load=True, new_tokens=options.new_tokens)

    same = first == second
    print(f"prompt                     {ids.shape[1]} tokens")
    print(f"loaded from the store      {loaded} tokens")
    print(f"first token, computed      {without_s * 1000:.0f} ms")
    print(f"first token, from store    {with_s * 1000:.0f} ms")
    print(f"{len(second)} new tokens              {'the same' if same else 'DIFFERENT'}")
    return 0 if same and loaded else 1


if __name__ == "__main__":
    sys.exit(main())
