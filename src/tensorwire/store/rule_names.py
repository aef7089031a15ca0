"""The names of rules, and the files of the modules that import paths name. Imports none of them.

A rule is a torch optimizer's name, one of a few words, or an import path ``package.module:name`` of another optimizer's
class or of a function.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

from tensorwire.errors import ArgumentError

# Update each element from its own history alone: a cut tensor gives the same bits (tested one by one).
ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
# Look at a tensor as a whole: never cut.
WHOLE = ("Adafactor", "Muon")
KEEP = "none"  # the rule that changes nothing
SUM = "sum"  # adds what is pushed to the parameters
MEAN = "mean"  # the parameters become the mean of what is pushed
ASSIGN = "assign"  # the parameters become what is pushed
ELASTIC = "elastic"  # the parameters move towards what is pushed, by a share of the difference


def is_foreign(rule: str) -> bool:
    """Whether a rule is an import path."""
    return ":" in rule


def check_path(rule: str) -> None:
    """Raises `ArgumentError` for what is no import path."""
    module, _, name = rule.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ArgumentError(f"an import path is 'package.module:name', not {rule!r:.100}")


def no_rule(rule: str) -> ArgumentError:
    """The error for a name that no rule has."""
    names = ", ".join((SUM, MEAN, ASSIGN, *ELEMENTWISE, *WHOLE))
    return ArgumentError(f"there is no rule {rule!r:.100}; there are {names}, and import paths 'package.module:name'")


def module_file(module: str) -> Path | None:
    """The file that this process has imported a module from, or would import it from; None where it finds none."""
    if module in sys.modules:
        return file_of(module)
    place, spec, name = None, None, ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        finders = (finder.find_spec(name, place) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next(filter(None, finders), None)
        if spec is None:
            return None
        place = list(spec.submodule_search_locations or ())
    return Path(spec.origin).absolute() if spec is not None and spec.has_location and spec.origin else None


def file_of(module: str) -> Path | None:
    """The file of a module that has been imported."""
    name = getattr(sys.modules.get(module), "__file__", None)
    return Path(name).absolute() if name else None


def hash_of(file: Path) -> str:
    """The hash of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def hashes_of(modules: Iterable[str]) -> dict[str, str]:
    """The hashes of the files of modules and of the packages that they are in, as far as they have one."""
    found = {}
    for module in modules:
        parts = module.split(".")
        for name in (".".join(parts[: n + 1]) for n in range(len(parts))):
            file = module_file(name)
            if file is not None and file.is_file():
                found[name] = hash_of(file)
    return found


def folders_with(files: Iterable[Path | None]) -> list[str]:
    """The entries of `sys.path` in which these files of top-level modules lie, and that of the script."""
    found = []
    for file in (*files, file_of("__main__")):
        if file is not None:
            found.append(file.parent.parent if file.name == "__init__.py" else file.parent)
    known = {Path(entry).absolute() for entry in sys.path}
    return [str(folder) for folder in dict.fromkeys(found) if folder in known]
