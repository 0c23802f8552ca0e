"""What changed from one result to another."""
