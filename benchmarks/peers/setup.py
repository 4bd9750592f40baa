"""Make the peers' environment: `python benchmarks/peers/setup.py [--base PYTHON] [DIRECTORY]`.

LMCache pins older versions of packages that vLLM wants newer, so the peers get an environment of
their own. It sees the packages of the base environment (torch, safetensors, vLLM) behind its own,
through one .pth file, and changes nothing there. LMCache is built from its sdist without GPU code
(`NO_GPU_EXT=1`): that builds its storage in C++ and needs a C++ compiler. Takes some three minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LMCACHE = "0.5.6"
BUILD = (
    "setuptools>=77,<81", "setuptools_scm>=8", "wheel", "packaging", "ninja", "pybind11",
    "grpcio-tools",
)  # fmt: skip
# What LMCache's storage imports and the base environment lacks; not all of its requirements, of
# which most are clients of other stores.
NEEDED = (
    "aiofile", "aiofiles", "sortedcontainers", "blake3", "msgspec", "pyyaml", "aiohttp",
    "httptools", "nvtx", "redis", "xxhash", "safetensors", "py-cpuinfo", "psutil",
    "prometheus_client", "cachetools",
)  # fmt: skip


def site_packages(python: Path | str) -> str:
    """Where an interpreter's packages lie."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> int:
    """Build the environment and print the interpreter to give to `dev.py bench --peers`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?", type=Path, default=ROOT / ".venv-peers")
    parser.add_argument("--base", default=sys.executable, help="interpreter that has torch")
    parser.add_argument("--without-lmcache", action="store_true")
    given = parser.parse_args()
    venv.create(given.directory, symlinks=True, with_pip=True)
    python = given.directory.resolve() / "bin" / "python"
    Path(site_packages(python), "base.pth").write_text(site_packages(given.base) + "\n")
    if not given.without_lmcache:
        pip = [str(python), "-m", "pip", "install", "--no-input", "-q"]
        subprocess.run([*pip, *BUILD, *NEEDED], check=True)
        source = ["--no-binary", "lmcache", "--no-build-isolation", "--no-deps"]
        environment = {**os.environ, "NO_GPU_EXT": "1"}
        subprocess.run([*pip, *source, f"lmcache=={LMCACHE}"], check=True, env=environment)
    print(python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
