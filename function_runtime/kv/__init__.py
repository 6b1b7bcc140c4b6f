"""Durable KV: chunks of key/value memory in an object store, used again only when nothing about them is in doubt."""
