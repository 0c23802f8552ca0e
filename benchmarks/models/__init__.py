"""Trains models that ship inside public packages, and holds each gradient to PyTorch's."""
