"""As much of LLaMA-Factory as `ckptsync-llamafactory` needs: its modules, and what they name."""
