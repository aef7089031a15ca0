"""``python -m tensorwire.launch.server_process``: a server process, with a thread per store of its job."""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from tensorwire.control import Cause, Member
from tensorwire.control.names import member_name
from tensorwire.errors import JobEnded, PeerLost, TensorwireError, WaitTimeout, WorkerFinished
from tensorwire.launch.children import on_parent_death
from tensorwire.launch.place import device_choice, grace_seconds, heartbeat, listening_interface, server_threads
from tensorwire.launch.scarce import as_out_of_memory, scarcity
from tensorwire.observe import spans
from tensorwire.store.admission import check_versions
from tensorwire.store.store_layout import FunctionsSpec, StoreSpec

if TYPE_CHECKING:
    from tensorwire.store.key_server import KeyServer
    from tensorwire.store.row_server import RowServer
    from tensorwire.store.server import StoreServer

# A worker that left early may have failed; how its process ends says more, once its interpreter has ended.
_SETTLE_SECONDS = 3.0
# How long the job may take to end by itself after a server has lost a worker.
_CAUSE_SECONDS = 60.0
# What servers do besides serving stores, by framework: modules with a function `serve`.
_FUNCTIONS = {"tensorflow": "tensorwire.tensorflow.parts_on_servers"}


def _serve(member: Member, name: str, spec: StoreSpec | FunctionsSpec) -> None:
    """Serves a store, or whatever the workers want instead, until its end or the job's: each shard in a thread."""
    servers = member.client.welcome.servers
    count = spec.shards if isinstance(spec, StoreSpec) else None
    shards = range(member.index, servers if count is None else count, servers)
    threads = [_started(f"{name} shard {shard}", _serve_shard, member, name, spec, shard) for shard in shards[1:]]
    for shard in shards[:1]:
        _serve_shard(member, name, spec, shard)
    for thread in threads:
        thread.join()
    if isinstance(spec, StoreSpec) and not member.client.ended.is_set():
        member.client.forget(name)
        _collect()


_waits_to_collect, _collecting = threading.Lock(), threading.Lock()


def _collect() -> None:
    """Parts of a store refer to each other, and its memory is not to wait until Python looks for such.

    One that waits for its turn does it for all that come meanwhile.
    """
    if _waits_to_collect.acquire(blocking=False):
        with _collecting:
            _waits_to_collect.release()
            gc.collect()


def _serve_shard(member: Member, name: str, spec: StoreSpec | FunctionsSpec, shard: int) -> None:
    with contextlib.ExitStack() as asks:  # closed when all has been said about an error
        _serve_until_end(member, name, spec, shard, asks)


def _serve_until_end(
    member: Member, name: str, spec: StoreSpec | FunctionsSpec, shard: int, asks: contextlib.ExitStack
) -> None:
    from tensorwire.store.consensus import Disagreement, Finished

    try:
        if isinstance(spec, FunctionsSpec):
            module = _FUNCTIONS[spec.framework]
            check_versions(spec.versions, module, member.name)
            importlib.import_module(module).serve(member, name)
        else:
            _serve_store(member, name, spec, shard, asks)
    except (JobEnded, PeerLost) as error:
        if not member.client.ended.wait(_CAUSE_SECONDS):  # the job's end has a cause of its own, if it ends
            member.fail(f"stopped: {error}")
    except Finished as error:
        kind = WorkerFinished.__name__
        member.client.fail(Cause(f"worker {error.worker}", error.what, settle=_SETTLE_SECONDS, kind=kind))
    except Disagreement as error:
        member.client.fail(Cause(f"worker {error.worker}", error.what, settle=_SETTLE_SECONDS))
    except TensorwireError as error:
        member.fail(f"stopped: {error}")
    except Exception as error:
        if why := scarcity(error):
            member.fail(f"stopped: {why}")
        else:
            lines = str(error).splitlines()
            member.fail(f"raised {type(error).__name__}: {lines[0] if lines else ''}", traceback.format_exc())


