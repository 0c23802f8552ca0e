"""The memory plan: what ONNX Runtime allocates for a graph, and when."""
