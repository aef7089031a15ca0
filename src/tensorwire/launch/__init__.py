"""Processes and roles: starting them, and finding a script's place in the job."""

from tensorwire.launch.job import Job
from tensorwire.launch.joining import init
from tensorwire.launch.worker import Worker, current_worker

__all__ = ["Job", "Worker", "current_worker", "init"]
