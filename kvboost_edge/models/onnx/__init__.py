"""ONNX files: read without the `onnx` package, recognized as decoders, and converted for the native
runner.
"""
