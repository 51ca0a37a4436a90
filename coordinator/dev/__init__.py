"""The trial: everything on this machine, with simulated GPUs, and nothing left behind."""
