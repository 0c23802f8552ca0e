"""Make the Markdown of docstrings that are written in the markup of Sphinx, for mkdocstrings."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":[a-z]+:`~?(?:[\w.]*\.)?([^`]+)`")


class Docstrings(griffe.Extension):
    """Roles become code, and the double colon before a block a single one."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        self._rewrite(pkg)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        self._rewrite(obj)

    def _rewrite(self, obj: griffe.Object) -> None:
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            text = re.sub(r"^(\s*)::$", "", text, flags=re.M)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.M)
