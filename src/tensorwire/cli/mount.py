"""``tensorwire mount`` and ``tensorwire ls``: a job's folder, for people and for other programs."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING

import click

from tensorwire.errors import ArgumentError
from tensorwire.sizes import size_text
from tensorwire.tables import print_table

if TYPE_CHECKING:
    from tensorwire.files.folder import Folder

_number = click.option(
    "--number", default=0, show_default=True, type=click.IntRange(0), help="Which optimizer or KeyValue with publish=."
)
_timeout = click.option(
    "--timeout", default=60.0, show_default=True, type=click.FloatRange(0), help="Seconds to wait for the job."
)


@click.command(short_help="Show a job's weights and state as files.")
@click.argument("job")
@click.argument("folder", metavar="DIR")
@click.option("--daemon", is_flag=True, help="Return once it is mounted, and go on in the background.")
@click.option("--recover", is_flag=True, help="First take away what a killed or stopped process had mounted on DIR.")
@click.option("--ready", type=int, hidden=True)
@_number
@_timeout
def mount(job: str, folder: str, daemon: bool, recover: bool, ready: int | None, number: int, timeout: float) -> int:
    """Mount the folder of JOB on DIR until the job ends, Ctrl-C, or umount.

    JOB is its name, as job.name has it, or HOST:PORT of its coordinator, as for tensorwire versions. DIR is an empty
    folder, and is made where it is missing. Only you can look into it.

    \b
      tensorwire mount JOB job --daemon
      ls job job/params
      cp job/params/layer.weight.npy .
      tail -f job/control/events
      umount job
    """
    from tensorwire.files.mounting import check_can_mount, find_folder, in_background, say_ready, serve

    check_can_mount()
    at = find_folder(folder, recover=recover)
    if daemon:
        return in_background([job, str(at), "--number", str(number), "--timeout", str(timeout)])
    from tensorwire.files.folder import connect

    with connect(job, number=number, timeout=timeout) as found:
        if ready is None:
            serve(found, at, lambda: print(f"{found.job} is mounted on {at} until the job ends, or Ctrl-C", flush=True))
        else:
            serve(found, at, lambda: say_ready(ready))
    return 0


@click.command(short_help="List a job's folder.")
@click.argument("path", metavar="JOB[/PATH]")
@_number
@_timeout
def ls(path: str, number: int, timeout: float) -> None:
    """List what is in the folder of JOB, or below PATH in it: weights, pushes and state as files.

    JOB is as for tensorwire mount. Files are read by tensorwire.files, by fsspec as tensorwire://JOB/PATH, or in a
    mount.
    """
    from tensorwire.files.folder import connect

    job, _, rest = path.partition("/")
    with connect(job, number=number, timeout=timeout) as folder:
        try:
            rows = list(_rows(folder, rest.strip("/")))
        except OSError as error:
            raise ArgumentError(f"{path}: {error.strerror}") from None
    print_table(("name", "size", "time", "version"), rows, left=(0, 2, 3))


def _rows(folder: Folder, path: str) -> Iterator[tuple[str, str, str, str]]:
    """What is in a folder, or one file."""
    names = folder.listdir(path) if stat.S_ISDIR(folder.stat(path).st_mode) else [""]
    for name in names:
        at = f"{path}/{name}".strip("/")
        try:
            found = folder.lstat(at)
        except FileNotFoundError:
            continue  # a version that has gone meanwhile
        kind = stat.S_IFMT(found.st_mode)
        shown = (name or at) + {stat.S_IFDIR: "/", stat.S_IFLNK: f" -> {folder.realpath(at)}"}.get(kind, "")
        if kind != stat.S_IFREG:
            yield shown, "", "", ""
            continue
        when = datetime.fromtimestamp(found.st_mtime).astimezone()
        yield shown, size_text(found.st_size), f"{when:%Y-%m-%d %H:%M:%S}", str(found.version or "")
