"""Compiled: what frees on a node as those who hold it end, by the rules of `coordinator.freeing`, which stay the
readable form and the oracle of the tests. The tables of nodes are those of `coordinator.kernels`.
"""

from __future__ import annotations

import numpy as np

from coordinator.kernels import (
    BUILD,
    COUNT,
    CPU,
    GPUS,
    HELD,
    MEMORY,
    PIECES,
    S_COUNT,
    S_CPU,
    S_GPU_MEMORY,
    S_MEMORY,
    S_MILLI,
    S_WHOLE,
    STATE,
    WIDTH,
    _compiled,
    _free_mask,
    _inlined,
    _least_cost,
    isolation_of,
)

# columns of a piece that somebody holds; the first of a holder's pieces bears the figures of the holder
H_FIRST, H_WHEN, H_RELATIVE, H_BUSY, H_CPU, H_MEMORY, H_GPU, H_MIB, H_MILLI, H_BIT, H_WIDTH = (
    0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10,
)  # fmt: skip
UNKNOWN_MS = 1 << 62
NEVER_MS = UNKNOWN_MS + 1
# A job that has run out its time, or was asked to stop, ends soon; it is not over before its end is confirmed.
SOON_MS = 1000
# What the functions work in: the row as it becomes free, a copy to fill, who shares each GPU; behind it, half and half,
# the holders of a node in order and their ends.
_FILLED = WIDTH
_SHARING = 2 * WIDTH
WORK = _SHARING + 4 * GPUS


@_compiled
def _how_many(row, shape, build, compat, most):
    """How many such tasks, up to `most`, fit one beside the other. Spends the row."""
    want, count = shape[S_COUNT], 0
    while count < most and row[CPU] >= shape[S_CPU] and row[MEMORY] >= shape[S_MEMORY]:
        mask = 0
        if want:
            mask, reason = _free_mask(row, shape, build, compat)
            if reason:
                break
        count += 1
        if count == most:
            break
        if want > 1 and not shape[S_WHOLE]:
            mask, _, _ = _least_cost(build, mask, want)
        row[CPU] -= shape[S_CPU]
        row[MEMORY] -= shape[S_MEMORY]
        left = want  # of GPUs of which it needs one, or all of each, it does not matter which
        for n in range(row[COUNT]):
            if left and mask >> n & 1:
                left -= 1
                row[PIECES + n] -= build[n] if shape[S_GPU_MEMORY] < 0 else shape[S_GPU_MEMORY]
                row[PIECES + GPUS + n] -= shape[S_MILLI]
                row[PIECES + 2 * GPUS + n] |= 1 << isolation_of(compat, row[PIECES + 2 * GPUS + n])
    return count


@_compiled
def _in_order(held, first, last, now_ms, order, ends):
    """Enters the first pieces of all holders by the end of the holder; returns how many holders there are."""
    count = 0
    for i in range(first, last):
        if not held[i, H_FIRST]:
            continue
        when = held[i, H_WHEN]
        end = now_ms + when if held[i, H_RELATIVE] else max(now_ms + SOON_MS, when)
        at = count
        while at > 0 and ends[at - 1] > end:
            ends[at], order[at] = ends[at - 1], order[at - 1]
            at -= 1
        ends[at], order[at] = end, i
        count += 1
    return count


@_compiled
def _free(row, held, first, last, sharing):
    """What one holder had is free."""
    row[CPU] += held[first, H_CPU]
    row[MEMORY] += held[first, H_MEMORY]
    i = first
    while i == first or (i < last and not held[i, H_FIRST]):
        n = held[i, H_GPU]
        if n >= 0:
            sharing[4 * n + held[i, H_BIT]] -= 1
            if row[PIECES + 2 * GPUS + n] >= 0:
                row[PIECES + n] += held[i, H_MIB]
                row[PIECES + GPUS + n] += held[i, H_MILLI]
                bits = 0
                for bit in range(4):
                    bits |= (sharing[4 * n + bit] > 0) << bit
                row[PIECES + 2 * GPUS + n] = bits
        i += 1


