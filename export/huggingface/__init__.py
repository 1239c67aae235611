"""MarianMT checkpoints in Hugging Face's format, the one that OPUS-MT's models come in: read, and written.

`transformers` is not needed for either.
"""
