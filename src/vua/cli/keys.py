"""The keys that commands are given: the same arguments everywhere, and what is made with them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from vua.errors import ConfigError
from vua.format.keys import KeyChain
from vua.security.keyring import KnownKeys, NoKeyError, check_keys
from vua.security.settings import Security
from vua.store.namespace import Namespace

if TYPE_CHECKING:
    from vua.security.seal import Seal  # needs an optional package

__all__ = [
    "NO_KEYS",
    "key_arguments",
    "key_ids",
    "prompt_keys",
    "security_of",
]

NO_KEYS: Final = Security()
"""The settings where no keys are given."""


def key_arguments() -> argparse.ArgumentParser:
    """Return a parent for parsers of commands that can use keys; see :func:`security_of`."""
    parent = argparse.ArgumentParser(add_help=False)
    group = parent.add_argument_group("keys", "as the engines are told them; none by default")
    group.add_argument("--key-file", metavar="FILE", help="the directory's own key")
    group.add_argument("--tenant-keys", metavar="DIR", help="keys of cache salts")
    group.add_argument("--encrypt", action="store_true", help="what is --key-file's is encrypted")
    return parent


def security_of(options: argparse.Namespace) -> Security:
    """Return what the arguments say. Raises ConfigError where such keys cannot be used."""
    security = Security(
        key_file=options.key_file, tenant_keys=options.tenant_keys, encrypt=options.encrypt
    )
    check_keys(security)
    return security


def key_ids(security: Security) -> frozenset[str]:
    """Return the ids of all keys, read now; never none, which would make every key a lost one.

    Raises ConfigError where nothing is given, where a file of it is no usable key, or where a
    directory of keys holds none.
    """
    if security.key_file is None and security.tenant_keys is None:
        msg = "--lost-keys needs the keys that are not lost: --key-file, --tenant-keys, or both"
        raise ConfigError(msg)
    known = KnownKeys(security)
    if security.tenant_keys is not None and not known.tenants:
        msg = (
            f"--tenant-keys {security.tenant_keys} holds no key, so every tenant's chunks would "
            "go; is it the right directory? Leave it out if that is meant (and give --key-file)"
        )
        raise ConfigError(msg)
    return known.ids


def prompt_keys(namespace: Namespace, ids: bytes, salt: str) -> tuple[KeyChain, Seal | None]:
    """Return the chunk keys of a prompt as engines with its keys name them, and their seal, if any.

    Raises NoKeyError where the salt's key is not to be had: nothing of it is cached then.
    """
    extras = {0: [("salt", salt.encode())]} if salt else None
    try:
        keys = namespace.keys(ids, extras, salt.encode())
        seal = namespace.keyring.seal(keys.tenant)
    except NoKeyError as problem:
        if salt and isinstance(problem.__cause__, FileNotFoundError):
            msg = "no key for this salt; `vua key DIR --salt S`"
            raise NoKeyError(msg) from problem
        raise
    return keys, seal
