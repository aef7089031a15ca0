"""``python -m tensorwire.launch.server_process``: a server process.

Each store that all workers step through together has a thread; those of keys and rows share the threads of requests.
"""

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
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from tensorwire.control import Cause, Member
from tensorwire.control.names import member_name
from tensorwire.control.settings import failure_times
from tensorwire.errors import JobEnded, PeerLost, TensorwireError, WaitTimeout, WorkerFinished
from tensorwire.launch.admissions import Admissions
from tensorwire.launch.children import on_parent_death
from tensorwire.launch.place import device_choice, grace_seconds, listening_interface, server_threads
from tensorwire.launch.scarce import as_out_of_memory, scarcity
from tensorwire.observe import spans
from tensorwire.store.admission import check_versions
from tensorwire.store.request_server import RequestServer
from tensorwire.store.store_layout import FunctionsSpec, StoreSpec

if TYPE_CHECKING:
    from tensorwire.store.key_server import KeyServer
    from tensorwire.store.request_store import RequestStore
    from tensorwire.store.row_server import RowServer
    from tensorwire.store.server import StoreServer
    from tensorwire.store.server_state import Asks

_Start = Callable[..., None]  # `_start`, in one of the threads of this server
# A worker that left early may have failed; how its process ends says more, once its interpreter has ended.
_SETTLE_SECONDS = 3.0
# How long the job may take to end by itself after a server has lost a worker.
_CAUSE_SECONDS = 60.0
# Servers compute on the CPU. A framework that sees accelerators would make a context on one all the same.
_NO_ACCELERATORS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
# What servers do besides serving stores, by framework: modules with a function `serve`.
_FUNCTIONS = {"tensorflow": "tensorwire.tensorflow.parts_on_servers"}


def _serve_functions(member: Member, name: str, spec: FunctionsSpec) -> None:
    """Serves a framework's functions until their end or the job's."""
    try:
        module = _FUNCTIONS[spec.framework]
        check_versions(spec.versions, module, member.name)
        importlib.import_module(module).serve(member, name)
    except Exception as error:
        _fail(member, error)


def _serve_shards(member: Member, name: str, spec: StoreSpec, admissions: Admissions) -> None:
    """Serves this server's shards of a store, each in a thread, until the end of the store or the job."""
    servers = member.client.welcome.servers
    rest: list[threading.Thread] = []
    first, *others = range(member.index, spec.shards or servers, servers)
    for shard in others:
        _start(rest, f"{name} shard {shard}", _serve_shard, member, name, spec, shard, admissions)
    _serve_shard(member, name, spec, first, admissions)
    for thread in rest:
        thread.join()
    _forget(member, name)


def _forget(member: Member, name: str) -> None:
    """A store is over."""
    if not member.client.ended.is_set():
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


def _fail(member: Member, error: BaseException) -> None:
    """What a server's thread raised ends the job."""
    from tensorwire.store.consensus import Disagreement, Finished

    if isinstance(error, PeerLost) and member.membership.survives and not member.client.ended.wait(_SETTLE_SECONDS):
        member.fail(f"cannot go on, because all have to begin together, or to set values or state: {error}")
    elif isinstance(error, (JobEnded, PeerLost)):
        if not member.client.ended.wait(_CAUSE_SECONDS):  # the job's end has a cause of its own, if it ends
            member.fail(f"stopped: {error}")
    elif isinstance(error, Finished):
        kind = WorkerFinished.__name__
        member.client.fail(Cause(f"worker {error.worker}", error.what, settle=_SETTLE_SECONDS, kind=kind))
    elif isinstance(error, Disagreement):
        member.client.fail(Cause(f"worker {error.worker}", error.what, settle=_SETTLE_SECONDS))
    elif isinstance(error, TensorwireError):
        member.fail(f"stopped: {error}")
    elif why := scarcity(error):
        member.fail(f"stopped: {why}")
    else:
        lines = str(error).splitlines()
        text = "".join(traceback.format_exception(error))
        member.fail(f"raised {type(error).__name__}: {lines[0] if lines else ''}", text)


