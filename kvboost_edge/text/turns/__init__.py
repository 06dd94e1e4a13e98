"""What stands in an assistant's turn: reasoning, an answer, tool calls; learned from the model's
own chat template.
"""
