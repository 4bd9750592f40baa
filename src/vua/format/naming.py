"""What names of prefixes depend on beside the tokens: extras, and a secret.

What belongs to one request and changes its K/V without being a token (cache salt, LoRA adapter,
image content) enters as *extras*, at the chunk where it first matters. There a digest over a tag,
the parent and the length-prefixed extras replaces the parent.

With a secret (:class:`Naming`) HMAC-SHA256 stands in place of SHA-256 throughout, and names tell
nothing to whom does not have it: neither what was asked nor whether two know the same prompt.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final, NamedTuple

__all__ = ["Naming", "extras_parent", "secret_chain"]

_EXTRAS_TAG: Final = b"vua.extras.v1"


class Naming(NamedTuple):
    """What names are made with where they are to be secret."""

    tenant: str
    """Whose key it is, see :class:`vua.security.keyring.Keyring`; empty for the directory's own."""
    secret: bytes
    """Of one namespace, 32 bytes."""

    def __repr__(self) -> str:
        """Return the name without the secret."""
        return f"Naming({self.tenant!r})"


def extras_parent(
    parent: bytes, extras: Sequence[tuple[str, bytes]], naming: Naming | None = None
) -> bytes:
    """Digest that stands in for ``parent`` where ``extras`` (tag, value) first matter.

    Tags and values are length-prefixed and their number is counted, so that no two lists of
    extras, and no extras and no plain parent, can be confused.
    """
    digest: hashlib._Hash | hmac.HMAC = hashlib.sha256(_EXTRAS_TAG)
    if naming is not None:
        digest = hmac.new(naming.secret, _EXTRAS_TAG, "sha256")
    for part in (parent, len(extras).to_bytes(4, "little")):
        digest.update(len(part).to_bytes(8, "little") + part)
    for tag, value in extras:
        for part in (tag.encode(), value):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def secret_chain(secret: bytes, parent: bytes, ids: memoryview, chunk_nbytes: int) -> bytes:
    """As :func:`vua.native.hash_chain`, by an HMAC with ``secret``."""
    digests = bytearray()
    for start in range(0, len(ids), chunk_nbytes):
        text = parent + ids[start : start + chunk_nbytes]
        parent = hmac.digest(secret, text, "sha256")
        digests += parent
    return bytes(digests)
