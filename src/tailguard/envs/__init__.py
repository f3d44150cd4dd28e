"""Environments: batched tensors on one device, and adapters from and to Gymnasium."""
