"""API keys, limits, budgets and the ledger of a deployment. Independent of HTTP, tensors and the RPC format."""
