"""Independent implementations of whole models, in float64 or by transformers."""
