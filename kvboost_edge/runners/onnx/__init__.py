"""ONNX runner: decoders with past key/value inputs, on onnxruntime."""
