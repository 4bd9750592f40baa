"""`vua warm`: computes prompts once, so that their prefixes are stored before somebody asks.

An engine of its own does it (vLLM, SGLang, transformers), or a server that runs already and has VUA
(vLLM, SGLang), through the API of OpenAI. What is newly stored is what the directory holds
afterwards and did not before (:mod:`vua.cli.events`), whatever the engine says. Prompts' chunks are
looked for under the names that the keys give which the command is told.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from urllib import error, request

import click

from vua.catalog.base import NO_KEYS
from vua.cli.command import VARIABLE, command
from vua.cli.output import DAMAGED, SOUND, Output, Report, progress, table
from vua.cli.warm_cache import Held, WarmedCache
from vua.errors import ConfigError, InputError
from vua.security.settings import Security
from vua.weights import weights_fingerprint

__all__ = ["Warmed", "warm"]

_TOGETHER: Final = 32
"""Prompts that vLLM is given at a time."""
_TELL_IDS: Final = ("return_token_ids", "return_prompt_token_ids")
"""Let vLLM (both ways) and SGLang (completions; chats) tell a prompt's token ids."""
_ANSWER_S: Final = 3600.0


@dataclass(slots=True)
class _Prompt:
    """A prompt, and what came of it."""

    line: int
    content: Any
    """A text, token ids, or the messages of a chat."""
    is_chat: bool
    ids: list[int] | None = None
    """Not known of a server that does not tell them."""
    tokens: int | None = None
    found: int | None = None
    """Tokens that were not computed; not known of a server that does not tell it."""
    stored: int | None = None
    """Tokens that are stored now and were not before, counted for the first prompt with them."""
    problem: str = ""


_FIELDS: Final = ("line", "tokens", "found", "stored", "problem")


@dataclass(frozen=True, slots=True)
class Warmed(Report):
    """What came of the prompts."""

    rows: Sequence[tuple[Any, ...]]
    """Of each what `_FIELDS` say."""

    @property
    def code(self) -> int:
        """Whether all were computed."""
        return DAMAGED if any(row[-1] for row in self.rows) else SOUND

    @property
    def _sums(self) -> list[int]:
        return [sum(row[at] or 0 for row in self.rows) for at in (1, 2, 3)]

    def describe(self) -> object:
        """Return plain values for programs."""
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
        msg = f"{text!r:.40} is no JSON object"
        raise click.BadParameter(msg)
    return settings


@command("warm", "compute prompts and store them", takes_directory=False)
@click.argument("prompts", metavar="FILE")
@click.option(
    "--engine",
    type=click.Choice(("sglang", "transformers", "vllm")),
    help="started for it, and ended again",
)
@click.option("--server", metavar="URL", help="a running vLLM or SGLang with VUA does it")
@click.option("--model", help="directory or name; of a server by default its only one")
@click.option(
    "--path", metavar="DIR", envvar=VARIABLE, help=f"directory of the cache; default {VARIABLE}"
)
@click.option(
    "--engine-args", metavar="JSON", type=_settings, default="{}", help="for the engine's start"
)
@click.option("--limit", metavar="N", type=int, help="only the first prompts")
def warm(*, output: Output, security: Security, **asked: Any) -> int:
    """Compute the prompts. Raises ConfigError, InputError, StorageError, OSError."""
    options = SimpleNamespace(security=security, **asked)
    run = _server if options.server else _ENGINES.get(options.engine)
    if run is None:
        msg = "give an --engine, or the --server of a vLLM or SGLang that runs"
        raise ConfigError(msg)
    if not options.server and not (options.model and options.path):
        msg = "--engine needs --model and --path"
        raise ConfigError(msg)
    if options.limit is not None and options.limit < 1:
        msg = f"--limit must be at least 1, found {options.limit}"
        raise ConfigError(msg)
    if not options.server and options.engine in _WITHOUT_KEYS and options.security != NO_KEYS:
        msg = (
            f"--engine {options.engine} stores without keys, so --key-file, --tenant-keys and "
            "--encrypt would have no effect; leave them out, or use --engine vllm"
        )
        raise ConfigError(msg)
    prompts = _read(options.prompts)[: options.limit]
    cache, misnamed = WarmedCache(options.path, options.security), ""
    before = cache.look()
    with progress() as show, redirect_stdout(sys.stderr):  # engines print
        for done, _ in enumerate(run(options, prompts), 1):
            amount = sum(one.tokens or 0 for one in prompts)
            show("warm", done, len(prompts), amount=amount, unit="tokens")
    if options.path:
        if options.server:
            misnamed = cache.wait_for([one.ids or () for one in prompts], before)
        else:
            cache.look()
        if not misnamed:
            _count(prompts, cache, before)
    code = output.show(Warmed([tuple(getattr(one, name) for name in _FIELDS) for one in prompts]))
    if misnamed:
        msg = (
            f"{options.path}: nothing of these prompts is found; {misnamed}. Names are made with "
            "the keys: give --key-file and --encrypt as the server is told security.key_file and "
            "security.encrypt. The prompts are computed; what is stored of them is not counted"
        )
        raise ConfigError(msg)
    return code


