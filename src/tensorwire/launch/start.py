"""Starts a Tensorwire module as a program that imports nothing from the current folder.

``python -m`` puts the current folder first in ``sys.path``. A file there called ``queue.py`` or ``msgspec.py`` would
run instead of the real module, and in a folder like /tmp it may be another user's. ``python -P`` exists only from 3.11
on, so the interpreter runs this file by its path. As a program it imports only the standard library.
"""

from __future__ import annotations

import sys


def module_command(module: str, *arguments: object, python: str | None = None) -> list[str]:
    """The command line that runs ``module`` as ``__main__``.

    What else is in the import path stays as it is: the installed packages and the user's ``PYTHONPATH``.

    Args:
        module: The module's full name.
        arguments: What it finds in ``sys.argv[1:]``, as text.
        python: The interpreter; by default this one.
    """
    return [python or sys.executable, __file__, module, *map(str, arguments)]


def main() -> None:
    """Runs the module that the command line names."""
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the folder of this file, whose modules are no top-level modules
    import runpy  # not before: from the path as it should be

    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
