"""``job.init_process_group``: torch.distributed beside a job, under any launcher, at an address that the job knows."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from tensorwire.addresses import address_text
from tensorwire.control.address import split_address
from tensorwire.device.interfaces import interface_address
from tensorwire.errors import ArgumentError, Unsupported

_OURS = ("rank", "world_size", "store", "init_method")
_DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's own
_BACKLOG = 2048


class ProcessGroup:
    """The default process group of torch.distributed, where this job made it.

    ``address``: the one on which this process listens; ``share`` hands the text of worker 0 to all workers.
    """

    def __init__(self, rank: int, workers: int, address: str, share: Callable[[str | None], str]) -> None:
        self._rank, self._workers, self._address, self._share = rank, workers, address, share
        self._made: Any = None

    def init(self, backend: str, options: Mapping[str, Any]) -> None:
        """Makes it. Nothing is done if it has been made here and is still there."""
        given = [name for name in _OURS if name in options]
        if given:
            raise ArgumentError(
                f"job.init_process_group takes no {', '.join(given)}: the job knows its workers, and where they meet"
            )
        distributed = _distributed()
        if distributed.is_initialized():
            if self._made is distributed.group.WORLD:
                return
            raise ArgumentError(
                "torch.distributed already has a process group: use that one, or call "
                "torch.distributed.destroy_process_group() first"
            )
        store = self._meet(distributed, options.get("timeout", _DEFAULT_TIMEOUT))
        interface = interface_of(self._address)
        if interface is not None:  # gloo would take the address of this machine's name, which may be a loopback one
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        distributed.init_process_group(backend, store=store, rank=self._rank, world_size=self._workers, **options)
        self._made = distributed.group.WORLD
        self._share(None if self._rank else "connected")  # all meet: nobody leaves while another one still connects

    def close(self) -> None:
        """Destroys the group if it was made here and is still there. Idempotent."""
        if self._made is None:
            return
        distributed, made, self._made = _distributed(), self._made, None
        if distributed.is_initialized() and made is distributed.group.WORLD:
            distributed.destroy_process_group()

    def _meet(self, distributed: Any, timeout: timedelta) -> Any:
        """The store where torch's processes find each other; worker 0 serves it, on a free port."""
        if self._rank:
            host, port = split_address(self._share(None))
            return distributed.TCPStore(host, port, is_master=False, timeout=timeout)
        listener = socket.socket(socket.AF_INET6 if ":" in self._address else socket.AF_INET)
        listener.bind((self._address, 0))
        listener.listen(_BACKLOG)
        port = listener.getsockname()[1]
        store = distributed.TCPStore(
            self._address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=timeout,
        )
        self._share(address_text(self._address, port))
        return store


def interface_of(address: str) -> str | None:
    """The name of the interface with that IPv4 address; None where there is none."""
    return next((name for _, name in socket.if_nameindex() if interface_address(name) == address), None)


def _distributed() -> Any:
    try:
        from torch import distributed
    except ImportError:
        raise Unsupported("job.init_process_group needs PyTorch, which is not installed here") from None
    if not distributed.is_available():
        raise Unsupported("job.init_process_group needs a PyTorch that was built with torch.distributed")
    return distributed
