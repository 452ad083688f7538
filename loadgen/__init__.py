"""The honest client: load generator and benchmarks. Nobody imports this package."""
