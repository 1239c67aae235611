"""A subject's weights in the formats of the other engines, made from its Hugging Face checkpoint."""
