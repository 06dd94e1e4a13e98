"""Ollama's chat and generate: JSON lines, options, and the model as its own clients list it."""
