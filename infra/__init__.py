"""What carries messages and processes: bus, transports, configuration, logs, metrics, the CLI."""
