"""Graph passes: one file each."""
