"""The accidents, and what one of them does to one subject: right, miss, wrong, crash or hang.

Each accident is two lives of an engine: one that fills the store, one that looks for what is in it,
and something between them, or during one of them. *Right*: the tokens are those of the same engine
without a store, and K and V were loaded. *Miss*: the tokens are right, nothing was loaded. *Wrong*:
other tokens. *Crash*: the engine or the request ended with an error. *Hang*: it did not answer.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from olympics.damage import DAMAGES, files_of
from olympics.subjects import Driver, Subject, troubled

NEW, TOKENS, LLAMA_TOKENS = 12, 330, 200
GOOD = ("right", "miss")
ORDER = (*GOOD, "hang", "crash", "wrong")
FAIL_AT, SLOW_S = 16384, 0.2
LIVES = 4
"""A cell may take as long as so many engines' lives."""
Steps = list[dict[str, Any]]


class NotRunError(Exception):
    """This cell cannot be run here."""


@dataclass(frozen=True)
class Found:
    """What a cell has found."""

    outcome: str
    detail: str = ""
    loaded: int = 0
    """Tokens of the two prompts that were loaded after the accident."""
    seconds: float = 0.0
    """Of the slower answer after it."""
    afterwards: str = ""
    """Of a miss: what one more life finds."""


@dataclass(frozen=True)
class Setup:
    """What an engine is made with, beside its store."""

    weights: str = "one"
    dtype: int = 0
    tp: int = 1
    adapter: str = ""


USUAL = Setup()


