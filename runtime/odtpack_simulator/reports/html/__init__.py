"""Sections of the HTML report."""
