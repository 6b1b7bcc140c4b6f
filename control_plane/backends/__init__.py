"""Where slots come from: this machine now, a cluster behind the same face."""
