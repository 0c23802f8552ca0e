"""Where the bytes of a package go."""
