"""Training: module, optimizer, learning-rate schedules, data."""
