"""ONNX files: read without the `onnx` package, recognized as decoders, packed for the native
runner.
"""
