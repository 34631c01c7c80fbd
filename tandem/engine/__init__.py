"""The engine: serves requests from one model. One thread schedules steps, computes them and emits the tokens."""
