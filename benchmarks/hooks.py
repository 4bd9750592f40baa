"""Times the hooks of vLLM's connector: every call of the storage takes 3 s, or options have 5 MB.

    python benchmarks/hooks.py [--rounds 3] [--delay 3] [--json FILE]

vLLM itself, with a small model, in the process that is measured: scheduler and worker share its
thread. The arms take turns within each round, in one engine: *nothing* (a directory in memory),
*5 MB of options* (each request brings `kv_transfer_params` of that size, of five kinds), *3 s a
call*. *Opened at 3 s* is an engine that starts on such a directory. The delay lies between libc and
its callers, Python's and C's: a small library that LD_PRELOAD names lets each call wait that asks
for a path or a descriptor below the directory. A line more compares what a LoRA adapter costs the
engine's thread, a copy, with reading its file, which the engine does there, and with its digest,
which a thread of its own takes.

A hook does nothing without VUA: what it takes is what it costs. Python's collector runs between the
arms: its pauses stop whatever runs then, for all that the engine has allocated. The largest time of
one call counts against 20 ms. A machine that others use stops a thread for longer than that now and
then, so the least of the rounds' largest is compared: a stall would be there in each. Exits with 1
above that.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import inspect
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from engines import CHUNK

BAR_S: Final = 0.020
SHOWN_S: Final = 0.001
NOTHING, OPTIONS, SLOW, OPENED = "nothing", "5 MB of options", "3 s a call", "opened at 3 s"
ARMS: Final = (NOTHING, OPTIONS, SLOW, OPENED)
OPTIONS_NBYTES: Final = 5 << 20
PROMPT_TOKENS: Final = 6 * CHUNK + 20
ROOT_VARIABLE: Final = "VUA_HOOKS_SLOW_ROOT"

SHIM: Final = r"""
typedef long (*call)(long, long, long, long, long, long);
extern void *dlsym(void *, const char *);
extern char *getenv(const char *);
extern int usleep(unsigned);
extern int snprintf(char *, unsigned long, const char *, ...);
extern unsigned long strlen(const char *);
extern int strncmp(const char *, const char *, unsigned long);
extern int PyGILState_Check(void) __attribute__((weak));
double vua_slow_s = 0;
long vua_slow_calls = 0, vua_slow_held = 0;

#define REAL(name) static call real; if (!real) real = (call)dlsym((void *)-1L, #name)
#define SIX long a, long b, long c, long d, long e, long f

static int below(const char *path) {
    static const char *root;
    if (!root && !(root = getenv("ROOT_VARIABLE"))) root = "\1";
    return path && !strncmp(path, root, strlen(root));
}
static void stop(int slow) {
    if (!slow) return;
    __sync_fetch_and_add(&vua_slow_calls, 1);
    if (PyGILState_Check && PyGILState_Check()) __sync_fetch_and_add(&vua_slow_held, 1);
    usleep((unsigned)(vua_slow_s * 1e6));
}
static int by_descriptor(long fd) {
    char name[32], target[1024];
    REAL(readlinkat);
    snprintf(name, sizeof name, "/proc/self/fd/%ld", fd);
    long n = real(-100, (long)name, (long)target, sizeof target - 1, 0, 0);
    if (n <= 0) return 0;
    target[n] = 0;
    return below(target);
}
static int by_either(long fd, const char *path) {
    return path && *path == '/' ? below(path) : by_descriptor(fd);
}
#define PATH(name) long name(SIX) { REAL(name); \
    if (vua_slow_s > 0) stop(below((char *)a)); return real(a, b, c, d, e, f); }
#define AT(name) long name(SIX) { REAL(name); \
    if (vua_slow_s > 0) stop(by_either(a, (char *)b)); return real(a, b, c, d, e, f); }
#define FD(name) long name(SIX) { REAL(name); \
    if (vua_slow_s > 0) stop(by_descriptor(a)); return real(a, b, c, d, e, f); }
