"""What makes two KV caches the same.

An `Identity` names everything outside the token ids that K and V depend on; its `namespace` is
the directory in which they are stored, so that caches of different identities never meet. It is
the same in every process, on every host and for every engine. Does not promise that an engine
computes what its config says. Adapters fill it in; the store only compares namespaces.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vua.errors import ConfigError

__all__ = ["VERSION", "Identity"]

VERSION = "vua.identity.v1"
_CHUNK_TOKENS = range(1, 65537)
_ROPE_ORDERS = ("", "neox", "interleaved")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Everything but the tokens that a KV cache depends on.

    Holds nothing of how an engine runs (name, version, TP size, rank, block size, paged layout).

    >>> llama = Identity(model="a label", kv_dtype="bfloat16", rope="neox")
    >>> llama.namespace == Identity(model="a label", kv_dtype="float16", rope="neox").namespace
    False

    Args:
        model: digest of the text config (:mod:`vua.format.config_digest`), or a label that the
            caller answers for.
        weights: :func:`vua.weights.weights_fingerprint` or a hub commit.
        adapter: fingerprint of the LoRA applied to every request; "" for none.
        kv_dtype: dtype of the stored values, such as "bfloat16" or "fp8_e4m3".
        kv_scales: digest of the scales of a quantised cache; "" for none.
        rope: rotated dimensions as "neox" halves, "interleaved" pairs, or "" where unknown.
        epoch: bumped by an operator to leave behind everything stored before.
        chunk_tokens: tokens per chunk, 1 to 65536.
        name: for humans; not part of the namespace.

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

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kind = int if field.name == "chunk_tokens" else str
            if type(value) is not kind:
                raise ConfigError(f"identity.{field.name} must be {kind.__name__}, not {value!r}")
        if self.rope not in _ROPE_ORDERS:
            raise ConfigError(f"identity.rope must be one of {_ROPE_ORDERS}, not {self.rope!r}")
        if self.chunk_tokens not in _CHUNK_TOKENS:
            raise ConfigError(f"identity.chunk_tokens={self.chunk_tokens} is not in 1..65536")

    def encode(self) -> bytes:
        """Return the canonical bytes of the identity; different identities never share them."""
        parts = [VERSION]
        for field in fields(self):
            if field.name != "name":
                parts += [field.name, str(getattr(self, field.name))]
        return b"".join(_framed(part.encode(errors="surrogatepass")) for part in parts)

    @property
    def namespace(self) -> str:
        """64 hex digits that name the directory of this identity's chunks."""
        return hashlib.sha256(self.encode()).hexdigest()

    def describe(self) -> dict[str, str | int]:
        """Return the identity in clear, as `namespace.json` holds it."""
        described: dict[str, str | int] = {"version": VERSION, "namespace": self.namespace}
        return described | {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_description(cls, description: Mapping[str, object]) -> Identity:
        """Return the identity that `describe` described.

        >>> same = Identity(model="a label")
        >>> Identity.from_description(same.describe()) == same
        True

        Raises:
            ConfigError: a key is unknown or missing, or the fields do not give the namespace.
        """
        names = [field.name for field in fields(cls)]
        known = ["version", "namespace", *names]
        for key in description:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
                raise ConfigError(f"an identity has no key {key!r}; the nearest one is {near!r}")
        if missing := [key for key in known if key not in description]:
            raise ConfigError(f"the description of an identity lacks {', '.join(missing)}")
        values: dict[str, Any] = {name: description[name] for name in names}  # checked there
        identity = cls(**values)
        claims = {"version": VERSION, "namespace": identity.namespace}
        if any(description[key] != expected for key, expected in claims.items()):
            raise ConfigError(
                f"the fields of a described identity give {claims}, which it does not claim to be; "
                "it is damaged, or another version of VUA wrote it"
            )
        return identity


def _framed(part: bytes) -> bytes:
    return len(part).to_bytes(8, "little") + part
