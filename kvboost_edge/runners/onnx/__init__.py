"""ONNX runner: runs decoders with past key/value inputs on onnxruntime."""
