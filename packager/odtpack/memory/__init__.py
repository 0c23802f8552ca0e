"""What of a training step is kept, and what is computed again: less memory for a little time."""
