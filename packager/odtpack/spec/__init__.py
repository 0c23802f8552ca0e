"""The fields of what a build is asked for: :class:`odtpack.build_spec.BuildSpec` has them all.

These modules import nothing large, for the command line; their annotations are types, not text.
"""
