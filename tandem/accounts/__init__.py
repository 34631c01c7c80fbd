"""API keys, limits, budgets and the ledger of a deployment. Knows no HTTP, no tensors and no wire."""
