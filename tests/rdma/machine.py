"""One guest: a virtual machine that runs one command, with this machine's files around it, and then is gone.

It sees every file of the host, read-only; what it writes lies in its memory and goes with it. The processor is
emulated (no KVM), so it runs wherever QEMU does, and slowly.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tensorwire.testing.patience import PATIENCE, VARIABLE, patient
from tests.rdma.errors import Hung
from tests.rdma.kernel import Image

BOOT_SECONDS = patient(120.0)  # it takes 5 on an idle machine
INSIDE = "TENSORWIRE_RDMA_GUEST"  # set in a guest, to its name
PORTS = ("out", "err", "status")
KERNEL_OPTIONS = (
    "console=ttyS0 quiet loglevel=4 panic=-1 rdinit=/init mitigations=off nokaslr nopti init_on_alloc=0 audit=0 "
    "tsc=reliable no_timer_check"
)

Output = Callable[[str, bytes], None]  # "out" or "err", and some bytes of it


@dataclass(frozen=True)
class Job:
    """What one guest does."""

    command: Sequence[str]
    setup: str  # shell commands before it
    name: str = "rdma"
    folder: Path = field(default_factory=Path.cwd)
    environment: Mapping[str, str] = field(default_factory=dict)
    writable: Path | None = None  # a folder of the host that the guest may write to
    cpus: int = 2
    memory: int = 3072  # MiB
    wire: int | None = None  # a descriptor of this process: one end of a socket pair that is the network cable

    def script(self) -> str:
        """The shell script that the guest runs."""
        variables = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "TMPDIR": "/run/tmp",
            "PYTHONUNBUFFERED": "1",  # so that output comes when it is written
            INSIDE: self.name,
            VARIABLE: f"{PATIENCE:g}",  # time limits are the host's
            **self.environment,
        }
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
        prepare = f"hostname {self.name}; ip link set lo up\nset -e\n{self.setup}\nset +e\necho up >&3; exec 3>&-"
        return f"{exports}{prepare}\ncd {shlex.quote(str(self.folder))}\n{shlex.join(self.command)}\n"


class Machine:
    """A guest that runs a job. Usable as a context manager; then it is gone at the end."""

    def __init__(self, image: Image, job: Job, output: Output) -> None:
        self.job = job
        self._place = tempfile.TemporaryDirectory(prefix="tensorwire-rdma-")
        self._console = Path(self._place.name, "console")
        self._shown = Path(self._place.name, "job")
        self._shown.mkdir()
        (self._shown / "command.sh").write_text(job.script())
        if job.writable is not None:
            (self._shown / "writable").write_text(str(job.writable))
        pipes = {name: os.pipe() for name in PORTS}
        passed = [theirs for _, theirs in pipes.values()] + ([job.wire] if job.wire is not None else [])
        # setpriv: whatever happens to us, the machine does not stay. A session of its own: Ctrl-C is for us to handle.
        command = ["setpriv", "--pdeathsig", "KILL", *self._qemu(image, {name: w for name, (_, w) in pipes.items()})]
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=(Path(self._place.name) / "qemu").open("wb"),
                start_new_session=True,
            )
        finally:
            for _, theirs in pipes.values():
                os.close(theirs)
        self._status = pipes["status"][0]
        self._readers = [
            threading.Thread(target=_forward, args=(pipes[name][0], name, output), daemon=True)
            for name in ("out", "err")
        ]
        for reader in self._readers:
            reader.start()

    def wait(self, seconds: float) -> int:
        """The command's exit status. Raises `Hung` if the guest breaks off, or takes longer than ``seconds``."""
        if self._line(BOOT_SECONDS, f"did not boot within {BOOT_SECONDS:.0f} s") != "up":
            raise self._hung("could not make its RDMA devices")
        status = self._line(seconds, f"did not end within {seconds:g} s")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)
        self.close()
        return int(status)

    def close(self) -> None:
        """Ends the guest, wherever it is. Idempotent."""
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join()
        if self._status >= 0:
            os.close(self._status)
            self._status = -1
        self._place.cleanup()

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, seconds: float, late: str) -> str:
        """The next line of the status port."""
        end, line = time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            if not select.select([self._status], [], [], max(0.0, end - time.monotonic()))[0]:
                raise self._hung(late)
            byte = os.read(self._status, 1)
            if not byte:
                raise self._hung("broke off")
            line += byte
        return line.decode().strip()

    def _hung(self, what: str) -> Hung:
        tail = "\n".join(self._console.read_text(errors="replace").splitlines()[-30:]) if self._console.exists() else ""
        qemu = Path(self._place.name, "qemu").read_text(errors="replace").strip()
        self.close()
        return Hung(f"the guest {self.job.name} {what}. {qemu}\nIts console, the last lines:\n{tail or '(nothing)'}")

    def _qemu(self, image: Image, ports: Mapping[str, int]) -> list[str]:
        job = self.job
        command = ["qemu-system-x86_64", "-machine", "q35", "-nodefaults", "-display", "none", "-no-reboot"]
        # "rep movsb" goes byte by byte in the emulation: without erms the kernel uses other instructions.
        command += ["-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max,erms=off"]
        command += ["-smp", str(job.cpus), "-m", str(job.memory)]
        command += ["-kernel", str(image.kernel), "-initrd", str(image.initrd), "-append", KERNEL_OPTIONS]
        command += ["-serial", f"file:{self._console}", "-device", "virtio-serial-pci"]
        for name, fd in ports.items():
            command += ["-chardev", f"file,id={name},path=/proc/self/fd/{fd},append=on"]
            command += ["-device", f"virtserialport,chardev={name},name={name}"]
        command += _shared("host", Path("/"), writable=False) + _shared("job", self._shown, writable=False)
        if job.writable is not None:
            command += _shared("writable", job.writable, writable=True)
        if job.wire is not None:
            number = int(job.name[-1:] or "0") if job.name[-1:].isdigit() else 0
            command += ["-netdev", f"socket,id=wire,fd={job.wire}"]
            command += ["-device", f"virtio-net-pci,netdev=wire,mac=52:54:00:77:00:{number:02x},romfile="]
        return command


def _shared(tag: str, folder: Path, *, writable: bool) -> list[str]:
    """A folder of the host, in the guest."""
    options = "" if writable else ",readonly=on"
    where = f"local,id={tag},path={folder},security_model=none,multidevs=remap{options}"
    return ["-fsdev", where, "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]


def _forward(fd: int, name: str, output: Output) -> None:
    """Hands on what the guest writes, as it comes."""
    with os.fdopen(fd, "rb", buffering=0) as pipe:
        while data := pipe.read(65536):
            output(name, data)
