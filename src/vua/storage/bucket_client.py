"""Clients of object stores: made from the environment, with every failure explained.

Endpoint, region, credentials and certificates come from where the providers' own tools look.
`obstore` judges them: of some it panics, which is an error like any other. Nothing here repeats a
secret.

obstore itself reads AWS's variables, web identity, containers and instance roles. botocore, if
installed, reads profiles, SSO, roles to assume and `credential_process`.

An error names the object, the endpoint, the credentials' source, the answer, and the setting to
check.
"""

from __future__ import annotations

import errno
import functools
import importlib
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from vua.errors import ConfigError, NotWritableError, StorageError, StorageFullError

_CODE: Final = re.compile(r"(?:<Code>|\(code: )(\w{1,60})[<)]")
"""In an answer, and in obstore's message about one of many deletions."""
_STATUS: Final = re.compile(r"\b([345]\d\d) [A-Z][A-Za-z ]{2,40}")
_LENT_TEXT: Final = re.compile(
    r"External \w+ credential provider: \w+: (?:\[Errno \d+\] )?([^\n]{1,500})"
)
_DENIED: Final = "AccessDenied"
_REFUSED: Final = ("PermissionDeniedError", "UnauthenticatedError")
_CHANGES: Final = ("put", "copy", "delete")
_READ: Final = "s3:GetObject; where there is no such object, s3:ListBucket"
_RIGHTS: Final = {
    "get": _READ,
    "head": _READ,
    "list": "s3:ListBucket",
    "put": "s3:PutObject",
    "copy": "s3:GetObject and s3:PutObject",
    "delete": "s3:DeleteObject; an object lock refuses it, too",
}
"""S3's policy names for the right to each kind of request."""
_KEYS: Final = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role"
_METADATA: Final = re.compile(
    r"169\.254\.\d+\.\d+|fd00:ec2::|metadata\.google|latest/api/token|/latest/meta-data"
    r"|AssumeRoleWithWebIdentity|WebIdentity|TokenRequest|token request|container credential"
)
"""obstore's message if it asked an instance for credentials and got none."""
_REMEDIES: Final = (
    ("InvalidAccessKeyId", errno.EACCES, "check AWS_ACCESS_KEY_ID, which this server must know"),
    (
        "SignatureDoesNotMatch",
        errno.EACCES,
        "the secret does not fit the access key: check AWS_SECRET_ACCESS_KEY, and AWS_REGION",
    ),
    (
        "TokenRefreshRequired|InvalidToken|InvalidClientTokenId|Expired",
        errno.EACCES,
        "the session token has ended or is unknown: renew it, and set AWS_SESSION_TOKEN",
    ),
    (
        "AuthorizationHeaderMalformed|IllegalLocation|[Rr]edirect|InvalidRegion",
        errno.EACCES,
        "the bucket is in another region: check AWS_REGION, and AWS_ENDPOINT_URL",
    ),
    ("Skewed", errno.EACCES, "the clock of this machine is wrong: set it"),
    ("NoSuchBucket", errno.ENOENT, "no such bucket: check the bucket and the endpoint"),
    ("^507|Quota|Insufficient ?Storage", errno.ENOSPC, "no room"),
    ("^404|^error decoding", errno.EIO, "not an object store: check the endpoint"),
    (
        "PanicException",
        errno.EIO,
        "the client panicked: check credential, region, endpoint: no line breaks, http://HOST:PORT",
    ),
    ("InvalidContentType", errno.EIO, "it does not speak TLS: is it http:// and not https://?"),
    (
        "[Cc]ertificate|UnknownIssuer|NotValidForName",
        errno.EIO,
        "its certificate is not trusted: AWS_CA_BUNDLE names certificates to trust",
    ),
    ("ConnectionRefused", errno.EIO, "connection refused: no server listens there"),
    ("error sending request", errno.EIO, "check AWS_ENDPOINT_URL and the network"),
)
"""What a failure says, and what to do; the first that fits. Of an answer only its status and code
are searched: the rest names the object, too."""
_ASKED_AGAIN: Final = frozenset((400, 405, 411, 501))
"""Statuses by which servers refuse what they do not know, or want with more headers."""


