"""OpenAI's API and what goes with it: routes, bodies and their bounds, answers."""