class Field:
    """One subject, ready for cells: its driver, models, and what engines say without a store."""

    def __init__(self, subject: Subject, place: Path, limit_s: float) -> None:
        """Make models in a folder. Raises NotRunError, RuntimeError."""
        if (why := subject.missing()) is not None:
            raise NotRunError(why)
        self.subject, self.place, self.limit_s = subject, place, limit_s
        self.until = math.inf
        self.driver = Driver(subject)
        self._truths: dict[Any, list[list[int]]] = {}
        self._models()

    def close(self) -> None:
        """End the driver."""
        self.driver.close()

    def _models(self) -> None:
        """Make the checkpoints: one, other weights, another rope; two adapters."""
        made = self.place / "made"
        if self.subject.engine == "llama":
            from llama import make_gguf, make_gguf_adapter

            made.mkdir()
            for seed in (1, 2):
                make_gguf_adapter(made / f"adapter{seed}", seed=seed)
            make_gguf(made / "one", seed=1)
            make_gguf(made / "other", seed=2)
            make_gguf(made / "rope", seed=1, **{"llama.rope.freq_base": 500.0})
            return
        from e2e.checkpoints import make_adapter
        from small_models import make_model

        for name, seed in (("one", 1), ("other", 2), ("rope", 1)):
            make_model(made / name, seed=seed)
        config = json.loads((made / "rope" / "config.json").read_text())
        config["rope_parameters"]["rope_theta"] = 500.0
        (made / "rope" / "config.json").write_text(json.dumps(config))
        for seed in (1, 2):
            make_adapter(made / f"adapter{seed}", made / "one", seed=seed, strength=0.5)

    def served(self, setup: Setup) -> tuple[str, list[str]]:
        """Put a checkpoint, and an adapter, to where they are always served from."""
        for source, name in ((setup.weights, "model"), (setup.adapter, "adapter")):
            at, made = self.place / name, self.place / "made" / source
            shutil.rmtree(at, ignore_errors=True) if at.is_dir() else at.unlink(missing_ok=True)
            if source:
                (shutil.copytree if made.is_dir() else shutil.copyfile)(made, at)
        return str(self.place / "model"), [str(self.place / "adapter")] if setup.adapter else []

    def live(self, setup: Setup, steps: Steps, root: Path | None) -> dict[str, Any]:
        """Have an engine live on a store, or without one."""
        model, adapters = self.served(setup)
        dtype = self.subject.dtypes[setup.dtype]
        job = {"model": model, "adapters": adapters, "dtype": dtype, "tp": setup.tp}
        job["steps"] = [
            {**step, "adapter": adapters[0]} if adapters and "ask" in step else step
            for step in steps
        ]
        releases = [step["write"] for step in steps if "write" in step]
        job |= {"release": releases[0]} if releases else {}
        with contextlib.ExitStack() as stack:
            if root is not None:
                job["transfer"] = self.subject.transfer(root)
                if self.subject.server is not None:
                    port, group = stack.enter_context(self.subject.server(root))
                    job["transfer"]["kv_connector_extra_config"]["lmcache.mp.port"] = port
                    for step in job["steps"]:
                        if "kill" in step:
                            step["pids"] = [group]
            left_s = min(self.limit_s, self.until - time.monotonic())
            if left_s <= 0:
                raise NotRunError("the cell's time was over")
            try:
                return self.driver.live(job, left_s)
            except RuntimeError:
                self.driver = Driver(self.subject)
                raise
            finally:
                for path in releases[:1]:  # before a server is ended that waits for its files
                    Path(path).write_text("{}", encoding="utf-8")

    def truth(self, setup: Setup, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Return what the engine says to prompts without a store. Raises NotRunError."""
        key = (setup, repr(prompts))
        if key not in self._truths:
            life = self.live(setup, asks(prompts), None)
            said = answers(life)
            if len(said) < len(prompts):
                problem = problem_of(life) or f"exit status {life['status']}"
                raise NotRunError(f"without a store it does not run: {problem}")
            self._truths[key] = [one["tokens"] for one in said]
        return self._truths[key]

    def prompts(self, seed: int) -> list[list[int]]:
        """Return two prompts to be stored, and one more; all end alike."""
        chance = random.Random(seed)
        tokens, many = range(5, 500), TOKENS
        if self.subject.engine == "llama":
            tokens, many = range(3, 259), LLAMA_TOKENS
        end = chance.choices(tokens, k=6)
        return [[*chance.choices(tokens, k=many - 6), *end] for _ in range(3)]


def asks(prompts: Sequence[list[int]]) -> Steps:
    """Return steps."""
    return [{"ask": prompt, "new": NEW} for prompt in prompts]


def answers(life: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the answers that a life has given."""
    return [one for one in life["told"] if "tokens" in one]


def problem_of(life: Mapping[str, Any]) -> str:
    """Return the error with which a life has ended."""
    return next((one["problem"] for one in life["told"] if "problem" in one), "")


def judged(life: Mapping[str, Any], truths: Sequence[list[int]], skip: int = 0) -> Found:
    """Compare a life's answers, but the first ones, with what they should have been."""
    said = answers(life)[skip:]
    loaded = sum(one["cached"] for one in said)
    seconds = max((one["seconds"] for one in said), default=0.0)
    wrong = [at for at, (one, true) in enumerate(zip(said, truths, strict=False))
             if one["tokens"] != true]  # fmt: skip
    if wrong:
        given, expected = said[wrong[0]]["tokens"], truths[wrong[0]]
        detail = f"prompt {wrong[0] + 1}: {given[:4]}, not {expected[:4]}"
        return Found("wrong", detail, loaded, seconds)
    if len(said) < len(truths):
        if life["status"] is None:
            return Found("hang", f"answer {len(said) + 1} did not come", loaded, seconds)
        lines = [line for line in life["log"].splitlines() if line.strip()]
        last = re.sub(r"(/[\w.-]+)+/", "", " ".join(lines[-1:]))  # without paths
        why = problem_of(life) or f"exit status {life['status']}: {last[-160:]}"
        return Found("crash", why, loaded, seconds)
    ended = any("closed" in one for one in life["told"])
    detail = "" if ended else "answered, but did not end"
    return Found("right" if loaded else "miss", detail, loaded, seconds)


class Trial:
    """One cell's store, prompts and lives."""

    def __init__(self, field: Field, folder: Path, seed: int) -> None:
        self.field, self.folder, self.seed = field, folder, seed
        self.root, self.shown = folder / "kv", folder / "kv"
        self.control = folder / "control"
        self.prompts = field.prompts(seed)
        self.limit = field.limit_s

    def two_lives(
        self, first: Steps, between: Steps, look: Steps,
        before: Setup = USUAL, after: Setup = USUAL, *, whole: bool = True, new: bool = False,
    ) -> Found:  # fmt: skip
        """Fill, have something happen, look; return the worse of both.

        Args:
            first: steps of the first life.
            between: damage and writes of the control file.
            look: steps of the second life; the truth of its questions is asked in advance.
            before: with what the first engine is made.
            after: with what the second one is made.
            whole: whether the first engine has to answer all; else it has to be killed.
            new: whether it has to be a new process, also where that finds nothing.
        """
        filled = self.truths(before, first)
        true = self.truths(after, look)
        settle = {"settle": str(self.root)}
        if not (self.field.subject.restarts or new) and before == after and whole:
            steps = [*first, settle, *between, *look]
            life = self.field.live(after, steps, self.shown)
            found = judged(life, true, len(filled))
            return worse(judged({**life, "told": life["told"][: len(first) + 2]}, filled), found)
        life = self.field.live(before, [*first, settle], self.shown)
        found = Found("right")
        if whole:
            found = judged(life, filled)
            if not files_of(self.root) and self.shown == self.root:
                raise NotRunError(f"nothing was stored: {problem_of(life) or life['log'][-300:]}")
        elif any("closed" in one for one in life["told"]):
            raise NotRunError("it was done before it could be killed")
        for step in between:
            if "damage" in step:
                if not DAMAGES[step["damage"]](Path(step["at"]), self.seed):
                    raise NotRunError("no file was there to be damaged")
            else:
                Path(step["write"]).write_text(step["text"], encoding="utf-8")
        return worse(found, self.looked(look, true, after))

    def looked(self, look: Steps, true: Sequence[list[int]], setup: Setup) -> Found:
        """Look for what is stored; after a miss, once more."""
        life = self.field.live(setup, [*look, {"settle": str(self.root)}], self.shown)
        found = judged(life, true)
        if found.outcome == "miss" and not any("write" in step for step in look):
            then = judged(self.field.live(setup, look, self.shown), true)
            found = replace(found, afterwards=then.outcome)
        return found

    def truths(self, setup: Setup, steps: Steps) -> list[list[int]]:
        """Return what should be answered."""
        return self.field.truth(setup, [step["ask"] for step in steps if "ask" in step])

    def damaged(self, kind: str) -> Steps:
        """Return the step that damages files."""
        return [{"damage": kind, "at": str(self.root), "seed": self.seed}]

    def said(self, **trouble: Any) -> dict[str, Any]:
        """Return the step that changes the file system's trouble."""
        return {"write": str(self.control), "text": json.dumps(trouble)}

    @contextlib.contextmanager
    def on_troubled(self) -> Iterator[None]:
        """Have the store on a file system that has trouble on demand."""
        self.root, at = self.folder / "below", self.folder / "at"
        try:
            with troubled(self.root, at, self.control):
                self.shown = at / "kv"
                yield
        except RuntimeError as problem:
            raise NotRunError(str(problem)) from problem


def worse(filled: Found, looked: Found) -> Found:
    """Return what looking found, unless filling went wrong, and worse."""
    if filled.outcome in GOOD or ORDER.index(filled.outcome) < ORDER.index(looked.outcome):
        return looked
    return replace(filled, detail=f"while it stored: {filled.detail}")


# -- the accidents --------------------------------------------------------------------------------


def restart(trial: Trial) -> Found:
    """All processes end; new ones look."""
    look = asks(trial.prompts[:2])
    return trial.two_lives(look, [], look, new=True)


def damage(kind: str) -> Callable[[Trial], Found]:
    """Return the accident that damages all files so."""

    def run(trial: Trial) -> Found:
        look = asks(trial.prompts[:2])
        return trial.two_lives(look, trial.damaged(kind), look)

    return run


def killed(trial: Trial) -> Found:
    """SIGKILL when the first, or second, new file appears."""
    kill = {"kill": str(trial.root), "files": 1 + trial.seed % 2, "pids": []}
    look = asks(trial.prompts[:2])
    return trial.two_lives([kill, *look], [], look, whole=False)


def disk(fifths: int) -> Callable[[Trial], Found]:
    """Return the accident that the file system has so much room for what is to be stored."""

    def run(trial: Trial) -> Found:
        look = asks(trial.prompts[:2])
        steps = [*look, {"settle": str(trial.root)}]
        trial.field.live(USUAL, steps, trial.root)
        needed = sum(size + 4095 & ~4095 for size in files_of(trial.root).values())
        shutil.rmtree(trial.root, ignore_errors=True)
        trial.root = trial.shown = trial.folder / "small" / "kv"
        trial.root.parent.mkdir()
        size = f"size={max(needed * fifths // 5, 65536)}"
        mount = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(trial.root.parent)]
        if os.geteuid() or subprocess.run(mount, check=False).returncode:
            raise NotRunError("a tmpfs needs root")
        try:
            return trial.two_lives(look, [], look)
        finally:
            subprocess.run(["umount", "-l", str(trial.root.parent)], check=False)

    return run


