"""The HTTP server: OpenAI-compatible and other APIs, metrics and a web page."""
