"""The parts of a plan of memory: sessions, their runs, and what lies around them."""
