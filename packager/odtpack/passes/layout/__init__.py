"""Passes that choose in which order of axes values lie in memory."""