PATH(open) PATH(open64) PATH(stat) PATH(lstat) PATH(stat64) PATH(lstat64) PATH(access) PATH(mkdir)
PATH(rmdir) PATH(rename) PATH(unlink) PATH(link) PATH(symlink) PATH(readlink) PATH(opendir)
PATH(chmod) PATH(chown) PATH(truncate) PATH(truncate64) PATH(statvfs) PATH(statvfs64) PATH(statfs)
PATH(utimes) PATH(getxattr) PATH(setxattr)
AT(openat) AT(openat64) AT(fstatat) AT(fstatat64) AT(statx) AT(faccessat) AT(mkdirat) AT(renameat)
AT(renameat2) AT(unlinkat) AT(linkat) AT(readlinkat) AT(fchmodat) AT(fchownat) AT(utimensat)
FD(read) FD(pread) FD(pread64) FD(readv) FD(preadv) FD(preadv64) FD(preadv2) FD(write) FD(pwrite)
FD(pwrite64) FD(writev) FD(pwritev) FD(pwritev64) FD(fsync) FD(fdatasync) FD(ftruncate)
FD(ftruncate64) FD(fstat) FD(fstat64) FD(futimens) FD(fchmod) FD(fchown) FD(flock) FD(fstatvfs)
FD(fstatvfs64) FD(fdopendir) FD(posix_fadvise) FD(posix_fadvise64) FD(getdents64) FD(fgetxattr)
FD(fsetxattr) FD(syncfs) FD(close)
long syscall(SIX) { REAL(syscall); /* openat2 */
    if (vua_slow_s > 0 && a == 437) stop(by_either(b, (char *)c)); return real(a, b, c, d, e, f); }
long fstatfs(long a, long b) { REAL(fstatfs); /* a file system with a server: NFS */
    int slow = by_descriptor(a);
    if (vua_slow_s > 0) stop(slow);
    long done = real(a, b, 0, 0, 0, 0);
    if (slow && !(int)done) *(long *)b = 0x6969;
    return done; }
