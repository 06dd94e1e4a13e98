"""The HTTP API: routes, request schemas with their bounds, and response writers."""
