"""OpenAI's responses: items in, items out, and conversations that the server remembers."""