def failed(trial: Trial) -> Found:
    """Each file takes 16 KiB, and then every write fails with EIO; later none does."""
    look = asks(trial.prompts[:2])
    with trial.on_troubled():
        return trial.two_lives([trial.said(fail_writes_at=FAIL_AT), *look], [trial.said()], look)


def changed(after: Setup, before: Setup = USUAL) -> Callable[[Trial], Found]:
    """Return the accident that another engine looks than the one that stored."""

    def run(trial: Trial) -> Found:
        look = asks(trial.prompts[:2])
        if before.tp == after.tp and trial.truths(before, look) == trial.truths(after, look):
            raise NotRunError("the change changes no token")
        return trial.two_lives(look, [], look, before, after)

    return run


def alone(setup: Setup = USUAL) -> Callable[[Trial], Found]:
    """Return the control that one kind of engine stores and looks, and nothing happens."""

    def run(trial: Trial) -> Found:
        look = asks(trial.prompts[:2])
        return trial.two_lives(look, [], look, setup, setup)

    return run


def mounted(trial: Trial) -> Found:
    """Control: the file system that has trouble on demand has none."""
    with trial.on_troubled():
        return alone()(trial)


def kept(trial: Trial) -> Found:
    """Control: as `deleted`, but the directory stays."""
    stored, other = asks(trial.prompts[:2]), asks(trial.prompts[2:])
    return trial.two_lives(stored, [], [*other, {"settle": str(trial.root)}, *stored])


