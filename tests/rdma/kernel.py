"""The guest's kernel and first file system, fetched and built once, and kept outside the source tree.

The distribution's kernel package is unpacked, not installed. An entry of the cache is a folder that appears complete
or not at all; its manifest has the sums of its files. Its name has the package's version and the sum of the recipe, so
a change of either makes a new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import lzma
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.rdma import archive
from tests.rdma.errors import Impossible, say
from tests.rdma.host import apt

VARIABLE = "TENSORWIRE_RDMA_CACHE"
META = ("linux-image-amd64", "linux-image-generic")  # Debian's and Ubuntu's; the -cloud- and -kvm kernels have no rxe
INIT = Path(__file__).with_name("init.sh")
MODULES = (
    *("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay"),
    *("virtio_net", "dummy", "veth", "sch_netem", "af_packet"),
    *("crc32_generic", "rdma_rxe", "ib_uverbs", "rdma_ucm"),
)
MAY_BE_BUILT_IN = {"af_packet", "crc32_generic"}  # and then modprobe may not know the name
XZ = b"\xfd7zXZ\x00"
FORMAT = 1  # to be raised when what is built below changes
KEEP = 3  # older entries are removed


@dataclass(frozen=True)
class Image:
    """What a guest boots."""

    kernel: Path
    initrd: Path


def folder() -> Path:
    """Where the cache is."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(VARIABLE) or Path(base) / "tensorwire-rdma")


def image() -> Image:
    """The image to boot, built first if need be. Raises `Impossible`. Several processes may ask at once."""
    cache = folder()
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache):
        for left in cache.glob("building-*"):
            shutil.rmtree(left)  # of a run that was killed: we hold the lock
        recipe = _recipe()
        kept = sorted(cache.glob(f"*-{recipe}"), key=lambda path: path.stat().st_mtime)
        package, version = _wanted(offline=bool(kept))
        entry = cache / f"{package}_{version}-{recipe}" if package else kept[-1]
        if entry.exists() and not _whole(entry):
            say(f"the cached kernel in {entry} is broken; building it again")
            shutil.rmtree(entry)
        if not entry.exists():
            if any(cache.glob("linux-image-*")):
                say(f"no cached kernel fits {package} {version} and this recipe; building one")
            _build(cache, entry, package, version)
        os.utime(entry)
    return Image(entry / "vmlinux", entry / "initrd")


@contextlib.contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """One process at a time; the kernel lets go of it when the process ends, however it ends."""
    with (cache / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another run prepares the kernel; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _recipe() -> str:
    return hashlib.sha256(repr((FORMAT, MODULES)).encode() + INIT.read_bytes()).hexdigest()[:12]


def _wanted(*, offline: bool) -> tuple[str, str]:
    """The kernel package that apt offers now, and its version; empty if apt knows none and we are ``offline``."""
    for attempt in range(2):
        for meta in META:
            told = _run("apt-cache", "depends", "--important", meta, check=False)
            if found := re.search(r"Depends: (linux-image-\d\S*)", told):
                policy = _run("apt-cache", "policy", found[1])
                version = re.search(r"Candidate: (\S+)", policy)
                if version and version[1] != "(none)":
                    return found[1], version[1].replace(":", "%")
        if offline:
            return "", ""
        if attempt == 0:
            apt("update")
    raise Impossible(f"apt offers none of {', '.join(META)}")


def _whole(entry: Path) -> bool:
    try:
        manifest: dict[str, str] = json.loads((entry / "manifest").read_text())
        return all(_sum(entry / name) == expected for name, expected in manifest.items()) and len(manifest) == 2
    except (OSError, ValueError, AttributeError):
        return False


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        total = hashlib.sha256()
        while block := file.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def _build(cache: Path, entry: Path, package: str, version: str) -> None:
    building = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
    unpacked = building / "unpacked"
    say(f"fetching {package} {version} (about 70 MB)")
    # Ubuntu has the modules in packages of their own.
    others = [package.replace("-image-", part) for part in ("-modules-", "-modules-extra-")]
    for name in [package, *(other for other in others if _run("apt-cache", "search", "--names-only", f"^{other}$"))]:
        apt("download", name, folder=building)
    say("unpacking the kernel, and making its first file system")
    for path in sorted(building.glob("*.deb")):
        _run("dpkg", "-x", str(path), str(unpacked))
        path.unlink()
    if (unpacked / "usr/lib/modules").is_dir():
        (unpacked / "lib").mkdir(exist_ok=True)
        (unpacked / "usr/lib/modules").rename(unpacked / "lib/modules")
    (release,) = (path.name for path in (unpacked / "lib/modules").iterdir())
    (building / "vmlinux").write_bytes(_unpacked_kernel((unpacked / "boot" / f"vmlinuz-{release}").read_bytes()))
    (building / "initrd").write_bytes(_initrd(unpacked, release))
    shutil.rmtree(unpacked)
    manifest = {name: _sum(building / name) for name in ("vmlinux", "initrd")}
    (building / "manifest").write_text(json.dumps(manifest))
    building.rename(entry)
    for old in sorted(cache.glob("linux-image-*"), key=lambda path: path.stat().st_mtime)[:-KEEP]:
        shutil.rmtree(old)


def _unpacked_kernel(packed: bytes) -> bytes:
    """The kernel inside, if xz packed it: an emulated processor takes seconds to unpack it at each boot."""
    at = packed.find(XZ)
    while at >= 0:
        with contextlib.suppress(lzma.LZMAError):
            found = lzma.LZMADecompressor().decompress(packed[at:])
            if found.startswith(b"\x7fELF"):
                return found
        at = packed.find(XZ, at + 1)
    return packed


def _initrd(unpacked: Path, release: str) -> bytes:
    """An archive of busybox, the modules in the order to load them, and the script that starts it all."""
    _run("depmod", "-b", str(unpacked), release)
    files: dict[str, Path] = {}  # without doubles, in order
    for module in MODULES:
        show = ("modprobe", "-d", str(unpacked), "-S", release, "--show-depends", module)
        lines = _run(*show, check=module not in MAY_BE_BUILT_IN).splitlines()
        files |= {
            Path(path).name.split(".")[0]: Path(path) for kind, path, *_ in map(str.split, lines) if kind == "insmod"
        }
    made = archive.Archive()
    for name in ("bin", "modules", "proc", "sys", "dev", "root", "lower", "over"):
        made.folder(name)
    busybox = shutil.which("busybox") or "/bin/busybox"
    made.file("bin/busybox", Path(busybox).read_bytes(), 0o755)
    made.file("init", INIT.read_bytes(), 0o755)
    for name, path in files.items():
        made.file(f"modules/{name}.ko", _unpacked_module(path))
    made.file("modules/order", "".join(f"{name}\n" for name in files).encode())
    return made.finish()


def _unpacked_module(path: Path) -> bytes:
    if path.suffix == ".xz":
        return lzma.decompress(path.read_bytes())
    if path.suffix == ".zst":
        return subprocess.run(["zstd", "-dc", path], check=True, capture_output=True).stdout
    return path.read_bytes()


def _run(*command: str, check: bool = True) -> str:
    """A program's output. Raises `Impossible` with what it said."""
    environment = {**os.environ, "LC_ALL": "C", "PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if check and done.returncode:
        raise Impossible(f"{' '.join(command)} failed: {done.stderr.strip()[-400:]}")
    return done.stdout
