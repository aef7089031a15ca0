"""In front of the installed package: the one of this folder, whose native module has sanitizers in it."""

import sys

# An editable install finds its package before sys.path is looked at.
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__name__.startswith("ScikitBuild")]
