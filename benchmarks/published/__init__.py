"""Published trainings on phones, and what the simulator says of the same networks and devices."""
