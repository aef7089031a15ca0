"""The page docs/api.md lists what is public, all of it and nothing else."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.test_public_names import PUBLIC, members

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
NOT_LISTED = {"__version__", "errors"}  # the module errors has a section of its own
# Modules that a single block of the page lists, with all that their classes show.
WHOLE = {"tensorwire.edge", "tensorwire.errors", "tensorwire.graph"}


def blocks() -> dict[str, list[str]]:
    """By path, the members that the page asks for."""
    found = {}
    for path, options in re.findall(r"^::: (\S+)\n((?:    .*\n)*)", PAGE.read_text(), re.M):
        listed = re.search(r"members:(?: \[(.*)\]|((?:\n +- \w+)*))", options)
        found[path] = [] if listed is None else re.findall(r"\w+", listed[1] or listed[2] or "")
    return found


BLOCKS = blocks()


def module_of(path: str) -> str:
    return max((module for module in PUBLIC if f"{path}.".startswith(f"{module}.")), key=len)


def listed(module: str) -> list[str]:
    if module in WHOLE:
        return BLOCKS[module]
    return [path.rpartition(".")[2] for path in BLOCKS if module_of(path) == module]


def test_every_block_is_of_a_public_module() -> None:
    assert {module_of(path) for path in BLOCKS} == set(PUBLIC)


@pytest.mark.parametrize("module", PUBLIC)
def test_the_page_lists_the_public_names_of_each_module(module: str) -> None:
    assert sorted(listed(module)) == sorted(PUBLIC[module] - NOT_LISTED)


def own_members(shown: type) -> set[str]:
    """The public names that a class adds to those of the classes it inherits from, as far as these are on the page."""
    names = set(vars(shown)) if is_native(shown) else members(shown)
    for base in shown.__mro__[1:]:  # of a class that nobody sees, what it has is this one's
        if base.__module__.startswith(("tensorwire.keyvalue", "tensorwire.files")):
            names |= members(base)
    bases = [base for base in shown.__mro__[1:] if base in CLASSES.values()]
    theirs = {name for base in bases for name in {*vars(base), *described(base)}}
    return {name for name in names - theirs if not name.startswith("_")}


def is_native(shown: type) -> bool:
    return shown.__module__ == "tensorwire._native"


def described(shown: Any) -> set[str]:
    """The names in the sections Args and Attributes of a docstring."""
    sections = re.findall(r"^(?:Args|Attributes):\n((?:    .*\n|\n)*)", f"{inspect.getdoc(shown)}\n", re.M)
    return {name for section in sections for name in re.findall(r"^    \*{0,2}(\w+)[^:\n]*:", section, re.M)}


# Users get objects of these classes from functions, so the page does not show their constructors.
FACTORY_MADE = set(re.findall(r"^::: (\S+)\n(?:    .*\n)*?      merge_init_into_class: false$", PAGE.read_text(), re.M))


def is_data(shown: type, name: str) -> bool:
    value: Any = inspect.getattr_static(shown, name, None)
    return not (callable(value) or isinstance(value, (property, classmethod, staticmethod)))


CLASSES = {
    path: getattr(importlib.import_module(module_of(path)), path.rpartition(".")[2])
    for path in BLOCKS
    if module_of(path) not in WHOLE and path.rpartition(".")[2][0].isupper()
}


@pytest.mark.parametrize("path", CLASSES)
def test_the_page_shows_the_public_members_of_each_class(path: str) -> None:
    """Methods and properties are listed; data is described in the class's docstring; bases show what is theirs."""
    shown = CLASSES[path]
    own = own_members(shown)
    data = {name for name in own if not is_native(shown) and is_data(shown, name)}
    assert set(BLOCKS[path]) == own - data
    assert data - described(shown) == set(), "not in the docstring's sections Args and Attributes"


@pytest.mark.parametrize("path", [path for path in BLOCKS if path not in PUBLIC])
def test_parameters_have_a_table(path: str) -> None:
    """Every parameter of a public function, method or constructor is in the section Args of its docstring."""
    shown = getattr(importlib.import_module(module_of(path)), path.rpartition(".")[2])
    functions = {shown: shown} if inspect.isfunction(shown) else {}
    if inspect.isclass(shown):
        functions = {f: f for name in BLOCKS[path] if inspect.isfunction(f := inspect.getattr_static(shown, name))}
        if "__init__" in vars(shown) and path not in FACTORY_MADE and not is_dataclass(shown):
            functions[shown.__init__] = shown
    for function, documented in functions.items():
        parameters = {name for name in inspect.signature(function).parameters if name != "self"}
        assert parameters - described(documented) == set(), function.__qualname__
