"""What the kernel counts: packets of a Soft-RoCE device, bytes of a network card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Counted:
    """Both ways, since the device was made."""

    sent: int
    received: int

    def __sub__(self, before: Counted) -> Counted:
        return Counted(self.sent - before.sent, self.received - before.received)


def rxe_packets(device: str) -> Counted:
    """RoCE packets of a Soft-RoCE device."""
    folder = Path(f"/sys/class/infiniband/{device}/ports/1/hw_counters")
    return Counted(*(int((folder / name).read_text()) for name in ("sent_pkts", "rcvd_pkts")))


def wire_bytes(interface: str) -> Counted:
    """Bytes of all packets of a network card, heads included."""
    folder = Path(f"/sys/class/net/{interface}/statistics")
    return Counted(*(int((folder / name).read_text()) for name in ("tx_bytes", "rx_bytes")))
