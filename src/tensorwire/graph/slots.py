"""Where in a host's outbox each tensor lies: slots are used again over a step as soon as everyone is done with them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from tensorwire.graph.birth import Aliases, Birth
from tensorwire.graph.causality import walk
from tensorwire.graph.crossing import Crossings
from tensorwire.graph.ir import Graph

ALIGNMENT = 64  # bytes: what vector instructions and TensorFlow ask for
PAGE = 4096
FOREVER = 1 << 62


@dataclass(frozen=True)
class Layout:
    """``at``: the offset of each sent value's memory in its source's outbox. ``nbytes``: of each outbox."""

    at: dict[str, int]
    nbytes: dict[str, int]


@dataclass
class _Tenant:
    """One piece of memory: who lives there, and until when each host uses it."""

    source: str
    begin: int  # the place in the order from which it is filled
    nbytes: int
    names: list[str] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)
    offset: int = 0


def layout(
    graph: Graph, crossing: Crossings, birth: dict[str, Birth], aliases: Aliases, sizes: dict[str, int]
) -> Layout:
    """Places the memory of every value in ``sizes`` (bytes by name; of a born one, those of its root)."""
    tenants = _tenants(graph, crossing, birth, aliases, sizes)
    begins: dict[int, list[_Tenant]] = defaultdict(list)
    for tenant in tenants:
        begins[tenant.begin].append(tenant)
    living: dict[str, list[_Tenant]] = defaultdict(list)  # by outbox, in the order of their offsets
    nbytes = dict.fromkeys(graph.hosts, 0)
    at: dict[str, int] = {}
    for place, knows in walk(graph, crossing):
        for tenant in begins.get(place, ()):
            clock = knows[tenant.source]
            neighbours = [
                other
                for other in living[tenant.source]
                if any(
                    last >= (place if host == tenant.source else clock[host] + 1) for host, last in other.last.items()
                )
            ]
            tenant.offset = _gap(neighbours, tenant.nbytes)
            neighbours.append(tenant)
            neighbours.sort(key=lambda other: other.offset)
            living[tenant.source] = neighbours
            end = tenant.offset + tenant.nbytes
            nbytes[tenant.source] = max(nbytes[tenant.source], end)
            at.update(dict.fromkeys(tenant.names, tenant.offset))
    return Layout(at, {host: _up(size, PAGE) for host, size in nbytes.items()})


def _tenants(
    graph: Graph, crossing: Crossings, birth: dict[str, Birth], aliases: Aliases, sizes: dict[str, int]
) -> list[_Tenant]:
    kept = {output.name for output in graph.outputs}
    users = _last_users(graph, crossing)
    found: dict[tuple[str, str], _Tenant] = {}
    for name, nbytes in sizes.items():
        source, targets = crossing.sent[name]
        born = birth[name].operator
        key = (source, birth[name].root if born else name)
        tenant = found.get(key)
        if tenant is None:
            tenant = found[key] = _Tenant(source, graph.place[born or name], nbytes)
        tenant.nbytes = max(tenant.nbytes, _up(nbytes, ALIGNMENT))
        tenant.names.append(name)
        tenant.last[source] = max(tenant.last.get(source, -1), graph.place[name])
        shared = aliases.shared[aliases.root(name)]
        for host in (*targets, *((source,) if born else ())):
            for other in shared:
                if other in kept and host in crossing.holds[other]:
                    tenant.last[host] = FOREVER
                tenant.last[host] = max(tenant.last.get(host, -1), users.get((other, host), -1))
    return sorted(found.values(), key=lambda tenant: tenant.begin)


def _last_users(graph: Graph, crossing: Crossings) -> dict[tuple[str, str], int]:
    """By value and host, the place of the last operator there that uses it."""
    users: dict[tuple[str, str], int] = {}
    for place, node in enumerate(graph.nodes):
        for host in crossing.runs.get(node.name, ()):
            for name in node.inputs:
                users[name, host] = place
    return users


def _gap(neighbours: list[_Tenant], nbytes: int) -> int:
    """The lowest offset where so many bytes are free."""
    offset = 0
    for other in neighbours:
        if other.offset - offset >= nbytes:
            break
        offset = max(offset, other.offset + other.nbytes)
    return offset


def _up(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to