def explained(
    problem: BaseException, kind: str, where: str, endpoint: str = "", identity: str = ""
) -> StorageError:
    """Return the error that tells an operator what a failed request means.

    ``endpoint`` and ``identity`` say where the server is and where the credentials come from. It is
    a NotWritableError only if these credentials lack the right to change something: reading
    continues then.
    """
    message, text = str(problem), summary_of(problem)
    where = f"{where} at {endpoint}" if endpoint else where
    who = f" to {identity}" if identity else ""
    if _DENIED in text:
        refusal = NotWritableError if kind in _CHANGES else StorageError
        advice = f"these credentials lack the right to it (in a policy of S3: {_RIGHTS[kind]})"
        return refusal(errno.EACCES, f"{where}: {kind} refused{who} ({text}); {advice}")
    if lent := _LENT_TEXT.search(message):
        return StorageError(errno.EACCES, f"{where}: no credentials: {lent[1]}")
    if _METADATA.search(message):
        asked = f", asking for {identity}" if identity else ""
        advice = f"no credentials found ({text}{asked}); {_KEYS}"
        return StorageError(errno.EACCES, f"{where}: {advice}")
    is_answer = status_of(problem) is not None or _CODE.search(message) is not None
    told = text if is_answer else f"{text}\n{message}"
    fits = ((code, advice) for what, code, advice in _REMEDIES if re.search(what, told))
    code, advice = next(fits, (errno.EIO, ""))
    if not advice and (type(problem).__name__ in _REFUSED or status_of(problem) == 403):
        code = errno.EACCES
        advice = f"no reason is given: check these credentials and their rights, or {_KEYS}"
    if code == errno.EACCES:
        text = f"refused{who} ({text})"
    error = StorageFullError if code == errno.ENOSPC else StorageError
    return error(code, f"{where}: {text}; {advice}" if advice else f"{where}: {text}")


def summary_of(problem: BaseException) -> str:
    """Summarise a request's failure in a few words, without the keys and signatures it may hold."""
    text = str(problem)
    if type(problem).__name__ == "InvalidPathError":
        path = re.search(r'Path "(.{1,200}?)"', text, re.DOTALL)
        return (
            f"a key that is not a path, {path[1] if path else ''!r}; delete it, or move the cache"
        )
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


def status_of(problem: BaseException) -> int | None:
    """Return the HTTP status that a server has answered a request with; None if it is not told."""
    found = _STATUS.search(str(problem))
    return int(found[1][:3]) if found else None


def is_refusal(problem: BaseException) -> bool:
    """Whether a server refused a request that it may accept in another form."""
    named = type(problem).__name__ in ("NotSupportedError", "NotImplementedError")
    return named or status_of(problem) in _ASKED_AGAIN


def is_denied(problem: BaseException) -> bool:
    """Whether it refused a request for lack of rights, or because of an object lock."""
    denied = type(problem).__name__ in _REFUSED or _DENIED in str(problem)
    return denied or status_of(problem) in (403, 409, 423)


_RETRY: Final = {
    "max_retries": 5,
    "retry_timeout": timedelta(seconds=4),
    "backoff": {
        "init_backoff": timedelta(milliseconds=50),
        "max_backoff": timedelta(seconds=1),
        "base": 2,
    },
}
"""Requests are retried (jittered) for 4 s at most: engines give up a storage after 10 s."""
_READ_TIMEOUTS: Final = {"connect_timeout": "2s", "read_timeout": "3s", "timeout": "60s"}
"""For requests that answer with bytes: a connection with nothing received for 3 s is dead."""
_WRITE_TIMEOUTS: Final = {"connect_timeout": "2s", "timeout": "30s"}
"""For requests that send: nothing comes back while a body is in flight."""

