"""Models that hold one stretch of a network each, so that memory does not grow with its depth."""
