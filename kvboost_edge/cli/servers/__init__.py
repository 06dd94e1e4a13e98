"""Commands that query a running server."""
