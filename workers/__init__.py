"""What computes: the worker service, the engine and its KV pool. The only home of torch."""
