"""Gateway, APIs, control loop, journal and ledger. Imports no torch; any copy of it can be killed."""
