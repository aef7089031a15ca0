"""A job as a folder: versions and parameters as files, pushes by writing, and what the job does as text.

::

    with tw.files.open("JOB/params/layer.weight") as file:
        file.readinto(array)

`open` opens one file. `connect` returns the whole folder. ``tensorwire mount`` shows it to other programs, and
``fsspec`` opens ``tensorwire://JOB/...``.
"""

from __future__ import annotations

from tensorwire.files.folder import Folder, connect, open
from tensorwire.files.push_file import PushFile
from tensorwire.files.tree import Status
from tensorwire.files.version_file import VersionFile

__all__ = ["Folder", "PushFile", "Status", "VersionFile", "connect", "open"]
