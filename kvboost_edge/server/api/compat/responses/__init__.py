"""OpenAI's Responses API: items, stream events and stored conversations."""
