"""Formats, pure: containers (``inert``, ``torch_zip``, ``safetensors``) and layouts (``dcp``, ``zero``, ``whole``, ``peft``).

A layout is a module of functions that says how one framework spreads tensors over files; ``layouts`` holds their table.
"""
