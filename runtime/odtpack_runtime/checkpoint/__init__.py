"""The checkpoint: its state, its file format, and its place in memory."""
