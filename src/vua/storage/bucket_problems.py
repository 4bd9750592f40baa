"""What a failed request to a bucket tells whoever runs the machine, without a secret.

A sentence names the object, the endpoint, whose credentials were used, what was answered, and the
setting to look at.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from typing import Final

from vua.errors import NotWritableError, StorageError, StorageFullError

__all__ = ["explained", "is_denied", "is_unsupported", "told", "wants_checksum"]

_CODE: Final = re.compile(r"(?:<Code>|\(code: )(\w{1,60})[<)]")
"""In an answer; in what the library says of one among many deletions."""
_STATUS: Final = re.compile(r"\b([345]\d\d) [A-Z][A-Za-z ]{2,40}")
_REGION: Final = re.compile(r"<Region>([a-z0-9-]{1,40})</Region>")
_LENT: Final = re.compile(
    r"External \w+ credential provider: \w+: (?:\[Errno \d+\] )?([^\n]{1,500})"
)
"""What our own provider of credentials raised, see :mod:`vua.storage.bucket_client`."""
_METADATA: Final = re.compile(
    r"169\.254\.\d+\.\d+|fd00:ec2::|metadata\.google|latest/api/token|/latest/meta-data"
    r"|AssumeRoleWithWebIdentity|WebIdentity|TokenRequest|token request|container credential"
)
"""In what the library says where it asked for credentials and got none."""
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
    "delete": "s3:DeleteObject; an object lock refuses it, too",
}
"""What the policies of S3 call the right to each kind of request."""
_KEYS: Final = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role"
_REFUSALS: Final = (
    ("InvalidAccessKeyId", "the server does not know this access key: check AWS_ACCESS_KEY_ID"),
    (
        "SignatureDoesNotMatch",
        "the secret does not fit the access key: check AWS_SECRET_ACCESS_KEY, and AWS_REGION",
    ),
    (
        "ExpiredToken|TokenRefreshRequired|InvalidToken|InvalidClientTokenId|Expired",
        "the session token has ended or is unknown: renew it, and set AWS_SESSION_TOKEN",
    ),
    (
        "AuthorizationHeaderMalformed|IllegalLocation|[Rr]edirect|InvalidRegion",
        "the bucket is in another region{region}: check AWS_REGION, and AWS_ENDPOINT_URL",
    ),
    ("Skewed", "the clock of this machine is wrong: set it"),
    ("Unauthorized|Authorization|Authentication|InvalidSecurity", "check the credentials"),
)
"""What of an answer to look for, and what it means."""
_CONNECTION: Final = (
    ("ConnectionRefused", "connection refused: no server listens there"),
    ("dns error", "the host's name is not known"),
    ("InvalidContentType", "it does not speak TLS: is it http:// and not https://?"),
    (
        "[Cc]ertificate|UnknownIssuer|NotValidForName",
        "its certificate is not trusted: AWS_CA_BUNDLE names certificates to trust",
    ),
    ("ConnectionReset|BrokenPipe", "the connection was cut"),
    ("NetworkUnreachable|HostUnreachable", "no way leads there"),
)
"""What a connection failed with."""
_OTHERS: Final = (
    ("NoSuchBucket", errno.ENOENT, "no such bucket ({text}); check the bucket and the endpoint"),
    ("507|Quota|Insufficient ?Storage", errno.ENOSPC, "no room ({text})"),
    (
        "^404|^error decoding",
        errno.EIO,
        "{text}; this is no answer of an object store: check the endpoint",
    ),
)
"""What else an answer may be."""
_PANICS: Final = (
    ("InvalidHeaderValue", "a credential or the region holds a character that no header may have"),
    ("InvalidPort|InvalidUri|RelativeUrl|Invalid.*Url", "AWS_ENDPOINT_URL is no http(s)://HOST"),
)
_UNSUPPORTED: Final = frozenset(
    [
        *("NotImplemented", "MethodNotAllowed", "InvalidArgument", "InvalidRequest"),
        *("MalformedXML", "UnsupportedOperation", "UnsupportedArgument", "NotSupported"),
    ]
)
"""Codes by which servers refuse what they do not know."""


def explained(
    problem: BaseException, kind: str, where: str, endpoint: str = "", identity: str = ""
) -> StorageError:
    """Return the error that tells an operator what a failed request of some kind means.

    ``endpoint`` and ``identity`` say where the server is and where the credentials come from. A
    NotWritableError only where these credentials lack the right to change something: what they may
    read goes on being read.
    """
    text, at = told(problem), f" at {endpoint}" if endpoint else ""
    if _DENIED in text:
        refusal = NotWritableError if kind in _CHANGES else StorageError
        who = f" to {identity}" if identity else ""
        advice = f"these credentials lack the right to it (in a policy of S3: {_RIGHTS[kind]})"
        return refusal(errno.EACCES, f"{where}{at}: {kind} refused{who} ({text}); {advice}")
    code, meaning = _meaning(problem, text, identity)
    kinds = {errno.ENOSPC: StorageFullError}
    return kinds.get(code, StorageError)(code, f"{where}{at}: {meaning}")


def _meaning(problem: BaseException, text: str, identity: str) -> tuple[int, str]:
    """Return the number of an error, and what it means and what to do."""
    said, advice = str(problem), ""
    if lent := _LENT.search(said):
        return errno.EACCES, f"no credentials: {lent[1]}"
    if _METADATA.search(said):
        return errno.EACCES, f"no credentials found ({text}, asking for {identity}); {_KEYS}"
    if advice := _refusal(text, said, type(problem).__name__):
        who = f" to {identity}" if identity else ""
        return errno.EACCES, f"refused{who} ({text}); {advice}"
    for pattern, code, meaning in _OTHERS:
        if re.search(pattern, text):
            return code, meaning.format(text=text)
    if type(problem).__name__ == "PanicException":
        text, advice = "the client broke off", _found(_PANICS, said) or "check its settings"
    elif text == "error sending request":
        advice = _found(_CONNECTION, said) or "check AWS_ENDPOINT_URL and the network"
    return errno.EIO, f"{text}; {advice}" if advice else text


def _found(known: Sequence[tuple[str, str]], said: str) -> str:
    return next((advice for what, advice in known if re.search(what, said)), "")


def _refusal(text: str, said: str, name: str) -> str:
    """Return what to do where the credentials or what they were sent with are refused."""
    for pattern, advice in _REFUSALS:
        if re.search(pattern, text):
            region = _REGION.search(said)
            return advice.format(region=f" ({region[1]})" if region else "")
    if name in ("PermissionDeniedError", "UnauthenticatedError") or "403" in text:
        return f"it says no reason: check these credentials and their rights, or {_KEYS}"
    return ""


def told(problem: BaseException) -> str:
    """Say in a few words what a request failed with: an answer may hold keys and signatures."""
    text = str(problem)
    if type(problem).__name__ == "InvalidPathError":
        path = re.search(r'Path "(.{1,200}?)"', text, re.DOTALL)
        return f"a key that is no path, {path[1] if path else ''!r}; delete it, or move the cache"
    found = [match.group(1) for match in (_STATUS.search(text), _CODE.search(text)) if match]
    if found:
        return " ".join(dict.fromkeys(found))
    for words in (
        "builder error",
        "redirect",
        "timed out",
        "error sending request",
        "error decoding",
        "NoSuchBucket",
        "more was sent than announced",
    ):
        if words in text:
            http = words == "builder error" and "http://" in text
            return "plain http, which AWS_ALLOW_HTTP=true allows" if http else words
    if missing := re.search(r"source: Missing(\w{1,40})", text):
        return f"{missing[1]} is missing"
    return type(problem).__name__


def is_unsupported(problem: BaseException) -> bool:
    """Whether a server refused a request as one that it does not know."""
    words = told(problem).split()
    named = type(problem).__name__ in ("NotSupportedError", "NotImplementedError")
    return named or bool(_UNSUPPORTED.intersection(words)) or words in (["501"], ["405"], ["400"])


def is_denied(problem: BaseException) -> bool:
    """Whether it refused one for want of rights, or for an object lock."""
    return _DENIED in told(problem) or type(problem).__name__ == "PermissionDeniedError"


def wants_checksum(text: str) -> bool:
    """Whether what a server said is that a write needs a checksum, as with object lock."""
    return "Content-MD5" in text or "ObjectLockHeaders" in text
