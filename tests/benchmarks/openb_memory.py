"""openb in two dimensions: each fraction of a GPU draws its GPU memory once, independently of its compute.

A GPU has 80 GiB; whole-GPU pods take all of it; a fraction fits where both fit. The cluster is every fourth node. What
is drawn is small (1/m), uniform, or large (sqrt m): then memory runs out before compute. Policies, ties to the first
node:

    fgd_scarcer    FGD on the scarcer share: a GPU has left the less of its two shares, a pod asks for the more of them
    fgd_sum        FGD where fragments count the mean of both shares, and a pod fits where both fit
    bestfit_node   best fit of the experiment on the mean of both shares; the GPU that it fills most
    bestfit_gpu    a fraction goes to the GPU of all nodes that it fills most; all else as bestfit_node
    serai          Serai's own placement, which knows the mix as FGD does

Figures are shares of the cluster that are given out when the compute that was asked for reaches 100 % (130 %): of
compute, of memory, both together (of 200), and the scarcer one: each pod counts by the larger of its two shares.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import mean

import numpy as np
from attrs import evolve
from numba import njit
from numpy.typing import NDArray

from tests.benchmarks import openb, record
from tests.benchmarks.openb import CARD_MIB, WHOLE, Pod, Run
from tests.benchmarks.openb_serai import placed_by_serai

MEMORIES = {"small": -1.0, "uniform": 0.0, "large": 0.5}
POLICIES = ("fgd_scarcer", "fgd_sum", "bestfit_node", "bestfit_gpu", "serai")
TRACES = ("default", "multigpu20", "gpushare60", "gpushare100")
COLUMNS = (
    "trace", "memory", "policy", "compute_100", "memory_100", "sum_100", "scarcer_100",
    "compute_130", "sum_130", "scarcer_130", "seconds",
)  # fmt: skip
_NAMES = COLUMNS[:3]
_SIZES_GIB = (4, 8, 12, 20, 28, 40, 56, 72)
_CPU = 128_000.0


def run_of(trace: str, memory: str, seed: int) -> Run:
    nodes = openb.nodes_of(trace)[:: 1 if trace == openb.SAMPLE else 4]
    return openb.stream_of(nodes, with_memory(openb.pods_of(trace), memory, seed), seed)


def with_memory(pods: Sequence[Pod], memory: str, seed: int) -> tuple[Pod, ...]:
    """Fractions with memory of their own."""
    weights = np.array(_SIZES_GIB, float) ** MEMORIES[memory]
    rng = np.random.default_rng(seed + 7_000_003)
    drawn = rng.choice(np.array(_SIZES_GIB) * 1024, len(pods), p=weights / weights.sum())
    return tuple(
        evolve(pod, drawn_mib=int(mib)) if openb.size_of(pod) == "fraction" else pod
        for pod, mib in zip(pods, drawn, strict=True)
    )


def measured(trace: str, memory: str, policy: str, seed: int) -> record.Row:
    run = run_of(trace, memory, seed)
    start = time.perf_counter()
    placed = placed_by_serai(run, is_learned=False)[0] if policy == "serai" else placed_by(policy, run)
    seconds = time.perf_counter() - start
    return {
        "trace": trace,
        "memory": memory,
        "policy": policy,
        "seed": seed,
        **figures(run, placed),
        "seconds": round(seconds, 3),
    }


def means(rows: Sequence[record.Row]) -> Iterator[record.Row]:
    """Of the seeds of each policy, for one trace and one kind of memory."""
    for policy in dict.fromkeys(row["policy"] for row in rows):
        group = [row for row in rows if row["policy"] == policy]
        numbers = {n: mean(float(row[n] or 0) for row in group) for n in COLUMNS if n not in _NAMES}
        yield {name: group[0][name] for name in _NAMES} | numbers


def leads(rows: Sequence[record.Row]) -> Iterator[str]:
    """Serai against the best of all others, for one trace and one kind of memory."""
    found = {row["policy"]: row for row in means(rows)}
    ours = found.pop("serai", None)
    if ours is None or not found:
        return
    parts = []
    for name in ("sum_100", "scarcer_100", "sum_130", "scarcer_130"):
        best = max(found.values(), key=lambda row: float(row[name] or 0))
        parts.append(f"{name} {float(ours[name] or 0) - float(best[name] or 0):+.2f} over {best['policy']}")
    yield f"serai {ours['trace']} {ours['memory']}: {', '.join(parts)}"


def figures(run: Run, placed: Sequence[bool]) -> dict[str, float]:
    """Means over the events at which the compute asked for so far rounds to 100 % (130 %) of the cluster."""
    arrived = 0
    used = np.zeros(3)
    seen: dict[int, list[NDArray[np.float64]]] = {100: [], 130: []}
    for pod, is_placed in zip(run.pods, placed, strict=True):
        arrived += pod.asked_milli
        if is_placed:
            compute, memory = pod.asked_milli / WHOLE, pod.gpus * pod.gpu_mib / CARD_MIB
            used += np.array([compute, memory, max(compute, memory)])
        percent = round(100 * arrived / run.capacity_milli)
        if percent in seen:
            seen[percent].append(100 * WHOLE * used / run.capacity_milli)
    found = {}
    for percent, values in seen.items():
        compute, memory, scarcer = np.mean(values, axis=0).tolist()
        shares = {"compute": compute, "memory": memory, "sum": compute + memory, "scarcer": scarcer}
        found |= {f"{name}_{percent}": round(value, 4) for name, value in shares.items()}
    return found


def placed_by(policy: str, run: Run) -> list[bool]:
    """Whether each pod was placed."""
    kinds = sorted({_kind(pod) for pod in run.pods})
    number = {kind: n for n, kind in enumerate(kinds)}
    table = np.array(kinds, np.int64)
    stream = np.array([(number[_kind(pod)], pod.memory_mib) for pod in run.pods], np.int64)
    cpu = np.array([node.cpu_milli for node in run.nodes], np.int64)
    memory = np.array([node.memory_mib for node in run.nodes], np.int64)
    gpus = np.array([[WHOLE * (d < node.gpus) for d in range(8)] for node in run.nodes], np.int64)
    usual, shares = _typical(run.originals)
    return _simulate(
        POLICIES.index(policy), cpu, memory, gpus, gpus.copy(), table, stream, usual, shares
    ).tolist()


def _kind(pod: Pod) -> tuple[int, int, int, int]:
    """CPU, compute and memory of each GPU in thousandths of one, GPUs. Models are left out: no trace here has them."""
    return pod.cpu_milli, pod.milli, -(-WHOLE * pod.gpu_mib // CARD_MIB), pod.gpus


def _typical(pods: Sequence[Pod]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """As `openb.typical`, with memory."""
    usual = openb.commonest([_kind(pod) for pod in pods])
    return np.array([kind for kind, _ in usual], np.int64), np.array([share for _, share in usual])


@njit(cache=True)
def _frag(policy, cpu, compute, memory, usual, shares):
    """What typical pods cannot use: thousandths of a GPU, by the less of both shares or by their mean."""
    left = np.minimum(compute, memory) if policy == 0 else (compute + memory) // 2
    total = left.sum()
    frag = 0.0
    for m in range(len(usual)):
        milli, mib, want = usual[m, 1], usual[m, 2], usual[m, 3]
        if want == 0 or cpu < usual[m, 0]:
            frag += shares[m] * total
            continue
        if policy == 0:
            milli = mib = max(milli, mib)
        fitting, small = 0, 0
        for d in range(8):
            if compute[d] >= milli and memory[d] >= mib:
                fitting += 1
            else:
                small += left[d]
        frag += shares[m] * (small if fitting >= want else total)
    return frag


@njit(cache=True)
def _sigmoid(before, after):
    return int(100.0 / (1.0 + np.exp(-(before - after) / 1000.0)))


@njit(cache=True)
def _whole(compute, memory, want, new_compute, new_memory):
    rest = want
    for d in range(8):
        new_compute[d], new_memory[d] = compute[d], memory[d]
        if rest and compute[d] == 1000 and memory[d] == 1000:
            new_compute[d] = new_memory[d] = 0
            rest -= 1


@njit(cache=True)
def _answer(policy, cpu, compute, memory, frag, need, usual, shares):
    """(score, GPU of a fraction); -1 where it does not fit."""
    need_cpu, milli, mib, want = need[0], need[1], need[2], need[3]
    fitting = 0
    for d in range(8):
        fitting += want > 0 and compute[d] >= milli and memory[d] >= mib
    if cpu < need_cpu or fitting < want:
        return -1, -1
    is_part = want == 1 and (milli < 1000 or mib < 1000)
    best, chosen = -1, -1
    if is_part:
        for d in range(8):
            if compute[d] < milli or memory[d] < mib:
                continue
            if policy < 2:
                compute[d] -= milli
                memory[d] -= mib
                score = _sigmoid(frag, _frag(policy, cpu - need_cpu, compute, memory, usual, shares))
                compute[d] += milli
                memory[d] += mib
            else:
                score = 2000 - (compute[d] - milli + memory[d] - mib)
            if score > best:
                best, chosen = score, d
        if policy != 2:
            return best, chosen
    elif policy < 2:
        new_compute, new_memory = np.zeros(8, np.int64), np.zeros(8, np.int64)
        _whole(compute, memory, want, new_compute, new_memory)
        return _sigmoid(frag, _frag(policy, cpu - need_cpu, new_compute, new_memory, usual, shares)), -1
    asked = want * (milli + mib) / 2
    rest = (cpu - need_cpu) / _CPU * 0.5 + ((compute.sum() + memory.sum()) / 2 - asked) / 8000.0 * 0.5
    return int((1.0 - rest) * 100), chosen


@njit(cache=True)
def _simulate(policy, cpu, memory, compute, gpu_memory, table, stream, usual, shares):
    nodes = len(cpu)
    scores = np.zeros((len(table), nodes), np.int64)
    chosen = np.zeros((len(table), nodes), np.int64)
    seen = np.full((len(table), nodes), -1, np.int64)
    changed = np.zeros(nodes, np.int64)
    frags = np.zeros(nodes)
    placed = np.zeros(len(stream), np.bool_)
    for n in range(nodes):
        frags[n] = _frag(policy, cpu[n], compute[n], gpu_memory[n], usual, shares)
    for i in range(len(stream)):
        kind, need_memory = stream[i, 0], stream[i, 1]
        best, node = -1, -1
        for n in range(nodes):
            if seen[kind, n] != changed[n]:
                seen[kind, n] = changed[n]
                scores[kind, n], chosen[kind, n] = _answer(
                    policy, cpu[n], compute[n], gpu_memory[n], frags[n], table[kind], usual, shares
                )
            if scores[kind, n] > best and memory[n] >= need_memory:
                best, node = scores[kind, n], n
        if node < 0:
            continue
        cpu[node] -= table[kind, 0]
        memory[node] -= need_memory
        gpu = chosen[kind, node]
        if gpu >= 0:
            compute[node, gpu] -= table[kind, 1]
            gpu_memory[node, gpu] -= table[kind, 2]
        else:
            _whole(
                compute[node].copy(), gpu_memory[node].copy(), table[kind, 3], compute[node], gpu_memory[node]
            )
        frags[node] = _frag(policy, cpu[node], compute[node], gpu_memory[node], usual, shares)
        changed[node] += 1
        placed[i] = True
    return placed