def deleted(trial: Trial) -> Found:
    """The directory is deleted under a running engine, which has stored another prompt."""
    stored, other = asks(trial.prompts[:2]), asks(trial.prompts[2:])
    look = [*other, {"settle": str(trial.root)}, *trial.damaged("remove"), *stored]
    if not trial.field.subject.restarts:
        return trial.two_lives(stored, trial.damaged("remove"), stored)
    trial.field.live(USUAL, [*stored, {"settle": str(trial.root)}], trial.shown)
    true = trial.truths(USUAL, look)
    life = trial.field.live(USUAL, [*look, {"settle": str(trial.root)}], trial.shown)
    found = judged(life, true[1:], 1)
    then = judged(trial.field.live(USUAL, stored, trial.shown), true[1:])
    return replace(found, afterwards=then.outcome)


def trouble(**what: Any) -> Callable[[Trial], Found]:
    """Return the accident that the disk is in trouble from when the second engine has started."""

    def run(trial: Trial) -> Found:
        first, look = asks(trial.prompts[:2]), asks([trial.prompts[0], trial.prompts[2]])
        with trial.on_troubled():
            found = trial.two_lives(first, [], [trial.said(**what), *look])
        return replace(found, detail=found.detail or f"{found.seconds:.1f} s for an answer")

    return run


