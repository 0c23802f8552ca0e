"""What differentiation and passes both need of a graph: reading, writing, inference."""