def _serve_shard(member: Member, name: str, spec: StoreSpec, shard: int, admissions: Admissions) -> None:
    from tensorwire.store.server import StoreServer

    servers = member.client.welcome.servers
    with contextlib.ExitStack() as asks:  # closed when all has been said about an error
        try:
            server = StoreServer(member, name, spec, servers, shard)
            _limit_threads()
            try:
                asks.callback(_asks(member, name, shard, server).close)
                admissions.add(server)
                server.run()
                admissions.remove(server)
            finally:
                server.close()
        except Exception as error:
            _fail(member, error)


def _limit_threads() -> None:
    torch = sys.modules.get("torch")  # some rules do without
    if torch is not None:
        torch.set_num_threads(server_threads(os.environ))


def _asks(member: Member, name: str, shard: int, server: StoreServer | KeyServer | RowServer) -> Asks:
    from tensorwire.store.server_state import Asks

    return Asks(member, name, shard, server.rule, server.at_rest)


def _add(member: Member, name: str, spec: StoreSpec, requests: RequestServer, start: _Start) -> None:
    """Makes a store of keys or rows, or what publishes some, which the threads of requests serve from then on."""
    from tensorwire.store.request_link import store_number

    requests.begin()
    server, close = _publish(member, name, spec, requests) if spec.parts else _make(member, name, spec)

    def end() -> None:
        close()
        _forget(member, name)

    requests.add(store_number(name), server, lambda: start(f"{name} end", end))


def _make(member: Member, name: str, spec: StoreSpec) -> tuple[RequestStore, Callable[[], None]]:
    from tensorwire.store.key_server import KeyServer
    from tensorwire.store.row_server import RowServer

    kind = RowServer if spec.table else KeyServer
    server = kind(member, name, spec, member.client.welcome.servers)
    _limit_threads()
    asks = _asks(member, name, member.index, server)

    def close() -> None:
        server.close()
        asks.close()

    return server, close


def _publish(
    member: Member, name: str, spec: StoreSpec, requests: RequestServer
) -> tuple[RequestStore, Callable[[], None]]:
    from tensorwire.store.published_keys import PublishedKeys
    from tensorwire.store.request_link import store_number

    stores = [requests.store(store_number(part)) for part in spec.parts]
    server = PublishedKeys(member, name, spec, member.client.welcome.servers, stores, partial(_fail, member))
    return server, server.close


def _start(threads: list[threading.Thread], name: str, call: Callable[..., None], *arguments: object) -> None:
    """Runs ``call(*arguments)`` in a thread, one of those that are to end before this process does."""
    thread = threading.Thread(target=call, args=arguments, name=name, daemon=True)
    thread.start()
    threads[:] = [thread, *(each for each in threads if each.is_alive())]


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
    """What worker 0 asks for, and nobody else: it names code that servers import. Any worker may be the first of all
    that are left in a job that survives worker 0."""
    found = member.client.lookup(name, owner="worker" if member.membership.survives else member_name("worker", 0))
    return msgspec.msgpack.decode(found, type=StoreSpec | FunctionsSpec)


def serve(member: Member) -> None:
    """Serves store after store until the job ends."""
    threads: list[threading.Thread] = []
    start = partial(_start, threads)
    requests = RequestServer(member, partial(_fail, member))
    admissions = Admissions(member, partial(_fail, member))
    admissions.add(requests)
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
            try:
                if isinstance(spec, FunctionsSpec):
                    start(name, _serve_functions, member, name, spec)
                elif spec.keys or spec.table or spec.parts:
                    _add(member, name, spec, requests, start)
                else:
                    start(name, _serve_shards, member, name, spec, admissions)
            except RuntimeError as error:
                member.fail(f"stopped: {scarcity(error) or error}")
            except Exception as error:
                _fail(member, error)
    except JobEnded:
        for thread in list(threads):
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
    os.environ.update(_NO_ACCELERATORS)
    address, secret = os.environ["TENSORWIRE_COORDINATOR"], os.environ["TENSORWIRE_SECRET"].encode()
    index = int(os.environ["TENSORWIRE_INDEX"])
    on_parent_death(_leave)
    try:
        interface = listening_interface(address, os.environ)
        server_threads(os.environ)
        lost_after = failure_times(os.environ).silence
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
