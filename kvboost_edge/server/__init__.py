"""HTTP server with OpenAI-compatible and other APIs, metrics and a web page."""
