"""`vua warm`: computes prompts once, so that their prefixes are stored before the first request.

A running server with VUA computes them (vLLM, SGLang), through OpenAI's API, or a model of
transformers that is loaded for it. New chunks are those that the cache holds afterwards and did not
before (:mod:`vua.cli.events`), whatever the engine reports. Prompts' chunks are named with the
given keys.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib import error, request

import click

from vua.catalog.check import NO_KEYS
from vua.catalog.opening import is_missing, open_catalog
from vua.cli.command import VARIABLE, argument, command
from vua.cli.events import StoredNamespace, content
from vua.cli.output import DAMAGED, SOUND, Output, Report, progress, table
from vua.cli.prompt import prompt_keys
from vua.errors import ConfigError, InputError
from vua.format.keys import token_ids
from vua.security.settings import Security
from vua.store.namespace import Namespace
from vua.store.place import open_namespace

_TELL_IDS: Final = ("return_token_ids", "return_prompt_token_ids")
"""Options by which vLLM (both) and SGLang (completions; chats) return a prompt's token ids."""
_ANSWER_S: Final = 3600.0
_PATIENCE_S: Final = 20.0
"""How long to wait without a new chunk: a server stores after its answer."""
_BRIEFLY_S: Final = 5.0
"""The same if stored names show that the server has different keys."""
_LOOK_S: Final = 0.2
_FIRST_CHUNKS: Final = 64
"""Most headers read to find which keys seal the chunks."""

StoredChunks: TypeAlias = dict[str, set[str]]
"""The chunks that a lookup can find, by namespace."""


@dataclass(slots=True)
class _Prompt:
    """A prompt and its results."""

    line: int
    content: Any
    """A text, token ids, or the messages of a chat."""
    is_chat: bool
    ids: list[int] | None = None
    """None if the server does not return them."""
    tokens: int | None = None
    found: int | None = None
    """Tokens that were not computed; None if the server does not say it."""
    stored: int | None = None
    """Newly stored tokens, counted for the first prompt with them."""
    problem: str = ""


_FIELDS: Final = ("line", "tokens", "found", "stored", "problem")


@dataclass(frozen=True, slots=True)
class WarmReport(Report):
    """The results of all prompts."""

    rows: Sequence[tuple[Any, ...]]
    """The values of `_FIELDS` per prompt."""

    @property
    def code(self) -> int:
        return DAMAGED if any(row[-1] for row in self.rows) else SOUND

    @property
    def _sums(self) -> list[int]:
        return [sum(row[at] or 0 for row in self.rows) for at in (1, 2, 3)]

    def describe(self) -> object:
        each = [dict(zip(_FIELDS, row, strict=True)) for row in self.rows]
        return {**dict(zip(_FIELDS[1:4], self._sums, strict=True)), "prompts": each}

    def show(self) -> None:
        """Print a row per prompt, and one for all."""
        rows = [*self.rows, ("all", *self._sums, "")]
        cells = [["-" if cell is None else cell for cell in row] for row in rows]
        table(["line", " tokens", " found", " stored", "problem"], cells)


def _settings(text: str) -> dict[str, Any]:
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        msg = f"{text!r:.40} is not a JSON object"
        raise click.BadParameter(msg)
    return settings


@command("warm", "compute prompts and store them", takes_directory=False)
@argument("prompts", 'a prompt a line; .jsonl: {"prompt"} or {"messages"}', metavar="FILE")
@click.option("--server", metavar="URL", help="a running vLLM or SGLang with VUA does it")
@click.option(
    "--engine", metavar="ENGINE", help="transformers, in place of a server: loaded for it"
)
@click.option("--model", help="directory or name; of a server by default its only one")
@click.option(
    "--path", metavar="DIR", envvar=VARIABLE, help=f"directory of the cache; default {VARIABLE}"
)
@click.option(
    "--engine-args", metavar="JSON", type=_settings, default="{}", help="for from_pretrained"
)
@click.option("--limit", metavar="N", type=int, help="only the first prompts")
def warm(  # noqa: PLR0913 - the options of a command
    prompts: str, *, server: str | None = None, engine: str | None = None,
    model: str | None = None, path: str | None = None, engine_args: Mapping[str, Any],
    limit: int | None = None, security: Security = NO_KEYS, output: Output,
) -> int:  # fmt: skip
    """Compute the prompts. Raises ConfigError, InputError, StorageError, OSError."""
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit must be at least 1, found {limit}")
    if not server:
        _check_engine(engine, security, is_complete=bool(model and path))
    asked = _read(prompts)[:limit]
    cache, misnamed = WarmedCache(path, security), ""
    before = cache.read()
    answers = (
        _ask(server, model, asked) if server
        else _compute(str(model), str(path), engine_args, asked)
    )  # fmt: skip
    with progress() as show, redirect_stdout(sys.stderr):  # engines print
        for done, _ in enumerate(answers, 1):
            amount = sum(one.tokens or 0 for one in asked)
            show("warm", done, len(asked), amount=amount, unit="tokens")
    if path:
        if server:
            misnamed = cache.wait_for([one.ids or () for one in asked], before)
        else:
            cache.read()
        if not misnamed:
            _count(asked, cache, before)
    rows = [tuple(getattr(one, name) for name in _FIELDS) for one in asked]
    code = output.show(WarmReport(rows))
    if misnamed:
        raise ConfigError(
            f"{path}: nothing of these prompts is found; {misnamed}. Names are made with the keys: "
            "give --key-file and --encrypt as the server is told security.key_file and "
            "security.encrypt. The prompts are computed; what is stored of them is not counted"
        )
    return code