ACCIDENTS: dict[str, tuple[str, Callable[[Trial], Found]]] = {
    "restart": ("all processes end, new ones look", restart),
    "flipped bit": ("one bit in each 32 KiB, the top one of a number's exponent", damage("flip")),
    "swapped files": ("files of one size exchange their contents", damage("swap")),
    "truncated": ("each file is cut", damage("cut")),
    "killed writer": ("SIGKILL as soon as a file appears", killed),
    "full disk": ("room for three fifths", disk(3)),
    "failed store": ("each file takes 16 KiB, then EIO; later looked for on a sound disk", failed),
    "other weights": ("another checkpoint at the same path", changed(Setup(weights="other"))),
    "edited rope": ("`rope_theta` in config.json", changed(Setup(weights="rope"))),
    "adapter of one name": (
        "another LoRA adapter with its name and path",
        changed(Setup(adapter="adapter2"), Setup(adapter="adapter1")),
    ),
    "other TP": ("stored by one worker, looked for by two", changed(Setup(tp=2))),
    "other dtype": ("bfloat16, then float16", changed(Setup(dtype=2), Setup(dtype=1))),
    "deleted directory": ("under a running engine", deleted),
    "slow disk": ("every operation takes 0.2 s longer", trouble(slow_s=SLOW_S)),
    "hanging disk": ("no operation ends", trouble(hang=True)),
}
"""By name: in words, and what does it."""
CONTROLS: dict[str, tuple[str, Callable[[Trial], Found]]] = {
    "nothing": ("stored and looked for", alone()),
    "a sound mount": ("by way of the file system that has trouble on demand", mounted),
    "a larger disk": ("a tmpfs with room for twice as much", disk(10)),
    "the other weights": ("they alone", alone(Setup(weights="other"))),
    "the other rope": ("it alone", alone(Setup(weights="rope"))),
    "the other adapter": ("it alone", alone(Setup(adapter="adapter2"))),
    "two workers": ("they alone", alone(Setup(tp=2))),
    "the other dtype": ("it alone", alone(Setup(dtype=1))),
    "a directory that stays": ("a running engine asks for another prompt first", kept),
}
"""What is right where the store works at all: the same as an accident, without it."""
CONTROL_OF = {
    "failed store": "a sound mount",
    "slow disk": "a sound mount",
    "hanging disk": "a sound mount",
    "full disk": "a larger disk",
    "other weights": "the other weights",
    "edited rope": "the other rope",
    "adapter of one name": "the other adapter",
    "other TP": "two workers",
    "other dtype": "the other dtype",
    "deleted directory": "a directory that stays",
}
"""By accident; of the rest "nothing" is the control."""
CELLS = {**ACCIDENTS, **CONTROLS}


def control(field: Field, seed: int) -> str:
    """Show that tokens tell: prompts that end alike after other tokens are answered otherwise.

    Returns what is wrong, else nothing.
    """
    first, second, third = field.truth(USUAL, field.prompts(seed))
    same = second in (first, third)
    again = field.live(USUAL, asks(field.prompts(seed)), None)
    if [first, second, third] != [one["tokens"] for one in answers(again)]:
        return "two engines without a store do not say the same"
    return "the tokens do not depend on the prompt" if same else ""


def run(field: Field, accident: str, seed: int) -> dict[str, Any]:
    """Run one cell; what is bad has to show twice."""
    lacks = field.subject.lacks
    for one in (accident, *(one for one, its in CONTROL_OF.items() if its == accident)):
        if one in lacks:
            return asdict(Found("cannot be run", lacks[one]))
    outcomes = []
    for _ in range(2):
        field.until = time.monotonic() + LIVES * field.limit_s
        with tempfile.TemporaryDirectory(prefix="cell-", dir=field.place) as folder:
            try:
                found = CELLS[accident][1](Trial(field, Path(folder), seed))
            except NotRunError as problem:
                found = Found("cannot be run", str(problem)[:300])
            except RuntimeError as problem:
                found = Found("cannot be run", f"the trial failed: {problem}"[:300])
        outcomes.append(found.outcome)
        if found.outcome in (*GOOD, "cannot be run"):
            break
    return {**asdict(found), "tries": outcomes}
