"""From a loaded model to the files of a package."""
