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
from pathlib import Path
from typing import Any, Final

__all__ = ["ENGINE_ENVIRONMENT", "make_demo_model", "make_model"]

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

_SPEC_FILE: Final = "vua-test-model.json"
_CONFIG_CLASSES: Final = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
}
_SPECIAL_TOKENS: Final = ("<unk>", "<s>", "</s>", "<pad>")
_SIZES: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "intermediate_size": None,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "initializer_range": 0.25,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_SHORT: Final = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "tie": "tie_word_embeddings",
}


def make_model(
    directory: str | os.PathLike[str],
    *,
    family: str = "llama",
    seed: int = 0,
    dtype: str = "float32",
    **sizes: Any,
) -> Path:
    """Make a checkpoint with random weights at `directory` and return its path.

    The directory appears whole or not at all (it is written beside it and renamed), so two
    processes may make the same one at once. An existing checkpoint of the same specification is
    kept; one of another specification is replaced. Token n is the word "tn"; give "qwen2" token
    ids: transformers always loads Qwen2's own tokenizer.

    Args:
        directory: where to make it; parents are made too.
        family: "llama", "mistral", "qwen2" or "qwen3".
        seed: other seeds give other weights.
        dtype: the weights' type by torch's name, such as "float32" or "bfloat16".
        sizes: others than `_SIZES`, by their names in a configuration or by `_SHORT`. vLLM's CPU
            attention knows heads of 32, 64, 80, 96, 112 and 128. The MLP is by default twice as
            wide as `hidden_size`. With `initializer_range` much below 0.25 a model this small
            repeats one token for any prompt, and then a test that compares generated tokens proves
            nothing.

    Raises:
        FileExistsError: `directory` exists and was not made by this function.
    """
    sizes = _SIZES | {_SHORT.get(name, name): value for name, value in sizes.items()}
    sizes["intermediate_size"] = sizes["intermediate_size"] or 2 * sizes["hidden_size"]
    spec = {"version": 2, "family": family, "seed": seed, "dtype": dtype, **sizes}
    target, said = Path(directory), json.dumps(spec, indent=2, sort_keys=True)
    if _is_made(target, said):
        return target
    if target.exists() and not (target / _SPEC_FILE).is_file():
        raise FileExistsError(
            f"{target} exists and holds no {_SPEC_FILE}, so it is not a test model; "
            "choose another directory or remove it"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write_checkpoint(fresh, family, seed, dtype, sizes)
        (fresh / _SPEC_FILE).write_text(said, encoding="utf-8")
        if target.exists() and not _is_made(target, said):
            shutil.rmtree(target)
        fresh.rename(target)
    except OSError:
        if not _is_made(target, said):  # else a concurrent maker was first
            raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def make_demo_model(directory: str | os.PathLike[str], *, seed: int = 0) -> Path:
    """Make the model of the demos: cheap to store, slow enough to prefill that a hit is visible.

    A Llama of 370 MB in bfloat16 with 32 KiB of KV cache per token, so 2 MiB per chunk of 64
    tokens; vLLM on two CPU cores takes 2 to 3 s to prefill 3000 tokens. Its weights are less
    chaotic than those of the tiny models: tokens depend on the prompt, yet survive bfloat16's
    rounding.
    """
    sizes = {"hidden_size": 1024, "intermediate_size": 2560, "layers": 16, "heads": 16}
    sizes |= {"kv_heads": 8, "head_dim": 64, "vocab_size": 4096, "max_position_embeddings": 32768}
    return make_model(directory, seed=seed, dtype="bfloat16", initializer_range=0.06, **sizes)


def _is_made(target: Path, said: str) -> bool:
    try:
        return (target / _SPEC_FILE).read_text(encoding="utf-8") == said
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return False


def _write_checkpoint(
    directory: Path, family: str, seed: int, dtype: str, sizes: dict[str, Any]
) -> None:
    import torch
    import transformers

    special = {f"{word}_token_id": at for at, word in ((1, "bos"), (2, "eos"), (3, "pad"))}
    config = getattr(transformers, _CONFIG_CLASSES[family])(**sizes, dtype=dtype, **special)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(directory)
    tokenizer_of(sizes["vocab_size"]).save_pretrained(directory)


def tokenizer_of(vocab_size: int, *more: str) -> Any:
    """Return a tokenizer of words: token n is "tn", so prompts are readable; ``more``: special."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    special = (*_SPECIAL_TOKENS, *more)
    words = [*special, *(f"t{n}" for n in range(len(special), vocab_size))]
    numbers = {word: n for n, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(numbers, unk_token=_SPECIAL_TOKENS[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    unk, bos, eos, pad = _SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=unk, bos_token=bos, eos_token=eos, pad_token=pad,
        additional_special_tokens=[*more],
    )  # fmt: skip
