"""A graph of TensorFlow that is cut over two machines: worker 0 in this guest, worker 1 in the second."""

from __future__ import annotations

import json
import secrets
import subprocess
from pathlib import Path

import pytest

from tests.rdma.two.conftest import Far
from tests.rdma.wire import FAR

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-tensorflow" / "bin" / "python"
SECRET = Path("/tmp/tensorflow-secret")
SECONDS = 300.0  # only a guard: guests are slow, and may have to compile the operators

pytestmark = [
    pytest.mark.timeout(700),
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no environment of TensorFlow's: make setup-tensorflow"),
]


def words(rank: int, device: str, port: int) -> tuple[str, ...]:
    cluster = {"worker": [f"{address}:{port}" for address in FAR]}
    settings = {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}}),
        "TENSORWIRE_SECRET_FILE": SECRET,
        "TENSORWIRE_DEVICE": device,
    }
    assigned = (f"{name}={value}" for name, value in settings.items())
    return ("env", "-C", str(ROOT), *assigned, str(PYTHON), "-m", "tests.rdma.two.tensorflow_process")


def trained(far: Far, device: str, port: int) -> set[str]:
    """What the workers say: their device, and the digest of the losses."""
    secret = secrets.token_hex(32)
    far.call("run", "sh", "-c", f"umask 77; echo {secret} >{SECRET}")
    SECRET.unlink(missing_ok=True)
    SECRET.touch(0o600)
    SECRET.write_text(secret + "\n")
    here = subprocess.Popen(words(0, device, port), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    far.start("run", *words(1, device, port))
    said, _ = here.communicate(timeout=SECONDS)
    assert here.returncode == 0, said
    return {said.strip().splitlines()[-1], far.finish().strip().splitlines()[-1]}


def test_a_cut_function_is_the_same_over_verbs_and_over_tcp(far: Far) -> None:
    (over_verbs,), (over_tcp,) = trained(far, "verbs", 9093), trained(far, "tcp", 9094)
    assert [over_verbs.split()[0], over_tcp.split()[0]] == ["verbs", "tcp"]
    assert over_verbs.split()[1] == over_tcp.split()[1]
