"""Commands about training on a device."""
