"""HTTP server: OpenAI's API, metrics and a web page over one engine."""
