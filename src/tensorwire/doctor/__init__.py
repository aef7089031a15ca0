"""``tensorwire doctor``: what this machine has, what would stop a job, and which device two processes would get."""

from tensorwire.doctor.findings import Finding, Section
from tensorwire.doctor.report import examine

__all__ = ["Finding", "Section", "examine"]
