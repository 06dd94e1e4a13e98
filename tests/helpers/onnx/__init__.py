"""Writers of ONNX files, without the `onnx` package."""
