# SPDX-License-Identifier: Apache-2.0
"""Parameters from and to files: safetensors, GGUF, orbax, flax trees.

`names.py` holds the one table of names, `source.py` places what a file holds
on a mesh, and each format is a file. `load.load_model` picks the format.
"""
