"""Ollama's API: chat and generate as JSON lines, options, model listings."""
