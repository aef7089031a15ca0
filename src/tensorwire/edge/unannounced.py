"""Writes that no word announces: something else tells the peer of them, once they have arrived."""

from __future__ import annotations

from collections import deque

from tensorwire.device import Channel, Completion, RemoteView, View


class Writes:
    """Writes over one channel, of which any number are under way."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._under_way: deque[Completion] = deque()

    def begin(self, local: View, remote: RemoteView) -> None:
        """Puts ``local`` into the peer's memory; its bytes must not change before ``wait`` returns.

        Raises:
            PeerLost, WaitTimeout: The peer is gone, or the channel stayed full; the write has not begun.
        """
        self._under_way.append(self._channel.write(local, remote))

    def wait(self, timeout: float) -> None:
        """Returns when all have arrived.

        Args:
            timeout: Seconds to wait for the next one.

        Raises:
            PeerLost, RemoteAccessError: One has failed.
            WaitTimeout: One goes on. ``wait`` again.
        """
        while self._under_way:
            self._under_way[0].wait(timeout)
            self._under_way.popleft()