_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_OTHERS: Final = {
    "gs": (
        "Google Cloud Storage",
        "set GOOGLE_APPLICATION_CREDENTIALS to a service account's key file",
    ),
    "az": (
        "Azure Storage",
        "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or an identity",
    ),
}
"""What an error says of a server, and what to do, where obstore alone looks for credentials."""
_REGIONS: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")
_PAIR: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_PROFILES: Final = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE")
_FILES: Final = (
    ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
    ("AWS_CONFIG_FILE", "~/.aws/config"),
)
_LENT: Final = timedelta(minutes=10)
"""How long botocore's credentials count as valid: it renews them that long before they expire.
obstore asks again at half of it."""
_URL: Final = re.compile(
    r"(?:s3|gs|az)://[A-Za-z0-9$][A-Za-z0-9._$-]{1,254}"
    r"(?:/(?!\.{1,2}(?:/|$))[^\x00-\x1f\x7f/]+)*"
)


@dataclass(frozen=True, slots=True)
class Client:
    """The clients of one prefix in a bucket."""

    reads: Any
    """A store of obstore for requests that answer with bytes."""
    writes: Any
    """One for requests that send."""
    remade: Callable[..., Any]
    """Makes another one like :attr:`writes`, with further settings of obstore's."""
    endpoint: str
    """The server's address, for errors."""
    identity: str
    """The credentials' source, for errors; empty where obstore alone knows."""


@functools.cache
def library() -> Any:
    """Return the package `obstore`. Raises ConfigError if it is not installed."""
    try:
        for part in ("exceptions", "store"):
            importlib.import_module(f"obstore.{part}")
        return importlib.import_module("obstore")
    except ImportError as problem:
        msg = "a cache in a bucket needs the package obstore: pip install obstore"
        raise ConfigError(msg) from problem


def make_client(url: str) -> Client:
    """Return the clients for a URL, and send nothing.

    Raises ConfigError if a setting is unusable; it names the setting and not its value.
    """
    parts = urlsplit(url)
    from_url = library().store.from_url
    if parts.scheme in ("file", "memory"):
        more: dict[str, Any] = {"mkdir": True} if parts.scheme == "file" else {}
        try:
            store = from_url(url, **more)
        except (library().exceptions.BaseError, OSError, ValueError) as problem:
            raise ConfigError(f"{url} cannot be used: {summary_of(problem)}") from None
        return Client(store, store, lambda **_: store, "", "")
    if not _URL.fullmatch(url):
        msg = f"{url}: expected s3://BUCKET/PREFIX, with no empty part and no . or .. in it"
        raise ConfigError(msg)
    if parts.scheme == "s3":
        options, where, identity = _s3(url)
        advice = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_REGION, and AWS_ENDPOINT_URL"
        advice += " for a server of your own"
    else:
        options, identity, (where, advice) = {}, "", _OTHERS[parts.scheme]
    more = {"retry_config": _RETRY, **options}
    common: dict[str, Any] = {"allow_http": _is_on("AWS_ALLOW_HTTP")}
    with suppress(OSError):
        common["root_certificate"] = Path(os.environ.get("AWS_CA_BUNDLE", "")).read_bytes()

    def make(timeouts: Mapping[str, str], **options: Any) -> Any:
        try:
            return from_url(url, client_options={**timeouts, **common}, **more, **options)
        except BaseException as problem:
            if not isinstance(problem, Exception) and not is_panic(problem):
                raise
            msg = f"{url} cannot be used: {summary_of(problem)}; {advice}"
            raise ConfigError(msg) from None

    reads, writes = make(_READ_TIMEOUTS), make(_WRITE_TIMEOUTS)
    remade = functools.partial(make, _WRITE_TIMEOUTS)
    endpoint = re.sub(r"//[^/]*@", "//...@", where)  # a password may be in it
    return Client(reads, writes, remade, endpoint, identity)


