"""ONNX Runtime's own formats: ORT models, operator configurations, reduced builds."""
