"""How well predictions agree with measurements, on models that no constant was fitted to."""
