"""How a process that is no part of a job finds what the job publishes. Imports no framework."""

from __future__ import annotations

import logging
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tensorwire.control import Member
from tensorwire.control.address import WARN_SECONDS
from tensorwire.control.names import MOST_READERS, READER
from tensorwire.errors import ArgumentError, ProtocolError, WaitTimeout
from tensorwire.launch.place import device_choice, listening_interface
from tensorwire.launch.secret import file_secret
from tensorwire.store.store_layout import StoreSpec
from tensorwire.store.versions.handover import PUBLISHER, Announcement, find_numbered
from tensorwire.store.versions.sources import Files, Leases, Source
from tensorwire.store.versions.version_files import find_job, living_jobs
from tensorwire.store.versions.version_layout import VersionLayout

_log = logging.getLogger("tensorwire")
_TRIES = 8  # of names that another reader may have
_AGAIN = 0.05  # seconds between two looks for a job


@dataclass(frozen=True)
class Published:
    """What a job publishes, for the reader ``member``: the store's ``spec``, and where its versions come from."""

    member: Member
    announcement: Announcement
    spec: StoreSpec
    layout: VersionLayout
    source: Source

    @property
    def store(self) -> str:
        """The store's name."""
        return self.announcement.store

    def close(self) -> None:
        """Leaves the job's readers. Idempotent."""
        self.source.close()
        self.member.close()


def find_published(job: str | None, number: int, timeout: float, *, patient: bool = False) -> Published:
    """As a reader of the job. Arguments and errors: as of `connect`; ``patient``: as of `Leases`."""
    address, secret = _find(job, timeout)
    member = _join(address, secret, timeout)
    try:
        try:
            found = find_numbered(member, number, timeout)
        except WaitTimeout:
            raise WaitTimeout(
                f"the job publishes no versions of number {number} after {timeout:g} s: is the optimizer with publish= "
                "constructed, or publish() of the keys called?"
            ) from None
        spec = msgspec.msgpack.decode(member.client.lookup(found.store, owner="worker"), type=StoreSpec)
        layout = VersionLayout(spec.plan(member.client.welcome.servers), by_bucket=spec.by_bucket)
        source: Source
        if member.channel(PUBLISHER).device.capabilities.maps:
            source = Files(member, found.store, Path(found.folder), layout)
        else:
            source = Leases(member, found.store, layout, timeout, patient=patient)
        return Published(member, found, spec, layout, source)
    except BaseException:
        member.close()
        raise


def _find(job: str | None, timeout: float) -> tuple[str, bytes]:
    """The job's address and secret. One without an address is there once it publishes."""
    if job is not None and ":" in job:
        own = None if "TENSORWIRE_SECRET_FILE" in os.environ else os.environ.get("TENSORWIRE_SECRET")
        return job, (own or file_secret(os.environ)).encode()
    end, warn_at = time.monotonic() + timeout, time.monotonic() + WARN_SECONDS
    while not (there := living_jobs()) or (job is not None and job not in there):
        if time.monotonic() >= end:
            break
        if time.monotonic() >= warn_at:
            _log.warning("no job publishes versions here yet: waiting up to %g s for %s", timeout, job or "one")
            warn_at = end
        time.sleep(_AGAIN)
    if job is not None:
        return find_job(job)
    if len(there) != 1:
        what = f"several jobs publish versions here: {', '.join(there)}" if there else "no job publishes versions here"
        raise ArgumentError(f"{what}: give connect() the name of one, or HOST:PORT of its coordinator")
    return find_job(there[0])


def _join(address: str, secret: bytes, timeout: float) -> Member:
    interface, device = listening_interface(address, os.environ), device_choice(os.environ)
    for last in reversed(range(_TRIES)):
        try:
            index = secrets.randbelow(MOST_READERS)
            return Member(address, secret, READER, index, device=device, interface=interface, timeout=timeout)
        except ProtocolError:
            if not last:
                raise
    raise AssertionError
