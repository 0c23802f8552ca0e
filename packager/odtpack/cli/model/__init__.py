"""Commands about a forward model."""
