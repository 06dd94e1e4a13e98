"""Text: tokenizers, chat templates, incremental detokenizer, stop strings."""
