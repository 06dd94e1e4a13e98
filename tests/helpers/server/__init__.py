"""Live servers, request bodies, scripted models and browsers."""
