"""Runs what executes a model in a process of its own, with limits of time and memory."""
