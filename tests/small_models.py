"""Tiny random-weight checkpoints, made offline, that real engines load from a directory.

The same specification always gives the same bytes, and an existing checkpoint of that specification
is left unchanged. The text is not sensible: the weights are noise, but the generated tokens depend
on the context. For tests, benchmarks and demos; needs `transformers` and `torch`, which are
imported when a checkpoint is made and not before.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

__all__ = ["ENGINE_ENVIRONMENT", "Family", "make_demo_model", "make_model"]

ENGINE_ENVIRONMENT: Final = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""For a vLLM that serves such a model: offline, quiet, on all CPUs, and in one process. That way it
starts in a third of the time. Set it before vLLM is imported."""

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

_SPEC_FILE = "vua-test-model.json"
_SPEC_VERSION = 1
_CONFIG_CLASSES: dict[str, str] = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
}
_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>")


@dataclass(frozen=True, slots=True)
class _Spec:
    """Everything that decides the bytes of a checkpoint."""

    family: str
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    seed: int
    dtype: str
    initializer_range: float
    max_position_embeddings: int
    tie: bool

    def __post_init__(self) -> None:
        if self.family not in _CONFIG_CLASSES:
            known = ", ".join(sorted(_CONFIG_CLASSES))
            raise ValueError(f"unknown model family {self.family!r}; known families: {known}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; "
                "choose kv_heads that divides heads"
            )
        if self.vocab_size <= len(_SPECIAL_TOKENS):
            raise ValueError(f"vocab_size={self.vocab_size} leaves no tokens for words")

    def encode(self) -> str:
        return json.dumps({"version": _SPEC_VERSION, **asdict(self)}, indent=2, sort_keys=True)


def make_model(  # noqa: PLR0913 - each is a size that some test varies
    directory: str | os.PathLike[str],
    *,
    family: Family = "llama",
    hidden_size: int = 128,
    intermediate_size: int | None = None,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocab_size: int = 512,
    seed: int = 0,
    dtype: str = "float32",
    initializer_range: float = 0.25,
    max_position_embeddings: int = 4096,
    tie: bool = False,
) -> Path:
    """Make a checkpoint with random weights at `directory` and return its path.

    The directory appears whole or not at all (it is written beside it and renamed), so two
    processes may make the same one at once. An existing checkpoint of the same specification is
    kept; one of another specification is replaced.

    Args:
        directory: where to make it; parents are made too.
        family: the architecture.
        hidden_size: width of a layer's input.
        intermediate_size: width of the MLP, by default twice `hidden_size`.
        layers: number of layers.
        heads: number of query heads, a multiple of `kv_heads`.
        kv_heads: number of key and value heads.
        head_dim: width of a head; vLLM's CPU attention knows 32, 64, 80, 96, 112, 128.
        vocab_size: number of tokens; token n is the word "tn" (give "qwen2" token ids: transformers
            always loads Qwen2's own tokenizer).
        seed: other seeds give other weights.
        dtype: the weights' type by torch's name, such as "float32" or "bfloat16".
        initializer_range: standard deviation of the weights. Much below 0.25 a model this small
            repeats one token for any prompt, and then a test that compares generated tokens proves
            nothing.
        max_position_embeddings: the longest context.
        tie: use the input embedding as output head too.

    Raises:
        ValueError: the family is unknown or the sizes do not fit together.
        FileExistsError: `directory` exists and was not made by this function.
    """
    spec = _Spec(
        family=family,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size or 2 * hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        seed=seed,
        dtype=dtype,
        initializer_range=initializer_range,
        max_position_embeddings=max_position_embeddings,
        tie=tie,
    )
    return _make(Path(directory), spec)


def make_demo_model(directory: str | os.PathLike[str], *, seed: int = 0) -> Path:
    """Make the model of the demos: cheap to store, slow enough to prefill that a hit is visible.

    A Llama of 370 MB in bfloat16 with 32 KiB of KV cache per token, so 2 MiB per chunk of 64
    tokens; vLLM on two CPU cores takes 2 to 3 s to prefill 3000 tokens. Its weights are less
    chaotic than those of the tiny models: tokens depend on the prompt, yet survive bfloat16's
    rounding.
    """
    return make_model(
        directory,
        hidden_size=1024,
        intermediate_size=2560,
        layers=16,
        heads=16,
        kv_heads=8,
        head_dim=64,
        vocab_size=4096,
        seed=seed,
        dtype="bfloat16",
        initializer_range=0.06,
        max_position_embeddings=32768,
        tie=False,
    )


def _make(target: Path, spec: _Spec) -> Path:
    if _is_made(target, spec):
        return target
    if target.exists() and not (target / _SPEC_FILE).is_file():
        raise FileExistsError(
            f"{target} exists and holds no {_SPEC_FILE}, so it is not a test model; "
            "choose another directory or remove it"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write_checkpoint(fresh, spec)
        (fresh / _SPEC_FILE).write_text(spec.encode(), encoding="utf-8")
        _replace(fresh, target, spec)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def _is_made(target: Path, spec: _Spec) -> bool:
    try:
        return (target / _SPEC_FILE).read_text(encoding="utf-8") == spec.encode()
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return False


def _replace(fresh: Path, target: Path, spec: _Spec) -> None:
    """Rename `fresh` to `target`; keep a directory that another process made meanwhile."""
    if target.exists() and not _is_made(target, spec):
        shutil.rmtree(target)
    try:
        fresh.rename(target)
    except OSError:  # not empty: a concurrent maker was first
        if not _is_made(target, spec):
            raise


def _write_checkpoint(directory: Path, spec: _Spec) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    config = _config(spec)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, spec.dtype))
    model.save_pretrained(directory)
    _tokenizer(spec).save_pretrained(directory)


def _config(spec: _Spec) -> PreTrainedConfig:
    import transformers

    config_class = getattr(transformers, _CONFIG_CLASSES[spec.family])
    config: PreTrainedConfig = config_class(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        initializer_range=spec.initializer_range,
        max_position_embeddings=spec.max_position_embeddings,
        tie_word_embeddings=spec.tie,
        dtype=spec.dtype,
        bos_token_id=_SPECIAL_TOKENS.index("<s>"),
        eos_token_id=_SPECIAL_TOKENS.index("</s>"),
        pad_token_id=_SPECIAL_TOKENS.index("<pad>"),
    )
    return config


def _tokenizer(spec: _Spec) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words: token n is "tn", so prompts are readable."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = [*_SPECIAL_TOKENS, *(f"t{n}" for n in range(len(_SPECIAL_TOKENS), spec.vocab_size))]
    tokenizer = Tokenizer(
        WordLevel({word: n for n, word in enumerate(words)}, unk_token=_SPECIAL_TOKENS[0])
    )
    tokenizer.pre_tokenizer = WhitespaceSplit()
    unk, bos, eos, pad = _SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=unk, bos_token=bos, eos_token=eos, pad_token=pad
    )
