"""Compiles `src/vua/native/*.c` into the wheel: hatchling calls this when it builds one.

An ordinary build compiles for this machine where there is a C compiler ($CC, cc, gcc or clang), and
makes a wheel without native code where there is none, or where it fails. The environment variable
``VUA_WHEEL`` says otherwise:

- ``pure``: a wheel for every platform, without native code;
- a platform tag for a release, such as ``manylinux_2_17_aarch64``: that machine and that glibc, by
  the compiler of PyPI's package ziglang, on any machine. If it fails the build fails.

An editable installation has the library in the source tree; `dev.py build` makes it there as well.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # dev.py, which builds in the source tree, runs without it
    BuildHookInterface = object

ROOT = Path(__file__).resolve().parent
FOLDER = ROOT / "src" / "vua" / "native"
FLAGS = ("-O2", "-std=c11", "-shared", "-fPIC", "-pthread")
COMPILERS = ("cc", "gcc", "clang")
TIMEOUT_S = 300  # zig makes parts of glibc first
RELEASE_TAG = re.compile(r"manylinux_(\d+_\d+)_(x86_64|aarch64)")

spec = importlib.util.spec_from_file_location("stamp", FOLDER / "stamp.py")
stamp = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stamp)


class BuildError(Exception):
    """The library could not be compiled; the message says why."""


def local_compiler() -> list[str]:
    """The command of this machine's C compiler."""
    if sys.platform != "linux" or sys.maxsize < 1 << 32:
        raise BuildError("it needs Linux and 64 bits")
    chosen = shlex.split(os.environ.get("CC", ""))
    found = [chosen] if chosen else [[name] for name in COMPILERS]
    command = next((one for one in found if shutil.which(one[0])), None)
    if command is None:
        raise BuildError("no C compiler found (looked for $CC, cc, gcc, clang)")
    return command


def release_compiler(tag: str) -> tuple[list[str], str]:
    """The command that compiles for a release's platform tag, and the machine that it is for."""
    known = RELEASE_TAG.fullmatch(tag)
    if known is None:
        raise BuildError(
            f"VUA_WHEEL must be pure or like manylinux_2_17_x86_64 (or _aarch64), found {tag!r}"
        )
    target = f"{known[2]}-linux-gnu.{known[1].replace('_', '.')}"
    # With a target given, code is for every CPU of its kind, not for this machine's.
    return [sys.executable, "-m", "ziglang", "cc", "-target", target, "-s"], known[2]


def compile_to(path: Path, compiler: list[str]) -> None:
    """Compiles and stamps the library, which appears at `path` complete or not at all."""
    built_from = stamp.sources_digest(FOLDER)
    names = [one.name for one in stamp.sources(FOLDER) if one.suffix == ".c"]
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".vua-build-") as place:
            made = Path(place) / path.name
            run_compiler([*compiler, *FLAGS, "-o", str(made), *names], f"{place}/zig")
            with made.open("ab") as library:
                library.write(stamp.stamp(made.read_bytes(), built_from))
            made.chmod(0o755)
            made.replace(path)
    except (OSError, subprocess.SubprocessError) as problem:
        raise BuildError(f"{shlex.join(compiler)}: {problem}") from problem


def run_compiler(command: list[str], cache: str) -> None:
    """Runs it in the folder of the C files, so that the library holds no path of this machine."""
    done = subprocess.run(
        command,
        cwd=FOLDER,
        env={**os.environ, "ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
    )
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr.strip()[-2000:]}")


def build_in_place(*, anew: bool = False) -> tuple[bool, Path]:
    """Compiles into the source tree if the sources have changed; returns whether, and the path.

    `anew`: in any case. Raises BuildError.
    """
    path = stamp.library_path(FOLDER, platform.machine())
    there = path.read_bytes() if path.exists() else b""
    changed = anew or stamp.fault_of(there, stamp.sources_digest(FOLDER)) is not None
    if changed:
        compile_to(path, local_compiler())
    return changed, path


class NativeBuildHook(BuildHookInterface):
    """What hatchling calls around the building of a wheel."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """What has to be installed for this build besides hatchling."""
        return ["ziglang"] if os.environ.get("VUA_WHEEL", "") not in ("", "pure") else []

    def initialize(self, version: str, build_data: dict) -> None:
        """Compiles before the wheel is put together."""
        wanted = os.environ.get("VUA_WHEEL", "")
        self.place = tempfile.TemporaryDirectory(prefix="vua-wheel-")
        if wanted == "pure":
            return
        try:
            if version == "editable":
                build_in_place()
                return
            compiler, machine = (
                release_compiler(wanted) if wanted else (local_compiler(), platform.machine())
            )
            made = stamp.library_path(Path(self.place.name), machine)
            compile_to(made, compiler)
        except BuildError as problem:
            if wanted:
                raise
            self.app.display_warning(f"VUA is built without its native code: {problem}")
            return
        build_data["pure_python"] = False
        platform_tag = wanted or re.sub(r"[-.]", "_", sysconfig.get_platform())
        build_data["tag"] = f"py3-none-{platform_tag}"
        build_data["force_include"][str(made)] = f"vua/native/{made.name}"

    def finalize(self, version: str, build_data: dict, artifact_path: str) -> None:
        """Tidies up behind it."""
        self.place.cleanup()
