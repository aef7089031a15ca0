"""Processes and roles: who starts what, and how a script finds its place in the job."""

from tensorwire.launch.job import Job, current, init

__all__ = ["Job", "current", "init"]
