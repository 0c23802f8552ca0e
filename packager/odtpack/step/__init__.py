"""The step model: forward pass, backward pass and update of the parameters in one graph."""