def is_panic(problem: BaseException) -> bool:
    """Whether obstore panicked: its exception is not derived from Exception."""
    return type(problem).__name__ == "PanicException"


def _named(names: tuple[str, ...]) -> tuple[str, str] | None:
    return next(((name, os.environ[name]) for name in names if name in os.environ), None)


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true")


# -- S3 -----------------------------------------------------------------------------------------


def _s3(url: str) -> tuple[dict[str, Any], str, str]:
    """Return obstore's settings, the server's address, and the credentials' source."""
    keys = [name for name in _PAIR if name in os.environ]
    if len(keys) == 1:
        (missing,) = set(_PAIR) - set(keys)
        raise ConfigError(f"{url}: {keys[0]} is set and {missing} is not; set both")
    for name in keys:
        if not os.environ[name]:
            raise ConfigError(f"{url}: {name} is empty; give it a value, or unset it")
    # Bodies stay out of signatures: hashing them takes half of a save's CPU time.
    options: dict[str, Any] = {"unsigned_payload": True}
    if "AWS_UNSIGNED_PAYLOAD" in os.environ:
        options = {}
    identity, is_unsigned = _own_identity(), _is_on("AWS_SKIP_SIGNATURE")
    if not (keys or is_unsigned):
        identity, found = _from_files(url, identity)
        options |= found
    if endpoint := _named(_ENDPOINTS):
        options["endpoint"] = endpoint[1]  # obstore does not know all of these variables
    region = (_named(_REGIONS) or ("", options.get("region") or "us-east-1"))[1]
    return options, options.get("endpoint") or f"AWS S3 in {region}", identity


def _own_identity() -> str:
    if _is_on("AWS_SKIP_SIGNATURE"):
        return "no credentials (AWS_SKIP_SIGNATURE)"
    for name, text in (
        ("AWS_ACCESS_KEY_ID", "the access key in AWS_ACCESS_KEY_ID"),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "the web identity in AWS_WEB_IDENTITY_TOKEN_FILE"),
        ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "the container's role"),
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "the container's role"),
    ):
        if name in os.environ:
            return text
    return "the instance's role"


def _from_files(url: str, identity: str) -> tuple[str, dict[str, Any]]:
    """Return the credentials' source, and obstore's settings, by a profile or AWS's files if any.

    Raises ConfigError for what cannot be used.
    """
    profile = _named(_PROFILES)
    files = [Path(os.path.expanduser(os.environ.get(name, path))) for name, path in _FILES]
    if profile is None and not any(file.is_file() for file in files):
        return identity, {}
    where = f"the profile {profile[1]!r}" if profile else "the files of ~/.aws"
    try:
        lender = importlib.import_module("obstore.auth.boto3").Boto3CredentialProvider
        errors = importlib.import_module("botocore.exceptions")
        providers = importlib.import_module("botocore.configprovider")
        session = importlib.import_module("botocore.session").Session()
    except ImportError as problem:
        if profile is None:
            return identity, {}
        raise ConfigError(
            f"{url}: {profile[0]} names a profile, and profiles are read by the package boto3, "
            "which is not installed: install it, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from problem
    options: dict[str, Any] = {}
    try:
        credentials = session.get_credentials()
        if not _named(_REGIONS) and (region := session.get_config_variable("region")):
            options["region"] = region
        if not _named(_ENDPOINTS):
            found = providers.ConfiguredEndpointProvider(
                full_config=session.full_config,
                scoped_config=session.get_scoped_config(),
                client_name="s3",
            ).provide()
            if found:
                options["endpoint"] = found
    except (errors.BotoCoreError, errors.ClientError, OSError, ValueError) as problem:
        raise ConfigError(f"{url}: {where} cannot be used: {problem}") from None
    if credentials is None:
        if profile:
            msg = f"{url}: {where} has no credentials; run `aws configure` or `aws sso login`"
            raise ConfigError(msg)
        return identity, options
    options["credential_provider"] = lender(session, ttl=_LENT)
    return f"{where} ({credentials.method})", options
