"""The whole training on a device, on a virtual clock."""
