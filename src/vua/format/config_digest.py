"""The digest of a model's config: part of the identity of what it computes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from vua.errors import ConfigError

__all__ = ["IGNORED_CONFIG_KEYS", "config_digest"]

# Top-level config keys that cannot change K or V. Everything else counts: an unknown key costs
# hits, never a wrong one. `architectures` counts, because it chooses the code that runs.
IGNORED_CONFIG_KEYS = frozenset(
    # The KV dtype is a field of its own; loaders set these to what they were asked for.
    "dtype torch_dtype transformers_version name_or_path _name_or_path "  # noqa: SIM905 - words
    "_commit_hash _auto_class _is_quantized "
    # What a call returns, and which kernel computes attention.
    "use_cache return_dict output_attentions output_hidden_states attn_implementation "
    "_output_attentions _attn_implementation _attn_implementation_internal "
    "_attn_implementation_autoset _experts_implementation _experts_implementation_internal "
    # The head behind the last layer; vLLM unties it where the checkpoint holds one.
    "tie_word_embeddings id2label label2id num_labels problem_type "
    # How tokens are chosen; the tokens themselves are in the key.
    "bos_token_id eos_token_id pad_token_id generation_config do_sample temperature top_k top_p "
    "min_length max_length num_beams num_return_sequences repetition_penalty".split()
)


def config_digest(config: Mapping[str, object]) -> str:
    """Return 64 hex digits that stand for a Hugging Face text config.

    Pass `to_dict()` of the config object that the engine runs with: unlike `config.json` it holds
    defaults and overrides. Every key counts except a few that cannot change K or V.

    >>> config_digest({"rope_theta": 10000}) == config_digest({"rope_theta": 10000.0})
    True

    Raises:
        ConfigError: a value is nothing that JSON knows, so it has no digest that lasts.
    """
    counting = {key: value for key, value in config.items() if key not in IGNORED_CONFIG_KEYS}
    if counting.get("sliding_window") == 0:  # some write 0 for no window, and vLLM makes it None
        counting["sliding_window"] = None
    text = json.dumps(_canonical(counting, "config"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(b"vua.config.v2\n" + text.encode()).hexdigest()


def _canonical(value: object, where: str) -> object:
    """Return `value` in the one form that all equal values share."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list | tuple):
        return [_canonical(item, f"{where}[{n}]") for n, item in enumerate(value)]
    if isinstance(value, Mapping):
        items = {str(key): _canonical(item, f"{where}.{key}") for key, item in value.items()}
        if len(items) == len(value) and all(isinstance(key, str | int) for key in value):
            return items
        raise ConfigError(f"{where} has keys that JSON cannot tell apart: {list(value)!r}")
    raise ConfigError(
        f"{where} is a {type(value).__name__}, which has no lasting digest; pass the config's "
        "to_dict(), or give the identity a label of your own"
    )
