"""Tensorwire beside other libraries, over links, and in whole steps of training: ``python -m benchmarks``."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ACTORS = "benchmarks.actors"
# The programs that a benchmark starts import this package, too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
