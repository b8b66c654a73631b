"""As LLaMA-Factory 0.9.5's."""

from __future__ import annotations


def main() -> None:
    from llamafactory import launcher

    launcher.launch()
