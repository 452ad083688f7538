"""What moves a request: stages, ownership, admission, routing, the bridge and the client."""
