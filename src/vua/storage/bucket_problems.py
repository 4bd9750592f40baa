"""What a failed request to a bucket tells whoever runs the machine, without a secret."""

from __future__ import annotations

import errno
import re
from typing import Final

from vua.errors import NotWritableError, StorageError, StorageFullError

__all__ = ["explained", "told"]

_CODE: Final = re.compile(r"(?:<Code>|\(code: )(\w{1,60})[<)]")
"""In an answer; in what the library says of one among many deletions."""
_STATUS: Final = re.compile(r"\b([45]\d\d) [A-Z][A-Za-z ]{2,40}")
_DENIED: Final = "AccessDenied"
_CHANGES: Final = ("put", "copy", "delete")
"""Kinds of requests that are refused to those who may only read."""
_READ: Final = "s3:GetObject; where there is no such object, s3:ListBucket"
_RIGHTS: Final = {
    "get": _READ,
    "head": _READ,
    "list": "s3:ListBucket",
    "put": "s3:PutObject",
    "copy": "s3:GetObject and s3:PutObject",
    "delete": "s3:DeleteObject",
}
"""What the policies of S3 call the right to each kind of request."""


def explained(problem: Exception, kind: str, where: str) -> StorageError:
    """Return the error that tells an operator what a failed request of some kind means.

    A NotWritableError only where these credentials lack the right to change something: what they
    may read goes on being read.
    """
    text = told(problem)
    if _DENIED in text:
        refusal = NotWritableError if kind in _CHANGES else StorageError
        advice = f"these credentials lack the right to it (in a policy of S3: {_RIGHTS[kind]})"
        return refusal(errno.EACCES, f"{where}: {kind} refused ({text}); {advice}")
    refused = type(problem).__name__ in ("PermissionDeniedError", "UnauthenticatedError")
    if refused or re.search("Expired|Authorization|[Rr]edirect|Skewed", text):
        advice = "check the credentials and their expiry, the clock, the region and the policy"
        return StorageError(errno.EACCES, f"{where}: refused ({text}); {advice}")
    if "NoSuchBucket" in text:
        return StorageError(errno.ENOENT, f"{where}: no such bucket ({text})")
    if re.search("507|Quota|Insufficient ?Storage", text):
        return StorageFullError(errno.ENOSPC, f"{where}: no room ({text})")
    return StorageError(errno.EIO, f"{where}: {text}")


def told(problem: Exception) -> str:
    """Say in a few words what a request failed with: an answer may hold keys and signatures."""
    text = str(problem)
    found = [match.group(1) for match in (_STATUS.search(text), _CODE.search(text)) if match]
    if found:
        return " ".join(dict.fromkeys(found))
    for words in (
        "builder error",
        "redirect",
        "timed out",
        "error sending request",
        "error decoding",
    ):
        if words in text:
            http = words == "builder error" and "http://" in text
            return "plain http, which AWS_ALLOW_HTTP=true allows" if http else words
    return type(problem).__name__
