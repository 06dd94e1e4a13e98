"""Assistant turns: reasoning, content and tool calls, by the model's chat template."""
