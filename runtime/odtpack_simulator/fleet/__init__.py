"""Federated training of a package by a fleet of simulated devices on a virtual clock."""
