"""The head: catalogue what arrived, consolidate what is complete."""
