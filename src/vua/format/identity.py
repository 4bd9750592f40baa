"""The conditions under which two KV caches are the same.

An `Identity` names everything that K and V depend on besides the token ids. Its `namespace` is the
directory that they are stored in, so caches of different identities never mix. It is the same in
every process and on every host. It does not promise that an engine computes what its config says.
The engine's adapter fills it in; the store only compares namespaces.

:func:`config_digest` digests a model's config, a part of the identity. :func:`counted_fields` lists
what it digests, for people. :func:`named_by` adds the engine that stores: engines read the same
config differently, so each has namespaces of its own. Another engine that reads them compares.

:func:`rope_order` says in which order a model's rotary embedding pairs the elements of a stored K
row. K is stored after rotation, so two engines that pair elements differently store different bytes
for the same tokens. Every engine that VUA knows stores K of a listed model type in the listed
order.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from vua.errors import ConfigError

VERSION = "vua.identity.v1"
_CHUNK_TOKENS = range(1, 65537)
_ROPE_ORDERS = ("", "neox", "interleaved")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Everything but the tokens that a KV cache depends on.

    Holds nothing about how an engine runs (name, version, TP size, rank, block size, paged layout).

    >>> llama = Identity(model="a label", kv_dtype="BF16", rope="neox")
    >>> llama.namespace == Identity(model="a label", kv_dtype="F16", rope="neox").namespace
    False

    Args:
        model: digest of the text config (:func:`config_digest`), or the caller's own label, which
            must be unique per model.
        weights: :func:`vua.weights.weights_fingerprint` or a hub commit.
        adapter: fingerprint of the LoRA applied to every request; "" for none.
        kv_dtype: dtype of the stored values by its safetensors name, such as "BF16" or "F8_E4M3".
        kv_scales: digest of the scales of a quantised cache; "" for none.
        rope: rotated dimensions as "neox" halves, "interleaved" pairs, or "" if unknown.
        epoch: raised by an operator to abandon everything stored before.
        chunk_tokens: tokens per chunk, 1 to 65536.
        name: for humans; not part of the namespace.
        counted: for humans, what ``model`` is a digest of; kept as :func:`counted_fields` returns
            it. Not part of the namespace, and not compared.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    model: str
    weights: str = ""
    adapter: str = ""
    kv_dtype: str = ""
    kv_scales: str = ""
    rope: str = ""
    epoch: str = ""
    chunk_tokens: int = 64
    name: str = ""
    counted: Mapping[str, object] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in self._values().items():
            kind = int if name == "chunk_tokens" else str
            if type(value) is not kind:
                raise ConfigError(f"identity.{name} must be {kind.__name__}, not {value!r}")
        if self.rope not in _ROPE_ORDERS:
            raise ConfigError(f"identity.rope must be one of {_ROPE_ORDERS}, not {self.rope!r}")
        if self.chunk_tokens not in _CHUNK_TOKENS:
            raise ConfigError(f"identity.chunk_tokens={self.chunk_tokens} is not in 1..65536")
        object.__setattr__(self, "counted", counted_fields(self.counted))

    @classmethod
    def of_config(cls, config: Mapping[str, object], **others: Any) -> Identity:
        """Return the identity of a model by its config; ``others`` are its other fields.

        >>> llama = Identity.of_config({"model_type": "llama", "hidden_size": 64})
        >>> dict(llama.counted)
        {'hidden_size': 64, 'model_type': 'llama'}

        Raises ConfigError as :func:`config_digest`, and as the constructor.
        """
        return cls(model=config_digest(config), counted=config, **others)

    def __getstate__(self) -> list[object]:
        """Pickle it without what counted: an engine sends its identity with each step."""
        return [*self._values().values(), {}]

    def _values(self) -> dict[str, str | int]:
        return {name: getattr(self, name) for name in FIELDS}

    def encode(self) -> bytes:
        """Return the canonical bytes of the identity; different identities have different bytes."""
        parts = [VERSION]
        for name, value in self._values().items():
            if name != "name":
                parts += [name, str(value)]
        return framed(*(part.encode(errors="surrogatepass") for part in parts))

    @property
    def namespace(self) -> str:
        """64 hex digits that name the directory of this identity's chunks."""
        return hashlib.sha256(self.encode()).hexdigest()

    def describe(self) -> dict[str, str | int]:
        """Return the identity as plain values, as `namespace.json` holds it."""
        described: dict[str, str | int] = {"version": VERSION, "namespace": self.namespace}
        return described | self._values()

    @classmethod
    def from_description(
        cls, description: Mapping[str, object], counted: object = None
    ) -> Identity:
        """Return the identity that `describe` described; an unusable ``counted`` is left out.

        >>> same = Identity(model="a label")
        >>> Identity.from_description(same.describe()) == same
        True

        Raises:
            ConfigError: a key is unknown or missing, or the fields do not give the namespace.
        """
        if odd := {"version", "namespace", *FIELDS} ^ {*description}:
            raise ConfigError(
                f"a described identity lacks, or has besides, {', '.join(sorted(odd))}"
            )
        values: dict[str, Any] = {name: description[name] for name in FIELDS}  # checked there
        identity = cls(**values)
        with contextlib.suppress(ConfigError, RecursionError):
            values["counted"] = counted or {}
            identity = cls(**values)
        if identity.describe() != description:
            raise ConfigError(
                f"a described identity's fields give the namespace {identity.namespace}, "
                f"{VERSION}; it claims another one: damage, or another version of VUA"
            )
        return identity


