"""Ways to use a cache, asked for prompts."""

from __future__ import annotations

import itertools
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final


class ToldError(Exception):
    """VUA said what is wrong."""


class Library:
    """`vua.core.VUA`: a lookup and a put."""

    tells = True
    """Whether errors of VUA's are an answer."""

    def open(self, root: str, **limits: Any) -> None:
        from vua.core import VUA, VUAConfig

        self.vua = VUA(VUAConfig(model="m", split_factor=64, **limits), root)

    def ask(self, prompt: int) -> str:
        """Ask for a prompt, and store it: ``right``, ``miss`` or ``wrong``. May raise."""
        import torch

        from helpers import kv_bits
        from vua.errors import VUAError

        tokens = torch.arange(256) + 1000 * prompt
        kv = [[part + prompt for part in layer] for layer in self.kv()]
        try:
            found = self.vua.get_closest(tokens)
            many = found.num_tokens
            right = not many or kv_bits(found.data) == kv_bits(kv, many)
            self.vua.put(tokens, kv)
        except (VUAError, OSError) as problem:
            raise ToldError(str(problem)) from problem
        if not right:
            return "wrong"
        return "right" if many == 256 else "miss"

    @staticmethod
    @cache
    def kv() -> Any:
        from helpers import caches_of

        return caches_of(layers=2, heads=2, tokens=256, dim=16)


class Commands(Library):
    """`vua ls`, `du`, `verify` and `gc` by turns, in this process, beside the library."""

    def open(self, root: str, **limits: Any) -> None:
        super().open(root, **limits)
        self.root = root if "://" in root else str(Path(root).absolute())
        self.turns = itertools.cycle(("ls", "du", "verify", "gc"))

    def ask(self, prompt: int) -> str:
        """Ask the library; then run a command, which is to answer or say why not."""
        from commands import run

        answer, name = super().ask(prompt), next(self.turns)
        code, out, err = run(name, self.root)
        if code not in (0, 1, 2):
            raise AssertionError(f"vua {name}: {(out + err)[-300:]}")
        if code:
            raise ToldError(f"vua {name}: {(out + err).strip()[-120:]}")
        return answer


class Transformers:
    """`vua.transformers.reuse_prefixes` around `generate`."""

    tells = False
    greedy: Final = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}

    @staticmethod
    @cache
    def model() -> Any:
        from transformers import AutoModelForCausalLM

        from small_models import make_model

        path = make_model(Path(tempfile.gettempdir()) / "vua-situations-model")
        return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()

    def open(self, root: str, **limits: Any) -> None:
        from vua.capacity.limits import Limits, write_bounds
        from vua.transformers import reuse_prefixes

        if limits:
            write_bounds(root, Limits(**limits))
        self.block = reuse_prefixes(self.model(), root, chunk_tokens=64)
        self.prefixes = self.block.__enter__()
        self.prefixes.ready(60)

    def ask(self, prompt: int) -> str:
        """Generate, and compare with what the model says alone."""
        import torch

        ids = torch.randint(4, 500, (1, 200), generator=torch.Generator().manual_seed(prompt))
        found = self.prefixes.load(ids[0]).num_tokens
        pad = {"pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
        said = self.model().generate(ids, **pad, **self.greedy).tolist()
        with torch.no_grad():
            plain = type(self.model()).generate(self.model(), ids, **pad, **self.greedy).tolist()
        if said != plain:
            return "wrong"
        return "right" if found == 192 else "miss"


class VLLM:
    """vLLM's own scheduler and both halves of the connector; the model's K and V are a function."""

    tells = False

    def __init__(self) -> None:
        import sim.engine

        self.sim, self.many = sim.engine, itertools.count()

    def open(self, root: str, **limits: Any) -> None:
        from sim.truth import make_shape

        extra = {"chunk_tokens": 64, "shared_storage_path": root}  # which may be a URL
        extra |= {"limits": limits} if limits else {}
        settings = self.sim.Settings(Path(root), make_shape("full", 0), extra=extra)
        self.engine = self.sim.Engine(settings)

    def ask(self, prompt: int) -> str:
        """Answer a request; its tokens and the K and V that were loaded are checked."""
        from sim.engine import Wrong
        from sim.truth import Chain

        name = f"{prompt}-{next(self.many)}"
        ids = [5 + (prompt * 31 + at * (prompt + 1)) % 390 for at in range(200)]
        self.engine.add(name, Chain(ids, None), 2)
        try:
            while self.engine.busy:
                self.engine.step()
            self.engine.check_answers()
        except Wrong:
            traceback.print_exc()
            return "wrong"
        return "right" if self.engine.loaded.get(name, 0) == 192 else "miss"


FACES: Final[dict[str, Callable[[], Any]]] = {
    "library": Library,
    "CLI": Commands,
    "transformers": Transformers,
    "vLLM": VLLM,
}
