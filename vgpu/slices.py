"""Slice request and slice: the wanted and the granted piece of one GPU, in whole numbers."""

from __future__ import annotations

from msgspec import Struct

from vgpu.inventory import WHOLE_GPU_MILLI


class SliceRequest(Struct, frozen=True, gc=False):
    """What one task wants of each of its `count` GPUs, which are always distinct physical cards.

    `memory_mib` None means all the memory of whichever card it gets. `model` is matched as a case-insensitive
    substring of the GPU's model name, empty for any. `isolation` names a backend, empty lets the node choose.
    """

    count: int = 0
    memory_mib: int | None = None
    compute_milli: int = WHOLE_GPU_MILLI
    model: str = ""
    isolation: str = ""

    @property
    def is_whole(self) -> bool:
        """Whole cards: all memory and all compute, so nobody else is on them."""
        return self.memory_mib is None and self.compute_milli == WHOLE_GPU_MILLI


class Slice(Struct, frozen=True, gc=False):
    """A granted piece of one GPU: 0 < memory_mib <= the GPU's, 0 < compute_milli <= the GPU's."""

    gpu: str
    memory_mib: int
    compute_milli: int
    isolation: str