def _check_engine(engine: str | None, security: Security, *, is_complete: bool) -> None:
    """Raise ConfigError if the model cannot be loaded."""
    if engine is None:
        raise ConfigError(
            "give the --server of a vLLM or SGLang that runs with VUA, or --engine transformers"
        )
    if engine != "transformers":
        raise ConfigError(
            f"--engine takes transformers, found {engine}: start vLLM or SGLang as it will serve, "
            "with VUA, and give its --server"
        )
    if not is_complete:
        raise ConfigError("--engine needs --model and --path")
    if security != NO_KEYS:
        raise ConfigError(
            "--engine transformers stores without keys, so --key-file, --tenant-keys and --encrypt "
            "would have no effect; leave them out, or use the --server of an engine that has them"
        )


def _read(file: str) -> list[_Prompt]:
    """Return the prompts of a file. Raises InputError, OSError."""
    found = []
    for number, line in enumerate(Path(file).read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            text = line.decode().rstrip("\r")
            entry = json.loads(text) if file.endswith(".jsonl") else {"prompt": text}
            kind = next(name for name in ("prompt", "messages") if name in entry)
            if not isinstance(entry[kind], (str, list) if kind == "prompt" else list):
                raise TypeError(kind)  # noqa: TRY301 - one sentence for whatever is wrong
            if not entry[kind]:
                raise ValueError(kind)  # noqa: TRY301 - likewise
        except (ValueError, TypeError, StopIteration, RecursionError) as problem:
            msg = f'{file}, line {number}: expected text, {{"prompt": ...}} or {{"messages": ...}}'
            raise InputError(msg) from problem
        found.append(_Prompt(number, entry[kind], kind == "messages"))
    return found


# -- who computes them ----------------------------------------------------------------------------


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as problem:
        msg = f"{name} cannot be imported: {problem}; is the engine installed here?"
        raise ConfigError(msg) from problem


def _tokenize(tokenizer: Any, prompt: _Prompt) -> list[int]:
    """Return a prompt's token ids, as the engine makes them."""
    if prompt.is_chat:
        ids = tokenizer.apply_chat_template(
            prompt.content, add_generation_prompt=True, return_dict=False
        )
    else:
        is_text = isinstance(prompt.content, str)
        ids = tokenizer(prompt.content).input_ids if is_text else prompt.content
    prompt.ids, prompt.tokens = list(ids), len(ids)
    return prompt.ids


def _compute(
    model: str, path: str, settings: Mapping[str, Any], prompts: Sequence[_Prompt]
) -> Iterator[_Prompt]:
    engine, torch = _package("transformers"), _package("torch")
    tokenizer = engine.AutoTokenizer.from_pretrained(model)
    loaded = engine.AutoModelForCausalLM.from_pretrained(model, **settings)
    with _package("vua.transformers").PrefixCache(loaded, path, load_policy="always") as prefixes:
        prefixes.ready()
        for one in prompts:
            ids = torch.tensor([_tokenize(tokenizer, one)], device=loaded.device)
            prefix = prefixes.load(ids)
            loaded.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=prefix.cache,
                max_new_tokens=1,
                do_sample=False,
            )
            prefixes.save(ids, prefix.cache)
            one.found = prefix.num_tokens
            yield one


def _ask(server: str, model: str | None, prompts: Sequence[_Prompt]) -> Iterator[_Prompt]:
    address = server.rstrip("/").removesuffix("/v1")
    model = model or _call(f"{address}/v1/models")["data"][0]["id"]
    for one in prompts:
        way, name = ("chat/completions", "messages") if one.is_chat else ("completions", "prompt")
        body = {"model": model, name: one.content, "max_tokens": 1, "temperature": 0}
        try:
            answer = _call(f"{address}/v1/{way}", {**body, **dict.fromkeys(_TELL_IDS, True)})
        except InputError as problem:
            one.problem = str(problem)
        else:
            usage, (choice, *_) = answer["usage"], answer["choices"]
            details = usage.get("prompt_tokens_details") or {}
            one.tokens, one.found = usage["prompt_tokens"], details.get("cached_tokens")
            one.ids = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
        yield one


def _call(url: str, body: object = None) -> Any:
    """Return a server's answer. Raises InputError for a refusal, ConfigError without an answer."""
    if not url.startswith(("http://", "https://")):
        msg = f"{url}: expected http:// or https://"
        raise ConfigError(msg)
    data = None if body is None else json.dumps(body).encode()
    asked = request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310
    try:
        with request.urlopen(asked, timeout=_ANSWER_S) as answer:  # noqa: S310 - checked above
            return json.load(answer)
    except error.HTTPError as problem:
        msg = f"{problem.code}: {problem.read(400).decode(errors='replace')}"
        raise InputError(msg) from problem
    except (OSError, ValueError) as problem:
        msg = f"{url}: {problem}"
        raise ConfigError(msg) from problem


