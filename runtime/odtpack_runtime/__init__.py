"""odtpack_runtime: train a package on stock ONNX Runtime."""
