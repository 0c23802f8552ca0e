"""Sessions of ONNX Runtime: options, bindings, and what a model's metadata says."""
