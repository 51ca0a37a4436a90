"""The whole system on one virtual clock and one seed, with faults at every step; see `__main__`."""
