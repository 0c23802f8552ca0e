"""Drawings as scalable vector graphics."""
