"""Recipes: everything that decides a build, in one file or from the command line.

:mod:`~odtpack.recipe.schema` says what may stand in a recipe, :mod:`~odtpack.recipe.file`
reads one, and :class:`~odtpack.recipe.settings.BuildSettings` is what recipes and options
become. None of them imports onnx, so that a cache key is there at once.
"""

from odtpack.recipe.file import Recipe, read_recipe
from odtpack.recipe.settings import BuildSettings

__all__ = ["BuildSettings", "Recipe", "read_recipe"]
