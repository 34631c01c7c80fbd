"""Who may use a deployment, how fast, for how much, and what it used. Knows no HTTP, no tensors and no wire."""