def _serve_store(member: Member, name: str, spec: StoreSpec, shard: int, asks: contextlib.ExitStack) -> None:
    from tensorwire.store.server_state import Asks

    server = _server_of(member, name, spec, shard)
    torch = sys.modules.get("torch")  # some rules do without
    if torch is not None:
        torch.set_num_threads(server_threads(os.environ))
    try:
        asks.callback(Asks(member, name, shard, server.rule, server.at_rest).close)
        server.run()
    finally:
        server.close()


def _server_of(member: Member, name: str, spec: StoreSpec, shard: int) -> RowServer | KeyServer | StoreServer:
    workers, servers = member.client.welcome.workers, member.client.welcome.servers
    if spec.table:
        from tensorwire.store.row_server import RowServer

        return RowServer(member, name, spec, workers, servers)
    if spec.keys:
        from tensorwire.store.key_server import KeyServer

        return KeyServer(member, name, spec, workers, servers)
    from tensorwire.store.server import StoreServer

    return StoreServer(member, name, spec, workers, servers, shard)


def _started(name: str, call: Callable[..., None], *arguments: object) -> threading.Thread:
    """A thread that runs ``call(*arguments)``."""
    thread = threading.Thread(target=call, args=arguments, name=name, daemon=True)
    thread.start()
    return thread


def _load_framework(member: Member) -> None:
    """Loads what the workers have loaded, so that their first store does not wait for it."""
    while True:
        try:
            card = member.card("worker 0")
            break
        except WaitTimeout:
            continue
    if "torch" in card.frameworks:
        importlib.import_module("torch")


def _spec(member: Member, name: str) -> StoreSpec | FunctionsSpec:
    """What worker 0 asks for, and nobody else: it names code that servers import."""
    found = member.client.lookup(name, owner=member_name("worker", 0))
    return msgspec.msgpack.decode(found, type=StoreSpec | FunctionsSpec)


def serve(member: Member) -> None:
    """Serves store after store until the job ends."""
    threads: list[threading.Thread] = []
    try:
        _load_framework(member)
        for number in itertools.count():
            name = f"store/{number}"
            while True:
                try:
                    spec = _spec(member, name)
                    break
                except WaitTimeout:
                    continue
                except msgspec.MsgspecError as error:
                    member.fail(f"cannot read what worker 0 wants in {name}: {error}")
                    member.client.ended.wait(_CAUSE_SECONDS)
            threads = [thread for thread in threads if thread.is_alive()]
            try:
                threads.append(_started(name, _serve, member, name, spec))
            except RuntimeError as error:
                member.fail(f"stopped: {scarcity(error) or error}")
    except JobEnded:
        for thread in threads:
            thread.join(10.0)
    except TensorwireError as error:
        member.fail(f"stopped: {error}")


def _leave() -> None:
    """The parent is gone. The job ends by that; a server that then does not leave is ended here."""
    time.sleep(grace_seconds(os.environ))
    os._exit(1)


def main() -> int:
    """Joins the job that the environment names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the group: the workers say what it means
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each call that makes keys takes some
    address, secret = os.environ["TENSORWIRE_COORDINATOR"], os.environ["TENSORWIRE_SECRET"].encode()
    index = int(os.environ["TENSORWIRE_INDEX"])
    on_parent_death(_leave)
    try:
        interface = listening_interface(address, os.environ)
        server_threads(os.environ)
        _, lost_after = heartbeat(os.environ)
        device = device_choice(os.environ)
        with as_out_of_memory():
            member = Member(address, secret, "server", index, device=device, interface=interface, timeout=lost_after)
    except JobEnded:
        return 0  # meanwhile; how, others say
    except PeerLost:
        return 1
    except TensorwireError as error:
        print(f"tensorwire: server {index}: {error}", file=sys.stderr)
        return 1
    serve(member)
    failed = member.client.cause is not None
    spans.write(f"server-{index}")
    member.close(goodbye=not failed)
    return 1 if failed else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a thread that still waits in native code would abort the interpreter's orderly end
