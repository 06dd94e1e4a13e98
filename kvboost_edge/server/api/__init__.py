"""The HTTP API: routes, request schemas and their bounds, responses."""
