"""How well predictions agree with measurements, on held-out models."""
