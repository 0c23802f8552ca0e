"""``odtpack cache-key``: a hash of everything that decides a package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def cache_key(
    recipe: Annotated[Path, typer.Option(metavar="recipe.toml", help="Recipe to build by.")],
) -> None:
    """Print the cache key of what a recipe builds, without building it.

    It changes with the recipe's keys that decide the package, the model and its external data,
    and the versions of odtpack, onnx, onnx-ir and onnxruntime.
    """
    from odtpack.recipe import BuildSpec, read_recipe
    from odtpack.recipe import key as keys

    sys.stdout.write(keys.cache_key(BuildSpec.of(read_recipe(recipe))) + "\n")
