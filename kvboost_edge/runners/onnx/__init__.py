"""The ONNX runner: decoders with past keys and values, on onnxruntime."""
