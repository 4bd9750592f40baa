"""Real NFS without an NFS kernel: a server and two clients in a User-Mode Linux guest.

``python benchmarks/nfs/run.py [--mounts 4.2,3,4.2+lookupcache=positive] [--rtt-ms 1]`` boots the
guest (`guest.sh`), runs `clients.py` in it once per kind of mount, and prints what it finds, one
JSON object a line; exit status 1 when something is wrong. Takes minutes: the guest is slow, so read
its RPC counts and not its milliseconds. With ``--parts
scale --mounts 4.2 --out docs/measurements/scale.json`` that file gets what `benchmarks/scale.py`
finds; a million chunks (``--sizes 10000,100000,1000000 --memory 11G --timeout 9000``) take hours.
Needs Linux on x86-64, root (the guest's root is the host's file system), and on Debian
``apt-get install user-mode-linux nfs-kernel-server kmod iproute2``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TOOLS = ("linux.uml", "rpc.nfsd", "exportfs", "mount.nfs", "rpcbind", "modprobe", "ip", "tc")


def main() -> int:
    """Run the guest; return the exit status, 2 where it cannot be run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mounts", default="4.2,3,4.2+lookupcache=positive")
    parser.add_argument("--rtt-ms", type=float, default=1.0, help="round trip between the two")
    parser.add_argument("--mbit", type=float, help="what each client's link carries per second")
    parser.add_argument("--memory", default="1500M", help="of the guest")
    parser.add_argument("--parts", default="across,race,costs")
    parser.add_argument("--timeout", type=float, default=1500.0)
    parser.add_argument("--modules", type=Path, help="of the guest's kernel, one folder a release")
    parser.add_argument("--sizes", help="in chunks, for the part `scale`")
    parser.add_argument("--out", type=Path, help="put there what the part `scale` reports")
    given = parser.parse_args()
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    if missing or os.geteuid() != 0:
        print(f"not run: needs root and {', '.join(missing) or 'nothing else'}")
        return 2
    kernel = Path(shutil.which(TOOLS[0], path=path) or TOOLS[0])
    modules = given.modules or kernel.resolve().parents[1] / "lib" / "uml" / "modules"
    command = [
        *("linux.uml", f"mem={given.memory}", "quiet", "con=null", "con0=null,fd:1"),
        *("root=/dev/root", "rootfstype=hostfs", "rootflags=/", "rw", f"init={HERE / 'guest.sh'}"),
        *(f"PYTHON={sys.executable}", f"SCRIPT={HERE / 'clients.py'}", f"MODULES={modules}"),
        *(f"SOURCE={ROOT / 'src'}:{ROOT / 'tests'}", f"VERSIONS={given.mounts}"),
        *(f"RTT_MS={given.rtt_ms:g}", f"PARTS={given.parts}"),
        *([f"MBIT={given.mbit:g}"] if given.mbit else []),
        *([f"SIZES={given.sizes}"] if given.sizes else []),
    ]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
        timeout=given.timeout, env={**os.environ, "PATH": path}, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    for line in lines:
        if line.startswith(("{", "guest: ", "Traceback", "  File")) or "Error" in line:
            print(line, flush=True)
        if line.startswith('{"scale"') and given.out:
            there = json.loads(given.out.read_text("utf-8")) if given.out.exists() else {}
            there |= json.loads(line)["scale"]
            given.out.write_text(json.dumps(there, indent=1) + "\n", encoding="utf-8")
    mounts = len(given.mounts.split(","))
    ran = sum(line.startswith('{"nfs"') for line in lines)
    wrong = any('"holds": false' in line or "failed" in line for line in lines)
    return 1 if wrong or ran != mounts or "guest: status 0" not in lines else 0


if __name__ == "__main__":
    sys.exit(main())
