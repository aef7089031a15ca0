"""What is here, what would stop a job, and which device a pair of processes would get: ``tensorwire doctor``."""

from tensorwire.doctor.findings import Finding, Section
from tensorwire.doctor.report import examine

__all__ = ["Finding", "Section", "examine"]
