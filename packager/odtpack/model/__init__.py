"""The user's model: where it comes from, how exporters write it, and loading it."""
