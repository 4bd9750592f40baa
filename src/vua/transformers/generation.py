"""`model.generate` with stored prefixes, without changes to its callers.

Each call returns what it would return without VUA, up to the order of floating point sums. If that
is not certain, and whenever something fails, the call is computed without a stored prefix, and the
log says why. Settings, the padding token and the mask are resolved by transformers' own functions.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from transformers import DynamicCache
from transformers.generation.configuration_utils import GenerationMode

from vua.errors import ConfigError, InputError
from vua.transformers.cache import NoPrefixes, PrefixCache, reason_of
from vua.transformers.model import NoIdentityError, unwrapped

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

_KINDS_OF_TOKENS: Final = frozenset({"token_type_ids", "mm_token_type_ids"})
"""Zeros for text: what a processor of images gives for a prompt without one."""


@contextmanager
def reuse_prefixes(
    model: Any,
    path: str | os.PathLike[str] | Sequence[str],
    **settings: Any,
) -> Iterator[PrefixCache]:
    """Within the block `model.generate` loads stored prefixes and stores what it computes.

    >>> with reuse_prefixes(model, "/mnt/kv"):  # doctest: +SKIP
    ...     output = model.generate(**inputs, max_new_tokens=50)

    Works with left-padded batches, beams, sampling, several sequences per prompt, streamers and
    pipelines. These calls are computed without a stored prefix, with a log line per reason:
    assisted and prompt-lookup decoding, caches other than `DynamicCache`
    (``cache_implementation``), the caller's own cache, embeddings and other inputs that are not
    ids, and outputs of the prompt's own attentions or hidden states.

    A model that cannot be stored, and a directory that cannot be used, cost a log line: within the
    block `generate` computes as without it.

    Args:
        model: a causal language model of transformers, in evaluation mode. All threads that call
            its `generate` meanwhile use the directory. It may be copied and pickled meanwhile; the
            copy does not use the directory.
        path: the directory; see `PrefixCache`.
        settings: the other arguments of `PrefixCache`.

    Yields:
        The `PrefixCache`, which is closed at the end of the block.

    Raises:
        ConfigError: ``model`` is a path, ``path`` is a file, or a setting is wrong. Calls of
            `generate` raise nothing of VUA's.
    """
    if isinstance(model, str | os.PathLike):
        raise ConfigError(
            f"reuse_prefixes(model, path): expected a model, found {str(model)!r}; load it first: "
            f"AutoModelForCausalLM.from_pretrained({str(model)!r})"
        )
    try:
        prefixes = PrefixCache(model, path, **settings)
    except (NoIdentityError, OSError) as problem:  # a cache costs hits, never a block
        log.warning("reuse_prefixes(): nothing is loaded or stored: %s", reason_of(problem))
        log.debug("the reason in full", exc_info=True)
        prefixes = NoPrefixes(problem)
    if isinstance(prefixes, NoPrefixes):
        yield prefixes
        return
    model = unwrapped(model)
    with prefixes:
        outer = model.__dict__.get("generate")
        ours = model.generate = _Generate(prefixes, model)
        try:
            yield prefixes
        finally:
            if model.__dict__.get("generate") is ours:  # else it has been replaced meanwhile
                del model.generate
                if outer is not None:
                    model.generate = outer


class _Generate:
    def __init__(self, prefixes: PrefixCache, model: Any) -> None:
        self._prefixes, self._model, self._generate = prefixes, model, model.generate
        self._said: set[str] = set()

    def __call__(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        try:
            call = _resolved(self._model, inputs, generation_config, args, kwargs)
            cache = self._prefixes.load(call.ids, attention_mask=call.mask).cache
            repeats = max(call.config.num_beams or 1, call.config.num_return_sequences or 1)
            if cache.get_seq_length() and repeats > 1:
                cache.batch_repeat_interleave(repeats)
        except Exception as problem:  # noqa: BLE001 - a cache costs hits, never a call
            self._say(f"nothing is loaded or stored: {reason_of(problem)}")
            return self._generate(inputs, generation_config, *args, **kwargs)
        if call.config.cache_implementation is not None:  # the one that it is given
            kwargs["cache_implementation"] = None
        output = self._generate(inputs, generation_config, past_key_values=cache, **kwargs)
        try:
            self._save(call, cache, output)
        except Exception as problem:  # noqa: BLE001 - a failed save costs no answer
            self._say(f"nothing is stored: {reason_of(problem)}")
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._model))
        return self if copied is None else _plain_generate(copied)

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return _plain_generate, (self._model,)

    def _say(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            log.warning("generate(): %s", sentence)

    def _save(self, call: _Call, cache: DynamicCache, output: Any) -> None:
        ids, mask, config = call.ids, call.mask, call.config
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        if config.get_generation_mode() in _BEAMS:  # rows of the cache are not rows of the output
            sequences = ids.repeat_interleave(max(config.num_beams, 1), dim=0)
        else:
            sequences = sequences[:, : _common_length(sequences, ids.shape[1], config.eos_token_id)]
        if mask is not None:
            mask = mask.repeat_interleave(len(sequences) // len(mask), dim=0)
        self._prefixes.save(sequences, cache, attention_mask=mask, prompt_columns=ids.shape[1])


class _Call(NamedTuple):
    ids: torch.Tensor
    """(B, T)."""
    mask: torch.Tensor | None
    """(B, T); None: nothing is masked."""
    config: Any


def _resolved(
    model: Any,
    inputs: Any,
    generation_config: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> _Call:
    """Resolve a call. Raises InputError if a prefix cannot be used for it.

    Uses transformers' private functions: if one is missing or answers unexpectedly, that is an
    error, and the call is computed without VUA.
    """
    if args:
        raise InputError("it is given more than two positional arguments")
    prepares = model.prepare_inputs_for_generation
    if getattr(prepares, "__func__", None) is not type(model).prepare_inputs_for_generation:
        raise InputError("its inputs are prepared by another class (PEFT's prompt tuning)")
    config, others = model._prepare_generation_config(generation_config, **kwargs)  # noqa: SLF001
    ids = others.get("input_ids") if inputs is None else inputs
    for obstacle in _obstacles(ids, config, others):
        raise InputError(obstacle)
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        return _Call(ids, None, config)
    mask = others.get("attention_mask")
    if mask is None:
        tokens = copy.deepcopy(config)
        model._prepare_special_tokens(tokens, None, device=ids.device, batch_size=len(ids))  # noqa: SLF001
        mask = model._prepare_attention_mask_for_generation(ids, tokens, others)  # noqa: SLF001
        if any(bool(row[: int((row == 0).sum())].any()) for row in mask):
            raise InputError("the prompt contains the padding token; pass attention_mask")
    return _Call(ids, None if bool((mask == 1).all()) else mask, config)


def _plain_generate(model: Any) -> Any:
    return types.MethodType(type(model).generate, model)


def _obstacles(ids: Any, config: Any, others: dict[str, Any]) -> Iterator[str]:
    """Yield the reasons why a call cannot begin with a stored prefix.

    Args:
        ids: the prompt.
        config: the settings in effect.
        others: arguments that are not settings.
    """
    given = {
        name
        for name, value in others.items()
        if value is not None and not (name in _KINDS_OF_TOKENS and not bool(value.any()))
    } - _NO_MODEL_INPUTS
    if given:
        yield f"it is given {', '.join(sorted(given))}, which may matter as much as the ids"
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


def _common_length(sequences: torch.Tensor, prompt: int, eos_token_id: Any) -> int:
    ends = torch.tensor([] if eos_token_id is None else eos_token_id, device=sequences.device)
    ended = torch.isin(sequences[:, prompt:], ends).any(dim=0)
    return prompt + (int(ended.int().argmax()) + 1 if bool(ended.any()) else len(ended))
