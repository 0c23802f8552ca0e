"""Recipes: everything that decides a build, in one file.

:mod:`~odtpack.recipe.schema` says what may stand in a recipe and reads one, and
:class:`~odtpack.spec.BuildSpec` is what recipes and options become. Neither imports onnx, so that a
cache key is there at once.
"""

from odtpack.recipe.schema import Recipe, read_recipe
from odtpack.spec import BuildSpec

__all__ = ["BuildSpec", "Recipe", "read_recipe"]
