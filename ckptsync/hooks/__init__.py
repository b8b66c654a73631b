"""Callbacks inside trainers.  Empty until the hooks land; nothing else may import torch."""
