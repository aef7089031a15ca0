"""A job of MXNet on two machines: scheduler, server and a worker in this guest, another worker in the second."""

from __future__ import annotations

import secrets
import subprocess
from pathlib import Path

import pytest

from tests.rdma.two.conftest import Far
from tests.rdma.wire import FAR

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-mxnet" / "bin" / "python"
SECRET = Path("/tmp/mxnet-secret")
SECONDS = 200.0  # only a guard: guests are slow

pytestmark = [
    pytest.mark.timeout(500),
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no environment of MXNet's: make setup-mxnet"),
]


def words(role: str, device: str, port: int) -> tuple[str, ...]:
    settings = {
        "DMLC_ROLE": role,
        "DMLC_PS_ROOT_URI": FAR[0],
        "DMLC_PS_ROOT_PORT": port,
        "DMLC_NUM_WORKER": 2,
        "DMLC_NUM_SERVER": 1,
        "TENSORWIRE_SECRET_FILE": SECRET,
        "TENSORWIRE_DEVICE": device,
    }
    assigned = (f"{name}={value}" for name, value in settings.items())
    return ("env", "-C", str(ROOT), *assigned, str(PYTHON), "-m", "tests.rdma.two.mxnet_process")


def trained(far: Far, device: str, port: int) -> set[str]:
    """What the workers say: their device, and the digest of their parameters."""
    secret = secrets.token_hex(32)
    far.call("run", "sh", "-c", f"umask 77; echo {secret} >{SECRET}")
    SECRET.unlink(missing_ok=True)
    SECRET.touch(0o600)
    SECRET.write_text(secret + "\n")
    here = [
        subprocess.Popen(words(role, device, port), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for role in ("scheduler", "server", "worker")
    ]
    far.start("run", *words("worker", device, port))
    said = [process.communicate(timeout=SECONDS)[0] for process in here]
    assert [process.returncode for process in here] == [0, 0, 0], said
    return {said[-1].strip().splitlines()[-1], far.finish().strip().splitlines()[-1]}


def test_training_is_the_same_over_verbs_and_over_tcp(far: Far) -> None:
    (over_verbs,), (over_tcp,) = trained(far, "verbs", 9091), trained(far, "tcp", 9092)
    assert [over_verbs.split()[0], over_tcp.split()[0]] == ["verbs", "tcp"]
    assert over_verbs.split()[1] == over_tcp.split()[1]
