"""What is left of a node is worth what the mix of jobs could still pay for it; a job goes where the least worth is lost.

    worth(node) = price of its model x min over CPU prices q of
                  ( q x CPU left + sum over broken GPUs of value_q(what is left) + whole_q(number of whole GPUs) )

`value_q` and `whole_q` say how much the mix would pay for a piece of a GPU and for so many whole ones, if a
thousandth of a core cost q; the least of the bounds is the tightest (a Lagrangian bound of packing the node with the
mix under its own CPU), so a node that is short of CPU finds a high price of CPU. `coordinator.prices` makes these
tables from what tenants submit. They are whole numbers, so that a score is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen
from msgspec import Struct

from coordinator.nodes import Row
from vgpu.inventory import WHOLE_GPU_MILLI
from vgpu.slices import SliceRequest

# A whole GPU is worth so many units; scores are in thousandths of a GPU.
GPU_UNITS = 10**9
SCORE_UNITS = GPU_UNITS // 1000
# Compute is looked at in steps of 1 %.
STEP_MILLI = 10
STEPS = WHOLE_GPU_MILLI // STEP_MILLI

Values = tuple[tuple[int, ...], ...]


class Kind(Struct, frozen=True, cache_hash=True, gc=False):
    """Tasks that are alike to the prices. `memory_mib` None: all of the card's."""

    cpu_milli: int
    compute_milli: int
    memory_mib: int | None
    gpus: int
    model: str


def kind_of(request: SliceRequest, cpu_milli: int) -> Kind:
    if not request.count:
        return Kind(cpu_milli, 0, 0, 0, "")
    return Kind(cpu_milli, request.compute_milli, request.memory_mib, request.count, request.model.lower())


@frozen(eq=False)
class Worth:
    """Prices of one moment. `cpu` are the prices of a thousandth of a core; for each of them `values[q][r][m]` is what
    `r` steps of compute with `m` steps of memory of one GPU are worth, `whole[q][f]` what `f` whole GPUs are worth.
    `models` are prices of models in thousandths; a model that is not named costs 1000. With a single step of memory
    the mix never runs out of memory before compute, and only compute counts."""

    cpu: tuple[int, ...]
    values: tuple[Values, ...]
    whole: tuple[tuple[int, ...], ...]
    memory_step_mib: int
    models: Mapping[str, int] = field(factory=dict)

    @property
    def memory_steps(self) -> int:
        return len(self.values[0][0]) - 1

    def model_price(self, row: Row) -> int:
        """A node without GPUs is worth nothing: whoever needs no GPU is sent there first."""
        kinds = row.build.gpus
        return self.models.get(kinds[0].model, 1000) if kinds else 0

    def of(self, row: Row) -> int:
        """In units; see the module. MIG instances are no pieces that could be cut, so they do not count."""
        price = self.model_price(row)
        if price == 0:
            return 0
        idle, broken = 0, []
        for gpu, (kind, piece) in enumerate(zip(row.build.gpus, row.pieces, strict=True)):
            if kind.is_mig_instance:
                continue
            if row.is_idle(gpu):
                idle += 1
            elif piece.memory_mib > 0 and piece.compute_milli > 0:
                broken.append((self._steps(piece.compute_milli), self._memory_steps(piece.memory_mib)))
        idle = min(idle, len(self.whole[0]) - 1)
        bounds = (
            price_of_cpu * row.cpu_milli + sum(values[r][m] for r, m in broken) + whole[idle]
            for price_of_cpu, values, whole in zip(self.cpu, self.values, self.whole, strict=True)
        )
        return price * min(bounds) // 1000

    def loss(self, before: Row, after: Row) -> int:
        """In thousandths of a GPU, rounded to the nearest."""
        return (self.of(before) - self.of(after) + SCORE_UNITS // 2) // SCORE_UNITS

    def _steps(self, compute_milli: int) -> int:
        return min(compute_milli // STEP_MILLI, STEPS)

    def _memory_steps(self, memory_mib: int) -> int:
        return min(memory_mib // self.memory_step_mib, self.memory_steps) if self.memory_steps else 0