def _read(file: str) -> list[_Prompt]:
    """Return the prompts of a file. Raises InputError, OSError."""
    found = []
    for number, line in enumerate(Path(file).read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            text = line.decode().rstrip("\r")
            said = json.loads(text) if file.endswith(".jsonl") else {"prompt": text}
            kind = next(name for name in ("prompt", "messages") if name in said)
            if not isinstance(said[kind], (str, list) if kind == "prompt" else list):
                raise TypeError(kind)  # noqa: TRY301 - one sentence for whatever is wrong
            if not said[kind]:
                raise ValueError(kind)  # noqa: TRY301 - likewise
        except (ValueError, TypeError, StopIteration, RecursionError) as problem:
            msg = f'{file}, line {number}: expected text, {{"prompt": ...}} or {{"messages": ...}}'
            raise InputError(msg) from problem
        found.append(_Prompt(number, said[kind], kind == "messages"))
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


def _transformers(options: SimpleNamespace, prompts: Sequence[_Prompt]) -> Iterator[_Prompt]:
    engine, torch = _package("transformers"), _package("torch")
    tokenizer = engine.AutoTokenizer.from_pretrained(options.model)
    model = engine.AutoModelForCausalLM.from_pretrained(options.model, **options.engine_args)
    with _package("vua.transformers").PrefixCache(model, options.path) as prefixes:
        prefixes.ready()
        for one in prompts:
            ids = torch.tensor([_tokenize(tokenizer, one)], device=model.device)
            prefix = prefixes.load(ids)
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=prefix.cache,
                max_new_tokens=1,
                do_sample=False,
            )
            prefixes.save(ids, prefix.cache)
            one.found = prefix.num_tokens
            yield one


def _vllm(options: SimpleNamespace, prompts: Sequence[_Prompt]) -> Iterator[_Prompt]:
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    engine = _package("vllm")
    if Path(options.model).is_dir():
        weights_fingerprint(options.model)  # an engine stores nothing until it knows its weights
    names = ("key_file", "tenant_keys", "encrypt")
    keys = {name: getattr(options.security, name) for name in names}
    extra = json.dumps({"kv_connector_extra_config": {"security": keys}})
    words = ["serve", options.model, "--vua-path", options.path, "--kv-transfer-config", extra]
    transfer = json.loads(_package("vua.vllm.serve").with_connector(words)[-1])
    settings = {"kv_transfer_config": transfer, **options.engine_args}
    model = engine.LLM(model=options.model, **settings)
    longest = model.model_config.max_model_len
    one_token = engine.SamplingParams(max_tokens=1, temperature=0)
    try:
        tokenizer = model.get_tokenizer()
        for first in range(0, len(prompts), _TOGETHER):
            some = prompts[first : first + _TOGETHER]
            for one in some:
                if len(_tokenize(tokenizer, one)) >= longest:
                    one.problem = f"longer than the {longest} tokens that the engine takes"
            fitting = [one for one in some if not one.problem]
            asked = [{"prompt_token_ids": one.ids} for one in fitting]
            answers = model.generate(asked, one_token, use_tqdm=False)
            for one, answer in zip(fitting, answers, strict=True):
                one.found = answer.num_cached_tokens or 0
            yield from some
    finally:
        model.llm_engine.engine_core.shutdown()  # it stores what is waiting


def _sglang(options: SimpleNamespace, prompts: Sequence[_Prompt]) -> Iterator[_Prompt]:
    engine = _package("sglang")
    if Path(options.model).is_dir():
        weights_fingerprint(options.model)  # as for vLLM
    settings = _package("vua.sglang.settings").engine_arguments(options.path)
    tokenizer = _package("transformers").AutoTokenizer.from_pretrained(options.model)
    model = engine.Engine(model_path=options.model, **settings | options.engine_args)
    one_token = {"max_new_tokens": 1, "temperature": 0}
    try:
        for one in prompts:
            ids = _tokenize(tokenizer, one)
            try:
                answer = model.generate(input_ids=ids, sampling_params=one_token)
            except ValueError as problem:
                one.problem = str(problem)
            else:
                one.found = answer["meta_info"]["cached_tokens"]
            yield one
        cache = WarmedCache(options.path, options.security)
        cache.wait_for([one.ids or () for one in prompts if not one.problem])
    finally:
        model.shutdown()


_ENGINES: Final[Mapping[str, Callable[[SimpleNamespace, Sequence[_Prompt]], Iterator[_Prompt]]]] = {
    "sglang": _sglang,
    "transformers": _transformers,
    "vllm": _vllm,
}
_WITHOUT_KEYS: Final = ("sglang", "transformers")
"""Of these, those that cannot be given keys."""


def _server(options: SimpleNamespace, prompts: Sequence[_Prompt]) -> Iterator[_Prompt]:
    address = options.server.rstrip("/").removesuffix("/v1")
    model = options.model or _call(f"{address}/v1/models")["data"][0]["id"]
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
    """Return a server's answer. Raises InputError where it refuses, ConfigError without one."""
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


def _count(prompts: Sequence[_Prompt], cache: WarmedCache, before: Held) -> None:
    """Note what is stored of each prompt that was not before."""
    new = {name: held - before.get(name, set()) for name, held in cache.held.items()}
    for one in prompts:
        if one.ids is not None:
            mine = {name: held & cache.chunks(one.ids, name) for name, held in new.items()}
            sizes = [len(chunks) * cache.chunk_tokens(name) for name, chunks in mine.items()]
            one.stored = max(sizes, default=0)
            for name, chunks in mine.items():
                new[name] -= chunks
