"""Lets workers that join a job into the stores that are there already, on a server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from tensorwire.control import Member
from tensorwire.control.membership import Membership


class Joinable(Protocol):
    """A store, or a shard of one, as this module uses it."""

    def incarnation(self, rank: int) -> int | None:
        """That of the worker of a rank with which it shares memory, if there is one."""

    def admit(self, rank: int, incarnation: int) -> None:
        """Lets a worker join; in a thread for that, which may wait. Raises what ends the job."""


class Admissions:
    """``fail``: what becomes of an error."""

    def __init__(self, member: Member, fail: Callable[[BaseException], None]) -> None:
        self._member, self._fail = member, fail
        self._stores: list[Joinable] = []
        self._begun: set[tuple[int, int, int]] = set()  # by store, rank and incarnation
        self._lock = threading.Lock()
        member.on_members(self._change)

    def add(self, store: Joinable) -> None:
        """From now on workers that join the job join that store, too."""
        with self._lock:
            self._stores.append(store)
        self._change(self._member.membership)

    def remove(self, store: Joinable) -> None:
        """It is over."""
        with self._lock:
            self._stores.remove(store)
            self._begun = {each for each in self._begun if each[0] != id(store)}

    def _change(self, membership: Membership) -> None:
        with self._lock:
            found = [
                (store, rank, incarnation)
                for store in self._stores
                for rank, incarnation in membership.workers.items()
                if store.incarnation(rank) != incarnation and (id(store), rank, incarnation) not in self._begun
            ]
            self._begun |= {(id(store), rank, incarnation) for store, rank, incarnation in found}
        for store, rank, incarnation in found:
            name = f"admission of worker {rank}"
            threading.Thread(target=self._admit, args=(store, rank, incarnation), name=name, daemon=True).start()

    def _admit(self, store: Joinable, rank: int, incarnation: int) -> None:
        try:
            store.admit(rank, incarnation)
        except Exception as error:
            self._fail(error)
