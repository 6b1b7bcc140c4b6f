"""The `stoker` command: thin over the HTTP surface, except for `up`, `down` and `demo`, which act on this machine."""
