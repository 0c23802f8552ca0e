"""Packages in the field: differences, compatibility, signatures, installation, updates."""
