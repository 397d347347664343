"""Anything that a user calls a model -> `nn.Module` with inputs -> torch-level FX graphs."""
