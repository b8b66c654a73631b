"""What tests share: writers of checkpoints, stores and servers with faults, programs to run."""
