"""``tensorwire doctor``: this machine's equipment, obstacles to a job, and the device of two processes."""

from tensorwire.doctor.findings import Finding, Section
from tensorwire.doctor.report import examine

__all__ = ["Finding", "Section", "examine"]
