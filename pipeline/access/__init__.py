"""API keys of the bridge. What belongs to one HTTP request passes these files in this order:

door      the Authorization header -> a key; keys read again when their file changes
permit    what the caller may do; what it is charged, from the first byte to the last
charge    how many tokens a request is charged before it is known what it uses (pure)
bucket    a limit per minute as a level that drains (pure)
budgets   what each key has used, shared by all bridges of a host
headers   x-ratelimit-*           errors   401 and 429
key       one key (pure)          key_file the TOML file: read, extended, revoked
"""