@_compiled
def _change(row, held, first, last, now_ms, shape, build, compat, most, skip, work):
    """See `coordinator.freeing.Change`."""
    free, filled, sharing = work[:_FILLED], work[_FILLED:_SHARING], work[_SHARING:WORK]
    half = (len(work) - WORK) // 2
    order, ends = work[WORK : WORK + half], work[WORK + half :]
    for column in range(WIDTH):
        free[column] = row[column]
    for n in range(4 * GPUS):
        sharing[n] = 0
    for i in range(first, last):
        if held[i, H_GPU] >= 0:
            sharing[4 * held[i, H_GPU] + held[i, H_BIT]] += 1
    holders = _in_order(held, first, last, now_ms, order, ends)
    before = np.int64(-1)
    for place in range(holders + 1):
        if place:
            _free(free, held, order[place - 1], last, sharing)
        if place < skip:
            continue
        if most == 1:
            count = np.int64(_how_many(free, shape, build, compat, most))
        else:
            for column in range(WIDTH):
                filled[column] = free[column]
            count = np.int64(_how_many(filled, shape, build, compat, most))
        if before < 0:
            before = count
        elif count != before:
            return before, ends[place - 1], held[order[place - 1], H_BUSY], np.int64(place), count
    return before, np.int64(NEVER_MS), np.int64(0), np.int64(holders), before


@_compiled
def change_of(rows, node, held, starts, lengths, now_ms, shape, builds, compat, most, skip, work):
    """`_change` of one node of a known build."""
    b = rows[node, BUILD]
    return _change(
        rows[node], held, starts[node], starts[node] + lengths[node], now_ms, shape, builds[b], compat[b],
        most, skip, work,
    )  # fmt: skip


@_compiled
def look(rows, nodes, shape, builds, compat, labels, could, most, counts, exact, usable, outside, odd, work):
    """Sees anew whether the job could use these nodes when empty, whether they are open to work that is not for it, and
    how many of several tasks they take; what changes that is to be found again. Returns (how many nodes are left to
    the caller in `odd`, whether others are usable now)."""
    left, is_other = 0, False
    for node in nodes:
        row = rows[node]
        b = row[BUILD]
        exact[node] = False
        if b < 0:
            odd[left] = node
            left += 1
            continue
        is_open = row[STATE] & (HELD - 1) == 0
        is_usable = is_open and labels[node] and could[b]
        is_other |= is_usable != usable[node]
        usable[node] = is_usable
        outside[node] = is_open and not is_usable
        if most > 1:
            counts[node] = 0
            if is_usable:
                for column in range(WIDTH):
                    work[column] = row[column]
                counts[node] = _how_many(work, shape, builds[b], compat[b], most)
    return left, is_other


@_compiled
def first_change(
    rows, held, starts, lengths, now_ms, shape, builds, compat, most, work, usable,
    absolute, relative, least_busy, name_order, ends, busy, exact,
):  # fmt: skip
    """(the node whose change comes first, whether it is left to the caller to find that change, or to enter who holds
    the node); ties by how busy the node was, then by name. -1: nothing changes.

    A change comes no sooner than the first end on its node: what cannot be the first is not looked for."""
    best, best_end, best_busy = -1, np.int64(NEVER_MS), np.int64(0)
    for node in range(len(ends)):
        if exact[node] and usable[node]:
            is_first = _is_sooner(ends[node], busy[node], node, best_end, best_busy, best, name_order)
            if is_first:
                best, best_end, best_busy = node, ends[node], busy[node]
    for node in range(len(ends)):
        if exact[node] or not usable[node]:
            continue
        soonest = min(max(now_ms + SOON_MS, absolute[node]), now_ms + relative[node])
        if not _is_sooner(soonest, least_busy[node], node, best_end, best_busy, best, name_order):
            continue
        row = rows[node]
        b = row[BUILD]
        if b < 0 or lengths[node] < 0:
            return node, True
        _, ends[node], busy[node], _, _ = _change(
            row, held, starts[node], starts[node] + lengths[node], now_ms, shape, builds[b], compat[b],
            most, 0, work,
        )  # fmt: skip
        exact[node] = True
        if _is_sooner(ends[node], busy[node], node, best_end, best_busy, best, name_order):
            best, best_end, best_busy = node, ends[node], busy[node]
    return best, False


@_inlined
def _is_sooner(end, busy, node, best_end, best_busy, best, name_order):
    """What never comes is not sooner than nothing."""
    if end != best_end:
        return end < best_end
    if end >= NEVER_MS:
        return False
    return busy < best_busy or (busy == best_busy and name_order[node] < name_order[best])