def _count(prompts: Sequence[_Prompt], cache: WarmedCache, before: StoredChunks) -> None:
    new = {name: held - before.get(name, set()) for name, held in cache.held.items()}
    for one in prompts:
        if one.ids is not None:
            mine = {name: held & cache.chunks(one.ids, name) for name, held in new.items()}
            sizes = [len(chunks) * cache.chunk_tokens(name) for name, chunks in mine.items()]
            one.stored = max(sizes, default=0)
            for name, chunks in mine.items():
                new[name] -= chunks


# -- what is stored -------------------------------------------------------------------------------


class WarmedCache:
    """A cache's content, and the names of prompts' chunks in it."""

    def __init__(self, where: str | None, security: Security) -> None:
        """Look at a directory or a bucket, if one is given; ``security`` gives the keys."""
        self._where = where
        self._security = replace(security, trusted_uids="any")  # names are all that is read
        self._seen: dict[str, StoredNamespace] = {}
        self._opened: dict[str, Namespace] = {}
        self.held: StoredChunks = {}
        """The last look's result."""

    def read(self) -> StoredChunks:
        """Return its content now; empty if the cache does not exist yet."""
        where = self._where
        if where is None or is_missing(where):
            self._seen = {}
        else:
            self._seen = content(open_catalog(where), self._seen)
        self.held = {
            name: {chunk for chunk, _ in one.befores()} for name, one in self._seen.items()
        }
        return self.held

    def chunk_tokens(self, name: str) -> int:
        return self._seen[name].layouts[0].chunk_tokens

    def chunks(self, prompt: Sequence[int], name: str) -> set[str]:
        """Return the names of a prompt's chunks in a namespace; none if the namespace is gone.

        Raises NoKeyError.
        """
        ids, namespace = token_ids(prompt), self._namespace(name)
        if namespace is None:
            return set()
        keys, _ = prompt_keys(namespace, ids, "")
        return {key.name for key in keys.first(len(keys))}

    def wait_for(self, prompts: Sequence[Sequence[int]], before: StoredChunks | None = None) -> str:
        """Wait until it holds the prompts' tokens, or nothing new has appeared for a while.

        ``before`` is its content before a server was asked, whose keys may differ from the given
        ones. Returns the evidence for that, as :meth:`misnamed` does.
        """
        held: StoredChunks | None = None
        misnamed, until_s = "", 0.0
        while True:
            if self.read() != held:
                held = self.held
                wanted = [{name: self.chunks(one, name) for name in held} for one in prompts]
                if all(any(each[name] <= held[name] for name in each) for each in wanted):
                    return ""
                ours = any(each[name] & held[name] for each in wanted for name in each)
                misnamed = "" if ours or before is None else self.misnamed(before)
                until_s = time.monotonic() + (_BRIEFLY_S if misnamed else _PATIENCE_S)
            if time.monotonic() > until_s:
                return misnamed
            time.sleep(_LOOK_S)

    def misnamed(self, before: StoredChunks) -> str:
        """Say whose keys name the stored chunks, and whose should; "" if these agree.

        By headers of first chunks, of new ones if there are some. Those of requests with a salt
        have a parent, and tell nothing. Raises NoKeyError, StorageError, OSError.
        """
        first = [
            (name, chunk)
            for name, one in self._seen.items()
            for chunk, previous in one.befores()
            if not previous
        ]
        new = [(name, chunk) for name, chunk in first if chunk not in before.get(name, ())]
        for some in (new, first):
            seals = self._seals(some[:_FIRST_CHUNKS])
            if seals:
                found, expected = seals[0]
                agree = any(one == other for one, other in seals)
                return "" if agree else f"found: chunks that are {found}; expected: {expected}"
        return ""

    def _seals(self, chunks: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return how first chunks without extras are sealed, and how the given keys would do it."""
        if self._where is None or not chunks:
            return []
        seals = []
        catalog = open_catalog(self._where)
        with progress() as show, catalog.namespaces(show) as (found, _):
            there = {one.name: one for one in found}
            for name, chunk in chunks:
                namespace = self._namespace(name)
                info = there[name].header(chunk) if name in there else None
                if namespace is not None and info is not None and not info.parent:
                    _, seal = prompt_keys(namespace, b"", "")
                    expected = _sealed(seal.kind, seal.key_id) if seal else _sealed()
                    seals.append((_sealed(info.kind, info.seal_info.key_id), expected))
        return seals

    def _namespace(self, name: str) -> Namespace | None:
        if self._where is not None and name not in self._opened:
            place = open_catalog(self._where).place / name
            namespace = open_namespace(place, security=self._security)
            if namespace is not None:
                self._opened[name] = namespace
        return self._opened.get(name)


def _sealed(kind: str = "", key_id: str = "") -> str:
    return f"sealed ({kind}) with key {key_id}" if kind else "not sealed"
