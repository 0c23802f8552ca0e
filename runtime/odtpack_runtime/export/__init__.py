"""Inference models with trained parameters."""
