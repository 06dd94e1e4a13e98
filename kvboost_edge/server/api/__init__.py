"""OpenAI's API: routes, schemas with their bounds, responses."""
