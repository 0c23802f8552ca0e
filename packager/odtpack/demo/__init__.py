"""The network of `odtpack demo`, and a writer of small forward models."""
