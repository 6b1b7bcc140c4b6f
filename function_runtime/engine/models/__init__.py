"""Decoders, each one definition driven by configuration."""
