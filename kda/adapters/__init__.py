"""Doors to other libraries: torch, fla, transformers. Each is imported by name; `import kda` brings none of them."""
