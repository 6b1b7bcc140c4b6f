"""The OpenAI-compatible face: authentication, parsing, prompts, events, and what a reader gets back."""
