"""ONNX files, read without the `onnx` package, recognized as decoders, and packed for the native
runner.
"""
