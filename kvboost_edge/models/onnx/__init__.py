"""ONNX files as models: read without the `onnx` package, recognised as decoders, packed for the
native runner.
"""
