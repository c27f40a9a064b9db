"""Plans: which strategy, which cut, which devices; what it will take, and why."""
