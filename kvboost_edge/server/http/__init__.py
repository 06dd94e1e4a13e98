"""HTTP layer: protocol with deadlines, host checks, API keys, headers and the web page's files."""
