"""What a power cut may leave of a save: recorded calls, replayed as folders."""