FIELDS: Final = tuple(each.name for each in fields(Identity) if each.name != "counted")


def framed(*parts: bytes) -> bytes:
    """Return bytes, each part with its length, so that no two sequences of parts look alike."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


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
    # How the same function is divided, and what is returned beside it.
    "chunk_size_feed_forward output_router_logits router_aux_loss_coef "
    # Training, and weights before they are read: a model that drops anything out is refused. Names
    # of dropouts that transformers applies when it does not train are not here.
    "attention_dropout attn_dropout attn_pdrop attention_probs_dropout_prob hidden_dropout "
    "hidden_dropout_prob activation_dropout resid_pdrop resid_dropout residual_dropout embd_pdrop "
    "embed_dropout embedding_dropout ffn_dropout dropout layerdrop decoder_layerdrop "
    "classifier_dropout initializer_range initializer_factor init_std gradient_checkpointing "
    # The head after the last layer; vLLM unties it if the checkpoint holds one.
    "tie_word_embeddings id2label label2id num_labels problem_type "
    # How tokens are chosen; the tokens themselves are in the key.
    "bos_token_id eos_token_id pad_token_id generation_config do_sample temperature top_k top_p "
    "min_length max_length num_beams num_return_sequences repetition_penalty tokenizer_class "
    "sep_token_id decoder_start_token_id model_max_length".split()
)


def config_digest(config: Mapping[str, object]) -> str:
    """Return 64 hex digits that identify a Hugging Face text config.

    Pass `to_dict()` of the config object that the engine runs with: unlike `config.json` it holds
    defaults and overrides. Every key counts except a few that cannot change K or V.

    >>> config_digest({"rope_theta": 10000}) == config_digest({"rope_theta": 10000.0})
    True

    Raises:
        ConfigError: a value is not a JSON value, so it has no lasting digest.
    """
    text = json.dumps(_counting(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(b"vua.config.v2\n" + text.encode()).hexdigest()


def named_by(engine: str, config: Mapping[str, object]) -> dict[str, object]:
    """Return a config under the name of the engine that stores: "vllm" or "sglang".

    A reader that is another engine finds these chunks by the same name, given the same config. It
    computes one of them before it believes any.

    >>> named_by("vllm", {"model_type": "llama"})
    {'model_type': 'llama', 'vua.engine': ['vllm']}
    """
    return {**config, "vua.engine": [engine]}


def _counting(config: Mapping[str, object]) -> object:
    if not isinstance(config, Mapping):
        raise ConfigError(f"expected a mapping of a config's fields, found {config!r:.40}")
    counting = {key: value for key, value in config.items() if key not in IGNORED_CONFIG_KEYS}
    if not _longest_counts(config):
        counting.pop("max_position_embeddings", None)
    if counting.get("sliding_window") == 0:  # some write 0 for no window, and vLLM makes it None
        counting["sliding_window"] = None
    try:
        return canonical(counting, "config")
    except ConfigError as problem:
        raise ConfigError(
            f"{problem}; pass the config's to_dict(), or give the identity a label of your own"
        ) from None


_MAX_COUNTED_NBYTES: Final = 12 << 10
"""A lifecycle rule of a bucket spares objects up to 16 KiB: the whole description must be one."""
_MAX_VALUE_NBYTES: Final = 1024
_SHOWN_NBYTES: Final = 256
_SECRET: Final = re.compile(
    r"secret|passw|credential|api_?key|(auth|access|hf)_?token", re.IGNORECASE
)
_MORE: Final = "..."


def counted_fields(config: Mapping[str, object]) -> dict[str, object]:
    """Return what :func:`config_digest` digests, by path, in order of paths. For people.

    A value longer than 1 KiB is cut and shows its digest, one with a secret's name is left out, and
    the JSON of all has at most 12 KiB: what is beyond is counted under "...". The result is
    returned unchanged.

    >>> counted_fields({"rope": {"theta": 1e4}, "layers": [{"window": 8}], "use_cache": True})
    {'layers[0].window': 8, 'rope.theta': 10000}

    Raises ConfigError as :func:`config_digest`.
    """
    leaves = dict(_leaves(_counting(config), ""))
    more, left, beyond = leaves.pop(_MORE, None), _MAX_COUNTED_NBYTES, 0
    found: dict[str, object] = {}
    for path, value in sorted(leaves.items()):
        shown, nbytes = _shown(path, value)
        left -= len(json.dumps(path)) + nbytes
        if left >= 0:
            found[path] = shown
        else:
            beyond += 1
    if more or beyond:
        found[_MORE] = f"{beyond} more" if beyond else more
    return found


def _shown(path: str, value: object) -> tuple[object, int]:
    """Return what is shown of a value, and at most how many bytes it takes in a file."""
    text = json.dumps(value)
    if _SECRET.search(path):
        value = "(not shown)"
    elif len(text) > _MAX_VALUE_NBYTES:
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        value = f"{text[:_SHOWN_NBYTES]}... ({len(text)} characters, SHA-256 {digest}...)"
        text = json.dumps(value)
    elif not isinstance(value, str) and ("NaN" in text or "Infinity" in text):
        value = text  # it is no JSON
    return value, len(text) + 4 * text.count(",") + 12  # each item has a line of its own


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for at, item in enumerate(value):
            yield from _leaves(item, f"{path}[{at}]")
    elif path:
        yield path, value


def canonical(value: Any, where: str, adapt: Callable[[Any, str], Any] | None = None) -> Any:
    """Return a value in the one JSON form that all equal values share.

    >>> canonical({"a": (1.0, 2.5)}, "config")
    {'a': [1, 2.5]}

    Args:
        value: of JSON's kinds, with tuples.
        where: what it is, for the error.
        adapt: turns what is of an engine's own kinds, at each depth, into these.

    Raises:
        ConfigError: it is of another kind, or has keys that JSON cannot tell apart.
    """
    if adapt is not None:
        value = adapt(value, where)
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list | tuple):
        return [canonical(item, f"{where}[{n}]", adapt) for n, item in enumerate(value)]
    if isinstance(value, Mapping):
        items = {str(key): canonical(item, f"{where}.{key}", adapt) for key, item in value.items()}
        if len(items) == len(value) and all(isinstance(key, str | int) for key in value):
            return items
        raise ConfigError(f"{where} has keys that JSON cannot tell apart: {list(value)!r}")
    raise ConfigError(f"{where} is a {type(value).__name__}, which has no lasting digest")


# Read off both sides: `rotate_half` in transformers' modeling_<type>.py (5.19), and
# `is_neox_style` of `get_rope` in vLLM's model of the same architecture (0.32), or vLLM's
# TransformersForCausalLM, which runs transformers' own rotation. All were also compared by number;
# mellum with SGLang's model (0.5.23), too.
# Left out on purpose: the DeepSeek family (transformers regroups the pairs, vLLM does not) and
# models that rotate by sections (the "mrope" of vision models).
NEOX: Final = frozenset(
    "llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text "  # noqa: SIM905 - one word each
    "phi phi3 olmo olmo2 olmo3 olmoe granite granitemoe starcoder2 stablelm smollm3 seed_oss "
    "gpt_neox gpt_oss nemotron arcee hunyuan_v1_dense hunyuan_v1_moe mellum falcon glm4_moe "
    "opt".split()  # learned positions: K is not rotated, so there is nothing to order
)
INTERLEAVED: Final = frozenset({"cohere", "cohere2", "ernie4_5", "glm", "glm4", "gptj"})

# transformers recomputes the frequencies when a sequence outgrows the original context; vLLM
# chooses those of "longrope" by the longest context it was started for.
_BY_LENGTH: Final = ("dynamic", "longrope")


def rope_order(model_type: str) -> str:
    """Return "neox" (halves), "interleaved" (neighbours), or "" if unknown.

    Args:
        model_type: of the text config, such as "llama" or "gemma3_text".

    >>> rope_order("qwen3"), rope_order("cohere2"), rope_order("gpt2")
    ('neox', 'interleaved', '')
    """
    if model_type in NEOX:
        return "neox"
    return "interleaved" if model_type in INTERLEAVED else ""


# All that plain frequencies are computed of, and those of "llama3" and "yarn" that name the
# original length: then `max_position_embeddings` only says how long a prompt may be. "dynamic",
# "longrope" and others compute frequencies of it.
_PLAIN_ROTATIONS: Final = ("default", "linear")
_OWN_LENGTH: Final = ("llama3", "yarn")
_ROTATION_KEYS: Final = frozenset(
    "rope_type type rope_theta partial_rotary_factor factor attention_factor low_freq_factor "  # noqa: SIM905
    "high_freq_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim "
    "truncate".split()
)


_OTHER_CODE: Final = frozenset(("vua.code", "vua.class", "vua.sglang_code"))


def _longest_counts(config: Mapping[str, object]) -> bool:
    """Whether K may depend on `max_position_embeddings`, as far as engines' own code is known."""
    known = rope_order(str(config.get("model_type", ""))) and _OTHER_CODE.isdisjoint(config)
    return not (known and (kinds := _rotations(config)) and all(map(_names_its_length, kinds)))


