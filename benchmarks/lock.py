"""Measures how long a thread holds the interpreter lock. Other work on the machine does not count.

A small library stands before CPython's functions that give the lock up and take it again, and
counts the processor time of each thread in between. Where CPython gives it up within itself (in
calls of `os`) the library sees nothing, so that counts as if the lock were held. Needs a C
compiler.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
static __thread long long released_ns, began_ns;
static long long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}
void *PyEval_SaveThread(void) {
    static void *(*real)(void);
    if (!real) real = (void *(*)(void))dlsym(RTLD_NEXT, "PyEval_SaveThread");
    void *state = real();
    began_ns = now();
    return state;
}
void PyEval_RestoreThread(void *state) {
    static void (*real)(void *);
    if (!real) real = (void (*)(void *))dlsym(RTLD_NEXT, "PyEval_RestoreThread");
    released_ns += now() - began_ns;
    real(state);
}
long long vua_released_ns(void) { return released_ns; }
"""


def library(folder: Path) -> str | None:
    """Compile it; return its path for `LD_PRELOAD`, None without a compiler."""
    if shutil.which("cc") is None:
        return None
    source, shim = folder / "lock.c", folder / "lock.so"
    source.write_text(SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", shim, source, "-ldl"], check=True)
    return str(shim)


def held_clock() -> Callable[[], int]:
    """Return a clock of this thread, in ns, that stands still while it has given the lock up.

    For a process that was started with the library in `LD_PRELOAD`.
    """
    shim = ctypes.PyDLL(os.environ["LD_PRELOAD"])
    shim.vua_released_ns.restype = ctypes.c_longlong
    return lambda: time.thread_time_ns() - int(shim.vua_released_ns())
