"""Every error Tensorwire raises on purpose.

::

    TensorwireError
    ├── ArgumentError (ValueError)      a wrong argument; nothing was changed
    ├── Unsupported (NotImplementedError)  asked for what this version or device cannot do
    │   └── MissingPackage (ImportError)  a package that is not installed: one of an extra
    ├── OutOfMemory (MemoryError)       registered memory that cannot be had, or is above the limit
    ├── DeviceError
    │   ├── RemoteAccessError           the target refused: wrong key, out of range, read-only, closed
    │   ├── RegionClosed                a local region was used after close()
    │   ├── PeerLost (ConnectionError)  the process at the other end is gone
    │   ├── VerbsUnavailable            no RDMA here and now: library, device, port, address or permission is missing
    │   └── WaitTimeout (TimeoutError)  nothing arrived in time; what becomes of the transfer is in the message
    ├── ControlError
    │   ├── AuthenticationError         the other side does not hold the job's secret
    │   ├── ProtocolError               a malformed, oversized or unexpected frame
    │   │   └── AlreadyPublished        the address book has an entry of that name
    │   └── PlanMismatch                processes of one job do not agree on what is transferred
    ├── JobEnded                        the job ended; names the process and the cause
    │   └── WorkerFinished              a worker was done while this one went on with another step
    ├── GradientModified                a gradient changed after it had been pushed
    ├── NonFiniteGradient (RuntimeError)  error_if_nonfinite: gradients have NaN or inf; the step was left out
    ├── ParameterModified               user code changed a parameter that lives in the store
    ├── StepInterrupted (RuntimeError)  an earlier call ended when a part of what it sends had left
    └── NotOnThisWorker (RuntimeError)   a tensor of another worker was read
"""

from __future__ import annotations

__all__ = [
    "AlreadyPublished",
    "ArgumentError",
    "AuthenticationError",
    "ControlError",
    "DeviceError",
    "GradientModified",
    "JobEnded",
    "MissingPackage",
    "NonFiniteGradient",
    "NotOnThisWorker",
    "OutOfMemory",
    "ParameterModified",
    "PeerLost",
    "PlanMismatch",
    "ProtocolError",
    "RegionClosed",
    "RemoteAccessError",
    "StepInterrupted",
    "TensorwireError",
    "Unsupported",
    "VerbsUnavailable",
    "WaitTimeout",
    "WorkerFinished",
]


class TensorwireError(Exception):
    """Base of everything below."""


class ArgumentError(TensorwireError, ValueError):
    """A wrong argument; nothing was changed."""


class Unsupported(TensorwireError, NotImplementedError):
    """Asked for what this version or this device cannot do."""


class MissingPackage(Unsupported, ImportError):
    """A package of an extra is not installed. The message says what to run."""


class OutOfMemory(TensorwireError, MemoryError):
    """Registered memory that cannot be had, or that is above the job's limit."""


class DeviceError(TensorwireError):
    """Something about a transfer."""


class RemoteAccessError(DeviceError):
    """The target refused an operation; its memory is untouched and the channel lives on."""


class RegionClosed(DeviceError):
    """A local region was used after ``close()``."""


class PeerLost(DeviceError, ConnectionError):
    """The process at the other end is gone; outstanding operations did not complete."""


class VerbsUnavailable(DeviceError):
    """This machine or process cannot do RDMA now. The message says what is missing, and what to do about it."""


class WaitTimeout(DeviceError, TimeoutError):
    """Nothing arrived in time. The transfer itself goes on: its memory must not be reused yet."""


class ControlError(TensorwireError):
    """Something about the control connection."""


class AuthenticationError(ControlError):
    """The other side does not hold the job's secret."""


class ProtocolError(ControlError):
    """A malformed, oversized or unexpected frame."""


class AlreadyPublished(ProtocolError):
    """The job's address book already has an entry of that name. What it holds stays."""


class PlanMismatch(ControlError):
    """Processes of one job do not agree on what is transferred."""


class JobEnded(TensorwireError):
    """The job ended. The message names the process and the cause."""


class WorkerFinished(JobEnded):
    """A worker was done while this one went on: give all the same number of steps, or use ``job.uneven()``."""


class GradientModified(TensorwireError):
    """With overlap: a gradient changed, or came a second time, after it had been pushed."""


class NonFiniteGradient(TensorwireError, RuntimeError):
    """With ``error_if_nonfinite``: the gradients' norm is NaN or inf. No worker's parameters have changed."""


class ParameterModified(TensorwireError):
    """User code changed a parameter whose values live in the store."""


class StepInterrupted(TensorwireError, RuntimeError):
    """An earlier call ended when a part of what it sends had left: this worker cannot go on with these parameters."""


class NotOnThisWorker(TensorwireError, RuntimeError):
    """A tensor of another worker was read. The message names both."""
