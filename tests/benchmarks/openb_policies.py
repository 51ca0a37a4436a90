"""The published policies of the openb experiment, compiled: who is placed, and what is left of the nodes.

Scores are whole numbers, higher is better; ties go to the first node. A fraction goes to the GPU that fits tightest
unless the policy says otherwise, whole GPUs are the free ones of the lowest index. `a` is the compute that is left of
a node. Constants 128,000 (cores) and 8,000 (GPUs) are the experiment's.

    random          any node that fits, any GPU of it that fits
    dotprod         100 (1 - (cpu left x cpu + a x asked) / 2), each as a part of the constants
    gpu_clustering  full nodes first, before that those that run pods of the same size
    gpu_packing     GPUs in use, then free GPUs of nodes in use, then empty nodes
    bestfit         100 (1 - what would be left / 2)
    fgd             100 sigmoid(fragmentation before - after), fragmentation being what a typical pod cannot use
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tests.benchmarks.openb import Run, typical

POLICIES = ("random", "dotprod", "gpu_clustering", "gpu_packing", "bestfit", "fgd")
_CPU, _GPU = 128_000.0, 8_000.0


def placed_by(policy: str, run: Run, seed: int) -> tuple[NDArray[np.bool_], float]:
    """(whether each pod was placed, the fragmentation that is left in % of all GPUs)."""
    kinds = sorted({pod.kind for pod in run.pods})
    number = {kind: n for n, kind in enumerate(kinds)}
    models = [node.model for node in run.nodes]
    pods = {pod.kind: pod for pod in run.pods}
    access = np.array([[pods[kind].runs_on(model) for model in models] for kind in kinds])
    cpu = np.array([node.cpu_milli for node in run.nodes], np.int64)
    memory = np.array([node.memory_mib for node in run.nodes], np.int64)
    gpus = np.array([[1000 * (d < node.gpus) for d in range(8)] for node in run.nodes], np.int64)
    counts = np.array([node.gpus for node in run.nodes], np.int64)
    table = np.array([kind[:3] for kind in kinds], np.int64)
    stream = np.array([(number[pod.kind], pod.memory_mib) for pod in run.pods], np.int64)
    draws = np.random.default_rng(seed + 1_000_003).random((len(run.pods), 2))
    usual = _Typical(run, models)
    placed = _simulate(
        POLICIES.index(policy), cpu, memory, gpus, counts, table, access, stream, draws,
        usual.sizes, usual.kinds, usual.shares, usual.access,
    )  # fmt: skip
    return placed, usual.fragmentation(run, cpu, gpus)


def fragmentation(run: Run, cpu: NDArray[np.int64], gpus: NDArray[np.int64]) -> float:
    """What typical pods cannot use, in % of all GPUs."""
    return _Typical(run, [node.model for node in run.nodes]).fragmentation(run, cpu, gpus)


class _Typical:
    def __init__(self, run: Run, models: list[str]) -> None:
        usual = typical(run.originals)
        sizes = sorted({kind[1] for kind, _ in usual if kind[1]})
        self.sizes = np.array(sizes, np.int64)
        self.kinds = np.array(
            [(cpu, gpus, sizes.index(milli) if milli else -1) for (cpu, milli, gpus, _), _ in usual], np.int64
        )
        self.shares = np.array([share for _, share in usual])
        self.access = np.array(
            [[not kind[3] or model in kind[3].split("|") for kind, _ in usual] for model in models]
        )

    def fragmentation(self, run: Run, cpu: NDArray[np.int64], gpus: NDArray[np.int64]) -> float:
        total = sum(
            _frag(cpu[n], gpus[n], self.sizes, self.kinds, self.shares, self.access[n])
            for n in range(len(cpu))
        )
        return 100 * total / run.capacity_milli


@njit(cache=True)
def _frag(cpu, gpus, sizes, kinds, shares, access):
    left = gpus.sum()
    fitting = np.zeros(len(sizes), np.int64)
    small = np.zeros(len(sizes), np.int64)
    for u in range(len(sizes)):
        for d in range(8):
            if gpus[d] >= sizes[u]:
                fitting[u] += 1
            else:
                small[u] += gpus[d]
    frag = 0.0
    for m in range(len(kinds)):
        u = kinds[m, 2]
        if u >= 0 and access[m] and cpu >= kinds[m, 0] and fitting[u] >= kinds[m, 1]:
            frag += shares[m] * small[u]
        else:
            frag += shares[m] * left
    return frag


@njit(cache=True)
def _tag(milli, want):
    return 0 if milli < 1000 else want


@njit(cache=True)
def _fgd(before, cpu, gpus, milli, want, sizes, kinds, shares, access):
    """(score, GPU of a fraction)."""
    state = gpus.copy()
    if want == 1 and milli < 1000:
        best, chosen = -1, -1
        for d in range(8):
            if gpus[d] < milli:
                continue
            seen = False
            for earlier in range(d):
                seen = seen or gpus[earlier] == gpus[d]
            if seen:
                continue
            state[d] -= milli
            after = _frag(cpu, state, sizes, kinds, shares, access)
            state[d] += milli
            score = int(100.0 / (1.0 + np.exp(-(before - after) / 1000.0)))
            if score > best:
                best, chosen = score, d
        return best, chosen
    rest = want
    for d in range(8):
        if rest and state[d] == 1000:
            state[d] = 0
            rest -= 1
    after = _frag(cpu, state, sizes, kinds, shares, access)
    return int(100.0 / (1.0 + np.exp(-(before - after) / 1000.0))), -1


@njit(cache=True)
def _packing(gpus, count, milli, want):
    if want == 0:
        return 0
    free = 0
    for d in range(count):
        free += gpus[d] == 1000
    if free == count:
        return max(33 - free, free)
    fitting = np.sort(gpus[:count][gpus[:count] >= milli])[:want]
    if len(fitting) < want:
        return 0
    opened, used = 0, 0
    for left in fitting:
        opened += left == 1000
        used += left * 100 // 1000
    return max(50 - opened, 33) if opened else max(100 - used // 10, 50)


@njit(cache=True)
def _clustering(gpus, tags, milli, want):
    if want == 0:
        return 0
    others = 0
    for tag in range(len(tags)):
        others += tags[tag] > 0
    alone = 75 if others == 1 else 50
    nobody = 25 if others == 0 else 0
    base = alone if tags[_tag(milli, want)] > 0 else nobody
    return 25 * (8000 - gpus.sum()) // 8000 + base


@njit(cache=True)
def _simulate(
    policy, cpu, memory, gpus, counts, table, access, stream, draws, sizes, kinds, shares, typical_access
):
    nodes = len(cpu)
    scores = np.full((len(table), nodes), -2, np.int64)
    seen = np.full((len(table), nodes), -1, np.int64)
    changed = np.zeros(nodes, np.int64)
    frags = np.zeros(nodes)
    tags = np.zeros((nodes, 9), np.int64)
    placed = np.zeros(len(stream), np.bool_)
    for n in range(nodes):
        frags[n] = _frag(cpu[n], gpus[n], sizes, kinds, shares, typical_access[n])
    for i in range(len(stream)):
        kind, need = stream[i, 0], stream[i, 1]
        need_cpu, milli, want = table[kind, 0], table[kind, 1], table[kind, 2]
        best, node, fitting = -1, -1, 0
        for n in range(nodes):
            if seen[kind, n] != changed[n]:
                seen[kind, n] = changed[n]
                scores[kind, n] = _score(
                    policy, n, cpu, gpus, counts, tags, frags, access[kind, n], need_cpu, milli, want,
                    sizes, kinds, shares, typical_access,
                )  # fmt: skip
            if scores[kind, n] < 0 or memory[n] < need:
                continue
            fitting += 1
            if scores[kind, n] > best:
                best, node = scores[kind, n], n
        if node < 0:
            continue
        if policy == 0:
            skip = int(draws[i, 0] * fitting)
            for n in range(nodes):
                if scores[kind, n] >= 0 and memory[n] >= need:
                    if skip == 0:
                        node = n
                        break
                    skip -= 1
        _take(
            policy, node, cpu, memory, gpus, tags, frags, need_cpu, need, milli, want, draws[i, 1],
            sizes, kinds, shares, typical_access,
        )  # fmt: skip
        changed[node] += 1
        placed[i] = True
    return placed


@njit(cache=True)
def _score(
    policy,
    n,
    cpu,
    gpus,
    counts,
    tags,
    frags,
    may,
    need_cpu,
    milli,
    want,
    sizes,
    kinds,
    shares,
    typical_access,
):
    """-1 where it does not fit."""
    if cpu[n] < need_cpu or (want > 0 and not may):
        return -1
    have = 0
    for d in range(8):
        have += want > 0 and gpus[n, d] >= milli
    if have < want:
        return -1
    left = gpus[n].sum()
    if policy == 1:
        dot = (cpu[n] / _CPU) * (need_cpu / _CPU) + (left / _GPU) * (milli * want / _GPU)
        return int((1.0 - dot / 2) * 100)
    if policy == 2:
        return _clustering(gpus[n], tags[n], milli, want)
    if policy == 3:
        return _packing(gpus[n], counts[n], milli, want)
    if policy == 4:
        rest = (cpu[n] - need_cpu) / _CPU * 0.5 + (left - milli * want) / _GPU * 0.5
        return int((1.0 - rest) * 100)
    if policy == 5:
        score, _ = _fgd(
            frags[n], cpu[n] - need_cpu, gpus[n], milli, want, sizes, kinds, shares, typical_access[n]
        )
        return score
    return 0


@njit(cache=True)
def _take(
    policy, n, cpu, memory, gpus, tags, frags, need_cpu, need, milli, want, draw, sizes, kinds, shares,
    typical_access,
):  # fmt: skip
    cpu_before = cpu[n]
    cpu[n] -= need_cpu
    memory[n] -= need
    if want > 0:
        tags[n, _tag(milli, want)] += 1
    if want == 1 and milli < 1000:
        chosen = -1
        if policy == 0:
            fitting = np.flatnonzero(gpus[n] >= milli)
            chosen = fitting[int(draw * len(fitting))]
        elif policy == 5:
            _, chosen = _fgd(
                frags[n], cpu_before - need_cpu, gpus[n], milli, want, sizes, kinds, shares, typical_access[n]
            )
        else:
            for d in range(8):
                if gpus[n, d] >= milli and (chosen < 0 or gpus[n, d] < gpus[n, chosen]):
                    chosen = d
        gpus[n, chosen] -= milli
    else:
        rest = want
        for d in range(8):
            if rest and gpus[n, d] == 1000:
                gpus[n, d] = 0
                rest -= 1
    frags[n] = _frag(cpu[n], gpus[n], sizes, kinds, shares, typical_access[n])
