"""A protection domain that registers nothing and keeps account of everything."""

from __future__ import annotations

import errno
import itertools
from dataclasses import dataclass, field


@dataclass(eq=False)
class FakeMR:
    domain: FakeDomain
    addr: int
    length: int
    access: int
    lkey: int
    rkey: int
    closed: bool = False

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True
        self.domain.open.remove(self)


@dataclass
class FakeDomain:
    """``limit``: bytes that may be registered at once; beyond, ``error`` is raised as verbs do."""

    limit: int = 1 << 60
    error: int = errno.ENOMEM
    open: list[FakeMR] = field(default_factory=list)
    made: int = 0
    _keys: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def pinned(self) -> int:
        return sum(mr.length for mr in self.open)

    def reg_mr(self, addr: int, length: int, access: int) -> FakeMR:
        assert length > 0, "no NIC registers empty memory"
        if self.pinned + length > self.limit:
            raise OSError(self.error, "ibv_reg_mr failed")
        key = next(self._keys)
        self.made += 1
        self.open.append(FakeMR(self, addr, length, access, key, key + 1000))
        return self.open[-1]
