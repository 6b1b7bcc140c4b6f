"""The slot: agent, template, workers, engine and durable KV. `function_runtime.protocol` is its torch-free face."""
