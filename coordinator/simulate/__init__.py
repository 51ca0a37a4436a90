"""Replays of traces with a virtual clock: on the core itself, and on a pool of whole GPUs where speed matters."""
