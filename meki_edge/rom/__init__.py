"""The ROM file: a safetensors profile with one row a token id (``docs/rom-format.md``)."""
