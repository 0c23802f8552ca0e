"""The time of a step: measured here, carried to a device."""
