"""The native engine: continuous batching over paged KV, for decoders described by configuration."""
