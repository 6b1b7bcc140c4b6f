"""The agent: one process per slot that owns the warm pool, the template and the workers; torch-free."""
