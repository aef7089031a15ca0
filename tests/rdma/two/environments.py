"""Jobs on both machines by the Python of another framework: some processes in this guest, one in the second."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.rdma.two.conftest import Far

ROOT = Path(__file__).parents[3]
SECRET = Path("/tmp/framework-secret")

Settings = Mapping[str, object]  # environment variables of one process


@dataclass(frozen=True)
class Framework:
    """``name``: that of its environment and of the program ``tests.rdma.two.NAME_process``."""

    name: str

    @property
    def python(self) -> Path:
        """Its Python."""
        return ROOT / f".venv-{self.name}" / "bin" / "python"

    def words(self, device: str, settings: Settings) -> tuple[str, ...]:
        """The command of a process."""
        every = {**settings, "TENSORWIRE_SECRET_FILE": SECRET, "TENSORWIRE_DEVICE": device}
        assigned = (f"{name}={value}" for name, value in every.items())
        program = f"tests.rdma.two.{self.name}_process"
        return ("env", "-C", str(ROOT), *assigned, str(self.python), "-m", program)

    def trained(self, far: Far, device: str, here: Sequence[Settings], there: Settings, seconds: float) -> set[str]:
        """What the last process ``here`` and the one ``there`` say in their last lines; all of them end well."""
        secret = secrets.token_hex(32)
        far.call("run", "sh", "-c", f"umask 77; echo {secret} >{SECRET}")
        SECRET.unlink(missing_ok=True)
        SECRET.touch(0o600)
        SECRET.write_text(secret + "\n")
        started = [
            subprocess.Popen(self.words(device, settings), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for settings in here
        ]
        far.start("run", *self.words(device, there))
        try:
            said = [process.communicate(timeout=seconds)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        assert [process.returncode for process in started] == [0] * len(started), said
        return {said[-1].strip().splitlines()[-1], far.finish().strip().splitlines()[-1]}
