"""Which SGLang this backend works with, and whether its page names are VUA's chunk names."""

from __future__ import annotations

from typing import Final

import sglang
from packaging.version import InvalidVersion, Version
from sglang.srt.mem_cache.utils import get_hash_str

from vua.errors import ConfigError
from vua.format.keys import KeyChain, token_ids

__all__ = ["check_version"]

OLDEST: Final = Version("0.5.23")
NEWEST: Final = Version("0.5.23")
"""The backend is tested with these. It relies on more than the documented interface: which thread
calls it, the names of pages, the forms of the host pools, the updates of weights."""


def check_version() -> None:
    """Refuse an SGLang with which this backend was never run.

    Raises:
        ConfigError: with the version found, the range, and what to do; or its pages have other
            names than VUA's chunks.
    """
    try:
        found = Version(sglang.__version__)
    except InvalidVersion:  # a custom build: its maker knows
        found = OLDEST
    release = Version(".".join(map(str, found.release)))
    if not OLDEST <= release <= NEWEST:
        raise ConfigError(
            f"SGLang {sglang.__version__} is not supported: this version of VUA works with "
            f"{OLDEST} to {NEWEST}. Install one of these, or look for another version of VUA"
        )
    chain, ids = KeyChain(token_ids(range(24)), 8), list(range(24))
    expected = [chain[at].name for at in range(3)]
    if [*get_hash_str(ids[:16], None, 8), *get_hash_str(ids[16:], expected[1], 8)] != expected:
        raise ConfigError(
            f"SGLang {sglang.__version__} names pages differently from VUA's chunks, so nothing "
            "could be shared with other engines; look for another version of VUA"
        )