"""
"""Each call of libc that asks a file system waits, where its path or descriptor is below a
directory. Arguments are passed on in the registers of six integers, which all of these use. A file
system that has no server is asked by VUA for what the kernel has in memory, without letting other
threads run: such a directory says that it has one. Calls are counted that keep the GIL."""


def options() -> list[dict[str, Any]]:
    """Options of 5 MB each, of different kinds."""
    many = {f"unknown-{at:09}": at for at in range(OPTIONS_NBYTES // 25)}
    deep: Any = 1
    for _ in range(60):
        deep = [deep]
    text, digits = "9" * OPTIONS_NBYTES, (1 << 64) - 1
    wrong = {"store": text, "load": list(range(OPTIONS_NBYTES // 8)), "wait_s": digits}
    return [
        {"vua": many},
        {"vua": {text: True, "stores": deep}},
        {"vua": wrong | {"retain_s": many, "wait_s": [deep] * (OPTIONS_NBYTES // 8)}},
        {"vua": text},
        {"other": many, "vua": {"store": True}},
    ]


def preloaded(root: Path) -> dict[str, str]:
    """The environment in which calls below a directory can be made to take long."""
    source, made = root / "slow.c", root / "slow.so"
    source.write_text(SHIM.replace("ROOT_VARIABLE", ROOT_VARIABLE))
    command = ["cc", "-shared", "-fPIC", "-O1", "-w", "-fno-builtin", "-o", made, source, "-ldl"]
    subprocess.run(command, check=True)
    return {"LD_PRELOAD": str(made), ROOT_VARIABLE: f"{root}/slow/"}


class Clock:
    """Times hooks of the connector, those of one arm at a time."""

    def __init__(self) -> None:
        """Wrap the connector's own hooks."""
        from vua.vllm.kv_connector_v1 import VUAStorageConnector_V1 as Connector

        self.times: dict[str, list[float]] = defaultdict(list)
        """Seconds of each call, by the hook's name."""
        for name, value in vars(Connector).items():
            if inspect.isfunction(value) and not name.startswith("_"):
                setattr(Connector, name, self._timed(name, value))

    def _timed(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def hook(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return real(*args, **kwargs)
            finally:
                self.times[name].append(time.perf_counter() - began_s)

        return hook

    def take(self) -> dict[str, list[float]]:
        """Return what was timed since the last call."""
        times, self.times = dict(self.times), defaultdict(list)
        return times


class Served:
    """A vLLM in this process."""

    def __init__(self, model: Path, root: Path, **settings: Any) -> None:
        """Start it."""
        from vllm import LLM

        self.llm = LLM(
            model=str(model),
            block_size=32,
            dtype="float32",
            enable_prefix_caching=False,
            enforce_eager=True,
            kv_cache_memory_bytes=256 << 20,
            max_model_len=2048,
            max_num_batched_tokens=1024,
            skip_tokenizer_init=True,
            kv_transfer_config={
                "kv_connector": "VUAStorageConnector_V1",
                "kv_connector_module_path": "vua.vllm.kv_connector_v1",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "shared_storage_path": str(root),
                    "chunk_tokens": CHUNK,
                    "load_policy": "always",
                },
            },
            **settings,
        )
        self._fresh = 0

    def ask(self, seeds: Sequence[int], params: Sequence[dict[str, Any] | None]) -> list[int]:
        """Serve prompts at once; return how many tokens of each were loaded."""
        from vllm import SamplingParams

        sampling = [
            SamplingParams(
                temperature=0,
                max_tokens=4,
                ignore_eos=True,
                extra_args={"kv_transfer_params": one} if one else None,
            )
            for one in params
        ]
        prompts = [{"prompt_token_ids": tokens(seed)} for seed in seeds]
        answers = self.llm.generate(prompts, sampling, use_tqdm=False)
        return [answer.num_cached_tokens or 0 for answer in answers]

    def arm(self, params: Sequence[dict[str, Any] | None]) -> None:
        """Serve stored prompts and new ones by turns, each with the next params."""
        gc.collect()
        gc.disable()
        try:
            self._serve(params)
        finally:
            gc.enable()

    def _serve(self, params: Sequence[dict[str, Any] | None]) -> None:
        for at, one in enumerate(params):
            self._fresh += 1
            self.ask([at % 4], [one])
            self.ask([(at + 1) % 4, 1000 + self._fresh, 5000 + self._fresh], [one] * 3)

    def until_loaded(self) -> None:
        """Ask for stored prompts until they are loaded, and all is written."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        stop_s = time.monotonic() + 240
        while (
            not all(self.ask(range(4), [None] * 4)) or get_kv_transfer_group().worker.saves.pending
        ):
            if time.monotonic() > stop_s:
                raise TimeoutError("stored prompts are not loaded")
            time.sleep(0.2)


def tokens(seed: int) -> list[int]:
    """A prompt, which no other one begins like."""
    return [5 + (seed * 31 + at * (seed + 1)) % 490 for at in range(PROMPT_TOKENS)]


def library() -> ctypes.CDLL:
    """The library that lets calls wait."""
    return ctypes.CDLL(str(Path(os.environ[ROOT_VARIABLE]).parent / "slow.so"))


def slow(seconds: float) -> None:
    """Let each call below the slow directory take so long from now on."""
    ctypes.c_double.in_dll(library(), "vua_slow_s").value = seconds


def slow_calls(which: str = "calls") -> int:
    """How many calls have waited, or of these kept the GIL (``held``)."""
    return int(ctypes.c_long.in_dll(library(), f"vua_slow_{which}").value)


def arms(model: Path, root: Path, delay_s: float, rounds: int) -> Iterator[tuple[str, Any]]:
    """Measure the arms of one engine: the arm, and its hooks' times."""
    served, clock = Served(model, root), Clock()
    served.until_loaded()
    given = options()
    for _ in range(rounds):
        for arm in (NOTHING, OPTIONS, SLOW):
            clock.take()
            before = slow_calls()
            if arm == SLOW:
                slow(delay_s)
            served.arm(given if arm == OPTIONS else [None] * len(given))
            yield arm, clock.take()
            slow(0)
            if arm == SLOW and slow_calls() == before:
                raise RuntimeError("no call of the storage was slow")
            served.until_loaded()
    refuse_held()


def refuse_held() -> None:
    """Raise RuntimeError where all threads have waited for a call."""
    if held := slow_calls("held"):
        raise RuntimeError(f"{held} slow calls of the storage kept the GIL")


def opened(model: Path, root: Path, delay_s: float) -> Iterator[tuple[str, Any]]:
    """Measure an engine that begins while each call takes long."""
    slow(delay_s)
    served, clock = Served(model, root), Clock()
    for _ in range(2):
        served.arm([None] * 5)
    yield OPENED, clock.take()
    slow(0)
    served.until_loaded()
    refuse_held()


def adapter(root: Path, rounds: int) -> dict[str, Any]:
    """Seconds that an adapter of 100 MiB takes: the median of each part, in turn."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    from vua.connector.extras import Content

    held = {f"{at}.a": torch.randn(64, 4096).bfloat16() for at in range(100)}
    held |= {f"{at}.b": torch.randn(4096, 64).bfloat16() for at in range(100)}
    path, times = root / "adapter.safetensors", defaultdict(list)
    save_file(held, path)
    for _ in range(rounds * 5):
        began_s = time.perf_counter()
        with safe_open(path, "pt") as file:
            read = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        times["read"].append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        content = Content(read, b"")
        times["copied"].append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        content.digest()
        times["digest"].append(time.perf_counter() - began_s)
    return {name: median(each) for name, each in times.items()}


def in_a_process(work: Callable[..., Iterator[Any]], *arguments: Any) -> list[Any]:
    """Run it in a fork, in which importing vLLM takes no time; return what it yields."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()

    def child(pipe: Connection, log: int) -> None:
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            pipe.send(list(work(*arguments)))
        except BaseException:  # noqa: BLE001 - shown by the parent
            pipe.send(traceback.format_exc())
        os._exit(0)

    with tempfile.TemporaryFile() as log:
        process = fork.Process(target=child, args=(theirs, log.fileno()))
        process.start()
        theirs.close()
        try:
            found = ours.recv()
        except EOFError:
            log.seek(0)
            found = log.read().decode(errors="replace")[-3000:]
        process.join()
    if isinstance(found, str):
        sys.exit(found)
    return list(found)


def summary(found: list[tuple[str, dict[str, list[float]]]]) -> dict[str, dict[str, Any]]:
    """Of each hook and arm: calls, the median, the largest time, the least of the rounds' largest.

    Seconds.
    """
    rows: dict[str, dict[str, Any]] = defaultdict(dict)
    for arm in ARMS:
        rounds = [times for name, times in found if name == arm]
        for hook in {hook for times in rounds for hook in times}:
            of_rounds = [times[hook] for times in rounds if hook in times]
            times = [one for each in of_rounds for one in each]
            rows[hook][arm] = {
                "calls": len(times),
                "median": median(times),
                "max": max(times),
                "least_max": min(map(max, of_rounds)),
            }
    return {hook: rows[hook] for hook in sorted(rows)}


def table(rows: dict[str, dict[str, Any]], about: str) -> str:
    """The hooks that take a millisecond or more, and how many do not: milliseconds."""
    most = {
        hook: max(one["least_max"] for one in arms_of.values()) for hook, arms_of in rows.items()
    }
    slow = {hook: arms_of for hook, arms_of in rows.items() if most[hook] >= SHOWN_S}
    lines = [f"| hook, ms: median, least of the rounds' largest | {' | '.join(ARMS)} |"]
    lines.append("|---|" + "--:|" * len(ARMS))
    for hook, arms_of in slow.items():
        cells = [
            f"{1e3 * one['median']:.3f}, {1e3 * one['least_max']:.1f}" if one else "-"
            for one in (arms_of.get(arm) for arm in ARMS)
        ]
        lines.append(f"| `{hook}` | {' | '.join(cells)} |")
    rest = f"The other {len(rows) - len(slow)} hooks: less than {1e3 * SHOWN_S:g} ms."
    return "\n".join([*lines, "", f"{rest} {about}"])


def main() -> int:
    """Measure, print a table, and say whether a hook is above the bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--delay", type=float, default=3.0, metavar="SECONDS", help="of each call")
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="where (%(default)s)")
    asked = parser.parse_args()
    from small_models import ENGINE_ENVIRONMENT, make_model

    if ROOT_VARIABLE not in os.environ:
        with tempfile.TemporaryDirectory(prefix="vua-hooks-", dir=asked.dir) as name:
            environment = os.environ | ENGINE_ENVIRONMENT | preloaded(Path(name))
            return subprocess.run(
                [sys.executable, *sys.argv], env=environment, check=False
            ).returncode
    import vllm.entrypoints.llm
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker

    place = Path(os.environ[ROOT_VARIABLE])
    place.mkdir()
    model = make_model(place.parent / "model")
    found = in_a_process(arms, model, place / "kv", asked.delay, asked.rounds)
    for _ in range(asked.rounds):
        found += in_a_process(opened, model, place / "kv", asked.delay)
    rows, lora = summary(found), adapter(place.parent, asked.rounds)
    about = (
        f"vLLM {vllm.__version__}, {os.cpu_count()} CPUs, {asked.rounds} rounds, "
        f"{asked.delay:g} s a call, {time.strftime('%Y-%m-%d')}. A LoRA adapter of 100 MiB: "
        f"read in {1e3 * lora['read']:.0f} ms, copied in {1e3 * lora['copied']:.0f} ms, "
        f"its digest in {1e3 * lora['digest']:.0f} ms (medians)."
    )
    print(table(rows, about))
    if asked.json:
        asked.json.write_text(
            json.dumps({"about": about, "adapter_s": lora, "hooks": rows}, indent=1) + "\n"
        )
    above = {
        f"{hook}, {arm}"
        for hook, cells in rows.items()
        for arm, one in cells.items()
        if one["least_max"] > BAR_S and hook not in ("shutdown", "register_kv_caches")
    }
    print(f"above {1e3 * BAR_S:g} ms: {sorted(above)}" if above else "no hook is above 20 ms")
    return bool(above)


if __name__ == "__main__":
    sys.exit(main())
