"""What travels on the bus, grouped by who receives it.

    requests   admission        prefill  prefill workers     tokens   readers
    kv         router, leases   decode   decode workers      control  everybody
    models     the registry     headers  every stage         errors   clients

``subjects`` says where, ``codec`` how. Nothing here does I/O.
"""
