"""What a worker keeps of KV beyond its engine: the leases it gave."""
