"""Giving back: which checkpoint is meant (``choosing``), what of it a machine wants (``wanted``), and how it lands there whole (``landing``, ``bringing``)."""
