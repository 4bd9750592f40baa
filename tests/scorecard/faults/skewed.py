"""What a process with a wrong clock does: ``python -m scorecard.faults.skewed WHAT ROOT``.

Says, as JSON, what it took the time to be. Test 23 starts it under libfaketime, which would also
tamper with the times that files get. But "now" is the server's, and a time that is given is given;
so ``os.utime`` goes past it here.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Final

from scorecard.stores import VuaSubject
from scorecard.subject import Key
from vua.capacity.gc import collect
from vua.capacity.limits import Limits, ResolvedLimits

NBYTES: Final = 65536
TTL_S: Final = 3600.0
PUTS: Final = 6


_SYS_UTIMENSAT: Final = {"x86_64": 280, "aarch64": 88}.get(platform.machine(), 0)
_AT_FDCWD: Final = -100
_AT_SYMLINK_NOFOLLOW: Final = 0x100


def utime(
    path: str | int, *, ns: tuple[int, int] | None = None, dir_fd: int = _AT_FDCWD,
    follow_symlinks: bool = True,
) -> None:  # fmt: skip
    """Set a file's times as ``os.utime`` does, by the system call itself. Raises OSError."""
    times = (ctypes.c_int64 * 4)(*(part for one in ns or () for part in divmod(one, 10**9)))
    here = isinstance(path, int)
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.syscall(
        ctypes.c_long(_SYS_UTIMENSAT),
        ctypes.c_int(path if isinstance(path, int) else dir_fd),
        None if here else ctypes.c_char_p(os.fsencode(str(path))),
        times if ns else None,
        ctypes.c_int(0 if follow_symlinks or here else _AT_SYMLINK_NOFOLLOW),
    )
    if done != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))


def main(what: str, root: Path) -> None:
    """Collect garbage, or put the first few keys. Raises what these raise."""
    if what == "collect":
        collect(root, ResolvedLimits.of(root, Limits(min_free_bytes=0, ttl_s=TTL_S)))
    else:
        subject = VuaSubject(root, NBYTES)
        for number in range(PUTS):
            subject.put(Key(number), Key(number).payload(NBYTES))
        subject.close()
    print(json.dumps(time.time()), flush=True)  # noqa: T201 - its answer


if __name__ == "__main__":
    os.utime = utime  # type: ignore[assignment]
    main(sys.argv[1], Path(sys.argv[2]))
