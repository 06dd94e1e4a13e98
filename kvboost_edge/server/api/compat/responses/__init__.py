"""OpenAI's Responses API: items, events, and conversations that the server stores."""
