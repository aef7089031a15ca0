"""Every error Tensorwire raises on purpose.

::

    TensorwireError
    ├── ArgumentError (ValueError)      a wrong argument; nothing was changed
    ├── Unsupported (NotImplementedError)  this version or device does not support the request
    │   └── MissingPackage (ImportError)  a package that is not installed: one of an extra
    ├── OutOfMemory (MemoryError)       registered memory is not available, or would exceed the limit
    ├── DeviceError
    │   ├── RemoteAccessError           the target refused: wrong key, out of range, read-only, closed
    │   ├── RegionClosed                a local region was used after close()
    │   ├── PeerLost (ConnectionError)  the process at the other end is gone
    │   ├── VerbsUnavailable            no RDMA here and now: library, device, port, address or permission is missing
    │   └── WaitTimeout (TimeoutError)  nothing arrived in time; the message says whether the transfer continues
    ├── ControlError
    │   ├── AuthenticationError         the other side does not hold the job's secret
    │   ├── ProtocolError               a malformed, oversized or unexpected frame
    │   │   └── AlreadyPublished        the address book has an entry of that name
    │   └── PlanMismatch                processes of one job disagree on their transfers
    ├── JobEnded                        the job ended; names the process and the cause
    │   └── WorkerFinished              a worker finished while this one took another step
    ├── GradientModified                a gradient changed after it had been pushed
    ├── NonFiniteGradient (RuntimeError)  error_if_nonfinite: gradients have NaN or inf; the step was left out
    ├── ParameterModified               user code changed a parameter that lives in the store
    ├── ChecksumMismatch                what a reader got of a version is not what was published
    ├── VersionExpired                  a reader was silent for too long, and the version that it read is gone
    ├── StepInterrupted (RuntimeError)  an earlier call ended when it was partly sent
    └── NotOnThisWorker (RuntimeError)   a tensor of another worker was read
"""

from __future__ import annotations

__all__ = [
    "AlreadyPublished",
    "ArgumentError",
    "AuthenticationError",
    "ChecksumMismatch",
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
    "VersionExpired",
    "WaitTimeout",
    "WorkerFinished",
]


class TensorwireError(Exception):
    """Base of everything below."""


class ArgumentError(TensorwireError, ValueError):
    """A wrong argument; nothing was changed."""


class Unsupported(TensorwireError, NotImplementedError):
    """This version or this device does not support the request."""


class MissingPackage(Unsupported, ImportError):
    """A package of an extra is not installed. The message says what to run."""


class OutOfMemory(TensorwireError, MemoryError):
    """Registered memory is not available, or would exceed the job's limit."""


class DeviceError(TensorwireError):
    """Base of the errors of transfers."""


class RemoteAccessError(DeviceError):
    """The target refused an operation; its memory is untouched and the channel lives on."""


class RegionClosed(DeviceError):
    """A local region was used after ``close()``."""


class PeerLost(DeviceError, ConnectionError):
    """The process at the other end is gone; outstanding operations did not complete."""


class VerbsUnavailable(DeviceError):
    """This machine or process cannot do RDMA now. The message names the obstacle and the remedy."""


class WaitTimeout(DeviceError, TimeoutError):
    """Nothing arrived in time. The transfer itself goes on: its memory must not be reused yet."""


class ControlError(TensorwireError):
    """Base of the errors of the control connection."""


class AuthenticationError(ControlError):
    """The other side does not hold the job's secret."""


class ProtocolError(ControlError):
    """A malformed, oversized or unexpected frame."""


class AlreadyPublished(ProtocolError):
    """The job's address book already has an entry of that name, which stays unchanged."""


class PlanMismatch(ControlError):
    """Processes of one job disagree on their transfers."""


class JobEnded(TensorwireError):
    """The job ended. The message names the process and the cause."""


class WorkerFinished(JobEnded):
    """A worker finished while this one continued: give all the same number of steps, or use ``job.uneven()``."""


class GradientModified(TensorwireError):
    """With overlap: a gradient changed, or came a second time, after it had been pushed."""


class NonFiniteGradient(TensorwireError, RuntimeError):
    """With ``error_if_nonfinite``: the gradients' norm is NaN or inf. No worker's parameters have changed."""


class ParameterModified(TensorwireError):
    """User code changed a parameter whose values live in the store."""


class ChecksumMismatch(TensorwireError):
    """What a reader got of a version is not what was published. Nothing of it was committed."""


class VersionExpired(TensorwireError):
    """A reader was silent for too long, and the version that it was reading is gone: read a newer one."""


class StepInterrupted(TensorwireError, RuntimeError):
    """An earlier call ended when it was partly sent: this worker cannot continue with these parameters."""


class NotOnThisWorker(TensorwireError, RuntimeError):
    """A tensor of another worker was read. The message names both."""
