"""Ollama's API: chat and generate with JSON lines, and model listings."""
