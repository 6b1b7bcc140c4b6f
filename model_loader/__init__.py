"""Bytes to tensors: sources, checkpoint identity, formats, prepared forms and the warm pool of a slot."""
