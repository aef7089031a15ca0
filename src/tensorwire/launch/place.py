"""The role of this process in the job: by ``tensorwire run``, torchrun, RANK, Slurm, TF_CONFIG, or alone."""

from __future__ import annotations

import logging
import operator
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tensorwire.control.address import split_address
from tensorwire.control.settings import MOST_ON_A_MACHINE, check_count, check_min_workers, seconds, whole
from tensorwire.device.interfaces import interface_address
from tensorwire.device.registry import AUTO
from tensorwire.errors import ArgumentError
from tensorwire.launch.tf_config import read_tf_config

_log = logging.getLogger("tensorwire")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Place:
    """A worker's place. ``starter``: what gave it: run, torchrun, ranks or alone.

    ``rendezvous`` is where the coordinator is (run) or is to be (ranks); None for torchrun, whose store has it, and
    for a process that is alone.
    """

    starter: str
    rank: int
    workers: int
    servers: int
    rendezvous: str | None
    several_machines: bool
    min_workers: int = 0

    @property
    def who(self) -> str:
        """Who started this process, in words."""
        return {
            "run": "started by tensorwire run",
            "torchrun": "started by torchrun",
            "ranks": f"rendezvous {self.rendezvous}",
            "alone": "started alone",
        }[self.starter]

    def __post_init__(self) -> None:
        check_count("the workers of a job", self.workers)
        if not 0 <= self.rank < self.workers:
            raise ArgumentError(f"rank {self.rank} is not one of {self.workers} workers")
        if self.servers < 0:
            raise ArgumentError(f"the number of servers must be 0 or more, not {self.servers}")
        check_count("the servers of a job", self.servers)
        if self.starter != "run":  # each worker starts its share
            check_count("the servers that one worker starts", -(-self.servers // self.workers), MOST_ON_A_MACHINE)


def find_place(
    environment: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    rendezvous: str | None = None,
    servers: int | None = None,
    min_workers: int | None = None,
) -> Place:
    """This process's place; arguments win over the environment. Raises `ArgumentError`."""
    place = _find(environment, rank, world_size, rendezvous, servers)
    least = _count("min_workers", min_workers)
    check_min_workers("init(min_workers=)", least, place.workers)
    return place if least is None else replace(place, min_workers=least)


def _find(
    environment: Mapping[str, str],
    rank: int | None,
    world_size: int | None,
    rendezvous: str | None,
    servers: int | None,
) -> Place:
    given = (rank is not None, world_size is not None, rendezvous is not None)
    if any(given) and not all(given):
        raise ArgumentError("init(rank=, world_size=, rendezvous=) belong together: give all three or none")
    rank, world_size, servers = _count("rank", rank), _count("world_size", world_size), _count("servers", servers)
    if rendezvous is not None and not isinstance(rendezvous, str):
        raise ArgumentError(f"init(rendezvous=) takes the text HOST:PORT, not {rendezvous!r}")
    servers = servers if servers is not None else whole(environment, "TENSORWIRE_SERVERS")
    if rank is not None and world_size is not None and rendezvous is not None:
        return _by_rank(rank, world_size, rendezvous, servers)
    if "TENSORWIRE_COORDINATOR" in environment:
        where = environment["TENSORWIRE_COORDINATOR"]
        mine, workers = _need(environment, "TENSORWIRE_RANK"), _need(environment, "TENSORWIRE_WORKERS")
        return Place("run", mine, workers, _need(environment, "TENSORWIRE_SERVERS"), where, not is_loopback(where))
    if "TORCHELASTIC_RUN_ID" in environment:
        mine, world = _need(environment, "RANK"), _need(environment, "WORLD_SIZE")
        several = _need(environment, "LOCAL_WORLD_SIZE") != world
        return Place("torchrun", mine, world, world if servers is None else servers, None, several)
    if "RANK" in environment and "WORLD_SIZE" in environment:
        where = f"{environment.get('MASTER_ADDR', '127.0.0.1')}:{environment.get('MASTER_PORT', '29500')}"
        return _by_rank(_need(environment, "RANK"), _need(environment, "WORLD_SIZE"), where, servers)
    tasks = whole(environment, "SLURM_NTASKS", 1) if "SLURM_PROCID" in environment else 1
    if tasks != 1 and "SLURM_STEP_ID" in environment:  # without srun, a script of sbatch is task 0 of all, and alone
        mine, world = _need(environment, "SLURM_PROCID"), _need(environment, "SLURM_NTASKS")
        return _by_rank(mine, world, _slurm_rendezvous(environment), servers)
    if (config := read_tf_config(environment.get("TF_CONFIG") or "{}")) is not None:
        mine, addresses = config
        return _by_rank(mine, len(addresses), addresses[0], servers)
    if tasks != 1:
        _log.warning(
            "this process is the only worker: srun did not start it, though Slurm gives the job %s tasks", tasks
        )
    return Place("alone", 0, 1, 1 if servers is None else servers, None, False)


def _count(name: str, given: object) -> int | None:
    """A count that a script gave, which may be of any type."""
    if given is None:
        return None
    try:
        if isinstance(given, bool):
            raise TypeError
        return operator.index(given)  # type: ignore[arg-type]  # numpy's integers, too
    except TypeError:
        raise ArgumentError(f"init({name}=) takes a whole number, not {given!r}") from None


def _by_rank(rank: int, workers: int, rendezvous: str, servers: int | None) -> Place:
    split_address(rendezvous)
    servers = workers if servers is None else servers
    return Place("ranks", rank, workers, servers, rendezvous, not is_loopback(rendezvous))


def _slurm_rendezvous(environment: Mapping[str, str]) -> str:
    if "MASTER_ADDR" in environment:
        host = environment["MASTER_ADDR"]
    elif whole(environment, "SLURM_NNODES", 1) == 1:
        host = "127.0.0.1"
    else:
        raise ArgumentError(
            "Slurm on several nodes: set MASTER_ADDR, e.g. to $(scontrol show hostnames $SLURM_JOB_NODELIST | head -1)"
        )
    port = environment.get("MASTER_PORT") or str(20000 + (whole(environment, "SLURM_JOB_ID", 0) or 0) % 20000)
    return f"{host}:{port}"


def _need(environment: Mapping[str, str], name: str) -> int:
    value = whole(environment, name)
    if value is None:
        raise ArgumentError(f"{name} is not set: it belongs to the variables the launcher gives")
    return value


def is_loopback(address: str) -> bool:
    """Whether ``HOST:PORT`` stays on this machine."""
    host, _ = split_address(address)
    return host in LOOPBACK or host.startswith("127.")


def listening_interface(rendezvous: str | None, environment: Mapping[str, str]) -> str:
    """The address a device should listen on: the interface that routes to the rendezvous.

    ``TENSORWIRE_IFACE`` (an interface's name) overrides. Raises `ArgumentError` if there is no such interface.
    """
    name = environment.get("TENSORWIRE_IFACE")
    if name:
        address = interface_address(name)
        if address is None:
            raise ArgumentError(f"TENSORWIRE_IFACE: no interface {name!r} with an IPv4 address here")
        return address
    if rendezvous is None or is_loopback(rendezvous):
        return "127.0.0.1"
    host, port = split_address(rendezvous)
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as sock:
            sock.connect(where)  # sends nothing: asks the routing table
            return str(sock.getsockname()[0])
    except OSError as error:
        raise ArgumentError(f"there is no route to the rendezvous {rendezvous}: {error}") from None


def grace_seconds(environment: Mapping[str, str]) -> float:
    """``TENSORWIRE_GRACE``: seconds that a process may take to leave by itself after the job failed (5)."""
    return seconds(environment, "TENSORWIRE_GRACE", 5.0)


def server_threads(environment: Mapping[str, str]) -> int:
    """``TENSORWIRE_SERVER_THREADS``: the framework's threads in a server (1). Raises `ArgumentError`."""
    threads = whole(environment, "TENSORWIRE_SERVER_THREADS", 1)
    if threads is None or threads < 1:
        raise ArgumentError(f"TENSORWIRE_SERVER_THREADS must be at least 1, not {threads}")
    check_count("TENSORWIRE_SERVER_THREADS", threads, MOST_ON_A_MACHINE)
    return threads


def device_choice(environment: Mapping[str, str]) -> str:
    """``TENSORWIRE_DEVICE``: auto, or the name of a device."""
    return environment.get("TENSORWIRE_DEVICE", AUTO)


def worker_environment(base: Mapping[str, str], **values: object) -> dict[str, str]:
    """``base`` with ``TENSORWIRE_*`` values."""
    return {**base, **{f"TENSORWIRE_{k.upper()}": str(v) for k, v in values.items()}}
