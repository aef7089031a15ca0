"""Figures in a guest: Tensorwire's writes beside perftest's, in one boot and in turns. ``make bench-rdma`` runs it.

This is emulation: only the ratios say something, and they say that nothing stands in the way of the NIC, not how fast
RDMA is. The command is the one for two machines with real NICs; here both ends are in one guest, rxa and rxb.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.rdma.wire import ADDRESSES

COMMAND = [sys.executable, "-m", "benchmarks", "device", "--device", "verbs"]


def main(arguments: list[str]) -> int:
    """The target on rxa, the initiator on rxb; further arguments go to the benchmark."""
    print("Soft-RoCE in a virtual machine: emulation, no RDMA performance", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.write_bytes(os.urandom(32).hex().encode())
        secret.chmod(0o600)
        environment = {**os.environ, "TENSORWIRE_SECRET_FILE": str(secret)}
        listen = [*COMMAND, "--listen", f"{ADDRESSES[0]}:0"]
        with subprocess.Popen(listen, env=environment, stdout=subprocess.PIPE, text=True) as target:
            assert target.stdout is not None
            where = target.stdout.readline().partition("listening on ")[2].partition(";")[0]
            try:
                environment["TENSORWIRE_VERBS_PORT"] = "rxb"
                return subprocess.run([*COMMAND, "--connect", where, *arguments], env=environment).returncode
            finally:
                target.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