def _names_its_length(rope: Mapping[str, object]) -> bool:
    numbers = rope.get("factor"), rope.get("original_max_position_embeddings")
    complete = all(isinstance(number, int | float) for number in numbers)
    kinds = _PLAIN_ROTATIONS + (_OWN_LENGTH if complete else ())
    return rope.get("rope_type") in kinds and rope.keys() <= _ROTATION_KEYS


def _rotations(config: Mapping[str, object]) -> list[Mapping[str, object]]:
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return []
    parts = [part for part in rope.values() if isinstance(part, Mapping)]
    return parts if parts and "rope_type" not in rope else [rope, *parts]


def varies_with_length(config: Mapping[str, object]) -> bool:
    """Whether a token's K may depend on the length of its whole prompt.

    If so, a prefix computed for one prompt cannot be used for another.

    Args:
        config: a text config as `to_dict()` gives it.

    >>> varies_with_length({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}})
    True
    """
    return any(part.get("rope_type") in _BY_LENGTH for part in _rotations(config))


# Settings that cannot change K and V do not count. Each engine has a file `excluded.json`: its
# tables have lists of names by a word for the reason, and "reasons" says what the words mean. What
# is in no table counts.
NOT_COMPUTED: Final = ("files", "logits", "read", "seen", "text")
"""Reasons of what is not a part of the computation of K and V in any engine."""


def tables_of(package: str) -> Mapping[str, Any]:
    """Return the tables of an engine's package, such as "vua.vllm"."""
    from importlib.resources import files  # noqa: PLC0415 - what only looks goes without

    text = (files(package) / "excluded.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def listed(table: Mapping[str, Sequence[str]], *reasons: str) -> frozenset[str]:
    """Return the names in a table that are there for one of these reasons; by default all.

    >>> sorted(listed({"when": ["one", "another"], "seen": ["third"]}))
    ['another', 'one', 'third']
    """
    return frozenset(name for reason in reasons or table for name in table.get(reason, ()))
