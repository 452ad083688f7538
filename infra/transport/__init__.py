"""How KV blocks move between processes: ``shm`` on one host."""
