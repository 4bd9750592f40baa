"""`model.generate` with stored prefixes, for whoever does not want to change a call of it.

Promises that each call returns what it would return without VUA, up to the order of sums in
floating point. Where that cannot be promised, and whenever the storage fails, the call goes on
without a stored prefix, and the log says why.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from transformers import DynamicCache
from transformers.generation.configuration_utils import GenerationMode

from vua.errors import InputError, VUAError
from vua.transformers.cache import PrefixCache

__all__ = ["reuse_prefixes"]

log = logging.getLogger(__name__)

_BEAMS: Final = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
_MODES: Final = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, *_BEAMS)
_NO_MODEL_INPUTS: Final = frozenset(
    {
        *("input_ids", "attention_mask", "logits_processor", "stopping_criteria", "streamer"),
        *("prefix_allowed_tokens_fn", "synced_gpus", "tokenizer"),
    }
)
"""Arguments of `generate`, beside settings, that cannot change K and V, or are judged here."""


@contextmanager
def reuse_prefixes(
    model: Any,  # noqa: ANN401
    path: str | os.PathLike[str] | Sequence[str],
    **settings: Any,  # noqa: ANN401
) -> Iterator[PrefixCache]:
    """Within the block `model.generate` loads stored prefixes and stores what it computes.

    >>> with reuse_prefixes(model, "/mnt/kv"):  # doctest: +SKIP
    ...     output = model.generate(**inputs, max_new_tokens=50)

    Works with left-padded batches, beams, sampling, several sequences per prompt, streamers and
    pipelines. These are computed without a stored prefix, with a line in the log for each reason:
    assisted and prompt-lookup decoding, other caches than `DynamicCache`
    (``cache_implementation``), a cache of the caller's own, embeddings and other inputs that are
    not ids, and outputs of the prompt's own attentions or hidden states.

    Args:
        model: a causal language model that `from_pretrained` made. All threads that call its
            `generate` meanwhile use the directory.
        path: the directory; see `PrefixCache`.
        settings: the other arguments of `PrefixCache`.

    Yields:
        The `PrefixCache`, which is closed at the end of the block.

    Raises:
        ConfigError, StorageError: as `PrefixCache`. A call of `generate` raises nothing of VUA's.
    """
    with PrefixCache(model, path, **settings) as prefixes:
        outer = model.__dict__.get("generate")
        model.generate = _Generate(prefixes, model)
        try:
            yield prefixes
        finally:
            del model.generate
            if outer is not None:
                model.generate = outer


class _Generate:
    """What stands in for the `generate` of a model."""

    def __init__(self, prefixes: PrefixCache, model: Any) -> None:  # noqa: ANN401
        self._prefixes, self._model, self._generate = prefixes, model, model.generate
        self._said: set[str] = set()

    def __call__(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: Any = None,  # noqa: ANN401
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Generate, beginning with what is stored."""
        ids: Any = kwargs.get("input_ids") if inputs is None else inputs
        config = copy.deepcopy(generation_config or self._model.generation_config)
        others = config.update(**kwargs)
        repeats = max(config.num_beams or 1, config.num_return_sequences or 1)
        try:
            obstacles = list(_obstacles(ids, config, others))
            if args:
                obstacles = ["it is given more than two positional arguments"]
            if obstacles:
                raise InputError(obstacles[0])
            mask = kwargs.get("attention_mask")
            cache = self._prefixes.load(ids, attention_mask=mask).cache
            if cache.get_seq_length() and repeats > 1:
                cache.batch_repeat_interleave(repeats)
        except VUAError as problem:
            self._say(f"nothing is loaded or stored: {problem}")
            return self._generate(inputs, generation_config, *args, **kwargs)
        output = self._generate(inputs, generation_config, past_key_values=cache, **kwargs)
        try:
            self._save(ids, mask, cache, config, output)
        except VUAError as problem:
            self._say(f"nothing is stored: {problem}")
        return output

    def _say(self, sentence: str) -> None:
        """Log it, the first time."""
        if sentence not in self._said:
            self._said.add(sentence)
            log.warning("generate(): %s", sentence)

    def _save(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        cache: DynamicCache,
        config: Any,  # noqa: ANN401
        output: Any,  # noqa: ANN401
    ) -> None:
        """Store the prompts, and of what was generated what all sequences have."""
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        if config.get_generation_mode() in _BEAMS:  # rows of the cache are not rows of the output
            sequences = ids.repeat_interleave(max(config.num_beams, 1), dim=0)
        else:
            sequences = sequences[:, : _common_length(sequences, ids.shape[1], config.eos_token_id)]
        if mask is not None:
            mask = mask.repeat_interleave(len(sequences) // len(mask), dim=0)
        self._prefixes.save(sequences, cache, attention_mask=mask)


def _obstacles(ids: Any, config: Any, others: dict[str, Any]) -> Iterator[str]:  # noqa: ANN401
    """Yield why a call cannot begin with a stored prefix.

    Args:
        ids: the prompt.
        config: the settings that are in effect.
        others: arguments that are no settings.
    """
    given = {name for name, value in others.items() if value is not None} - _NO_MODEL_INPUTS
    if given:
        yield f"it is given {', '.join(sorted(given))}, which may count as much as the ids"
    if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.ndim != 2:
        yield "it is not given token ids of shape (B, T)"
        return
    if (mode := config.get_generation_mode()) not in _MODES:
        yield f"{mode.value} works on a cache of its own"
    if config.use_cache is False or config.cache_implementation not in {None, "dynamic"}:
        yield "it is asked not to use a DynamicCache (use_cache, cache_implementation)"
    for name in ("output_attentions", "output_hidden_states", "prefill_chunk_size"):
        if getattr(config, name, None):
            yield f"{name} needs the whole prompt computed"
    if getattr(config, "token_healing", None):
        yield "token_healing changes the prompt"
    pad, masked = config.pad_token_id, others.get("attention_mask") is not None
    if not masked and pad not in {None, *_ends(config.eos_token_id)} and bool((ids == pad).any()):
        yield "the prompt contains the padding token; pass attention_mask"


def _ends(eos_token_id: int | list[int] | None) -> list[int]:
    """Return the ids that end a sequence."""
    if eos_token_id is None:
        return []
    return [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)


def _common_length(sequences: torch.Tensor, prompt: int, eos_token_id: Any) -> int:  # noqa: ANN401
    """Return how many columns come before the end of the sequence that ends first."""
    ended = torch.zeros(sequences.shape[1] - prompt, dtype=torch.bool, device=sequences.device)
    for end in _ends(eos_token_id):
        ended |= (sequences[:, prompt:] == end).any(dim=0)
    return prompt + (int(ended.int().argmax()) + 1 if bool(ended.any()) else len(ended))
