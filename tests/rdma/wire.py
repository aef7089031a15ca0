"""How a guest's Soft-RoCE devices are wired: shell commands that run in it before everything else."""

from __future__ import annotations

MTU = 4500  # room for RDMA's largest packets: 4,096 bytes and the heads
ADDRESSES = ("10.5.0.1", "10.5.0.2")  # of rxa and rxb, in one guest
FAR = ("10.77.0.1", "10.77.0.2")  # of rxe0, in the first and the second of two guests

# Two devices in one guest. Both ends of a veth pair are this host's own, so left to itself the kernel would deliver
# at once; the rules make packets from one to the other leave by the wire. Network namespaces will not do: Soft-RoCE
# opens its sockets in the first one.
BOTH = f"""
a={ADDRESSES[0]} b={ADDRESSES[1]}
ip link add va mtu {MTU} type veth peer name vb mtu {MTU}
for end in va vb all; do
    echo 1 >/proc/sys/net/ipv4/conf/$end/accept_local; echo 0 >/proc/sys/net/ipv4/conf/$end/rp_filter
done
ip address add $a/32 dev va; ip address add $b/32 dev vb
ip link set va up; ip link set vb up
ip neighbour replace $b lladdr $(cat /sys/class/net/vb/address) dev va nud permanent
ip neighbour replace $a lladdr $(cat /sys/class/net/va/address) dev vb nud permanent
ip route add $b/32 dev va table 101; ip route add $a/32 dev vb table 102
ip rule add pref 10 lookup local
ip rule add pref 1 iif lo from $a to $b lookup 101
ip rule add pref 2 iif lo from $b to $a lookup 102
ip rule del pref 0
rdma link add rxa type rxe netdev va
rdma link add rxb type rxe netdev vb
"""


def one_of_two(number: int) -> str:
    """One device, ``rxe0``, on the network card that leads to the other guest; ``number`` is 0 or 1."""
    return f"""
ip link set eth0 mtu {MTU}
ip address add {FAR[number]}/24 dev eth0
ip link set eth0 up
rdma link add rxe0 type rxe netdev eth0
"""
