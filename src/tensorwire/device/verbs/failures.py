"""The status of a failed work request, in words and as an error."""

from __future__ import annotations

from typing import Any

from tensorwire.errors import DeviceError, RemoteAccessError


def refusal(ib: Any, status: int) -> Exception | None:
    """The error of an operation that one of the two NICs refused; None if the status says something else.

    The target's memory is as it was, and the queue pair stops working.
    """
    code = ib.WCStatus
    there = {
        code.REM_INV_REQ_ERR: "an invalid request",
        code.REM_ACCESS_ERR: "no open region has that key, or out of its range, or it is read-only",
        code.REM_OP_ERR: "it failed there",
    }
    here = {
        code.LOC_LEN_ERR: "length",
        code.LOC_PROT_ERR: "protection of the local memory",
        code.LOC_ACCESS_ERR: "access",
    }
    if status in there:
        return RemoteAccessError(f"verbs: the target refused: {there[status]}")
    if status in here:
        return DeviceError(f"verbs: this NIC refused its own memory ({here[status]}): was it freed?")
    return None


def loss(ib: Any, status: int) -> str:
    """Why the peer of a queue pair is lost, of whose requests one failed with ``status``."""
    code = ib.WCStatus
    if status == code.RETRY_EXC_ERR:
        return "its NIC does not answer: it, its machine or the link is gone"
    if status == code.LOC_QP_OP_ERR:
        return "this machine's own port sends nothing: is it down?"
    name = code(status).name if status in iter(code) else str(status)
    return f"the queue pair failed with {name} (IBV_WC_*)"
