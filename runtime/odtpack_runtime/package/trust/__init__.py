"""Whether a package may be used: who signed it, which release it is, what it may ask for."""
