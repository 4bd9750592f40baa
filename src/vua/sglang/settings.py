"""The backend's settings, in SGLang's extra configuration beside SGLang's own; names of chunks.

SGLang's page hashes are VUA's chunk names. SGLang passes a backend the hashes of some pages and of
all pages before them, never tokens. A request's cache salt, ``extra_key`` and LoRA adapter are in
the hash of its first page, as a seed in place of the missing parent. So such pages have SGLang's
own names: they match no other salt, and no other engine's. An adapter appears there by SGLang's id;
its content is in the identity (`vua.sglang.identity`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from vua.connector.config import ConnectorConfig
from vua.errors import ConfigError
from vua.format.keys import KeyRun

_OPTION: Final = "--hicache-storage-backend-extra-config"
_OF_SGLANG: Final = ("backend_name", "module_path", "class_name", "interface_v1")


def settings_of(extra: Mapping[str, object]) -> ConnectorConfig:
    """Read SGLang's free-form mapping.

    Raises ConfigError: a setting is unknown, unusable, or not supported with SGLang.
    """
    if not extra.get("interface_v1"):
        raise ConfigError(f'VUA needs "interface_v1": 1 in {_OPTION}')
    ours = {name: value for name, value in extra.items() if name not in _OF_SGLANG}
    try:
        how = "take the arguments that `vua args sglang DIRECTORY` prints"
        config = ConnectorConfig.from_extra_config(ours, how=how)
    except ConfigError as problem:
        raise ConfigError(str(problem).replace("kv_connector_extra_config", _OPTION)) from problem
    security = config.security
    if security.key_file or security.tenant_keys or security.encrypt:
        raise ConfigError(
            f"{_OPTION}: keys cannot be used with SGLang, which names pages by hashes of their own "
            "that are not secret; keep the directory on encrypted storage instead"
        )
    if config.gds_mode == "required":
        raise ConfigError(f'{_OPTION}: gds_mode "required": SGLang loads through host memory')
    return config


def chunk_keys(before: Sequence[str], pages: Sequence[str], chunk_tokens: int) -> KeyRun:
    """Return the keys of a prompt's first pages, those ``before`` included.

    Args:
        before: hashes (64 hex) of all pages before ``pages``.
        pages: hashes of consecutive pages.
        chunk_tokens: tokens per page.

    >>> [key.start for key in chunk_keys(["00" * 32], ["11" * 32], 64)]
    [0, 64]
    """
    digests = bytes.fromhex("".join((*before, *pages)))
    return KeyRun(0, chunk_tokens, digests, {0: (b"", b"")})
