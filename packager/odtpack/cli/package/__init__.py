"""Commands about a package."""
