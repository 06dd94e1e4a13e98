"""Any decoder in an ONNX file that takes past keys and values, on onnxruntime."""
