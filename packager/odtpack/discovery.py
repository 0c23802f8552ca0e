"""Finds what has a file of its own: each module of a package declares one class.

Losses and optimizers are found this way, so that a new one is one new file. The names are
those of the files: the command line lists them without importing a module.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.util import find_spec
from typing import TypeVar

T = TypeVar("T")


def module_names(package: str) -> tuple[str, ...]:
    """Names of the modules of a package, sorted; of what it holds nothing is imported."""
    spec = find_spec(package)
    folders = None if spec is None else spec.submodule_search_locations
    return tuple(sorted(found.name for found in pkgutil.iter_modules(folders) if not found.ispkg))


def declared_classes(package: str, base: type[T], attribute: str = "name") -> dict[str, type[T]]:
    """The class that each module of a package declares, by the name of the module."""
    found = {}
    for name in module_names(package):
        module = import_module(f"{package}.{name}")
        declared = [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, base)
            and value.__module__ == module.__name__
            and not getattr(value, "__abstractmethods__", None)
        ]
        if len(declared) != 1 or getattr(declared[0], attribute, None) != name:
            msg = (
                f"{module.__name__} must declare one {base.__name__} whose {attribute} is {name!r}"
            )
            raise TypeError(msg)
        found[name] = declared[0]
    return found
