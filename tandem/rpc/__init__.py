"""The wire between processes: messages as values, and gRPC behind them."""
