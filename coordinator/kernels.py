"""Compiled loops over plain arrays: the answers of one shape of task for many nodes, and the knapsacks of the prices.

The rules are those of `coordinator.fit` and `coordinator.worth`, which stay the readable form and the oracle of the
tests; nothing is decided here that is not decided there. Only whole numbers and fixed types come in, so that nothing
is compiled again in the middle of a cycle, and compiled code is kept beside the sources (or in NUMBA_CACHE_DIR).

A row is what is left of one node: its figures, then memory, compute and sharing of each of up to eight GPUs. Sharing
is -1 for a closed GPU, else one bit for each isolation on it. An answer is a score, lower is better, or -1 - the
place of the reason in `coordinator.index.REASONS`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

# Rows are looked at through views, and to count references to those would cost more than the rules do. So they are not
# counted; what is compiled so may make no array of its own, and nothing of it outlives a call.
_compiled = njit(cache=True, _nrt=False, error_model="numpy")
_inlined = njit(cache=True, _nrt=False, error_model="numpy", forceinline=True)

GPUS = 8
# columns of a row
CPU, MEMORY, STATE, BUILD, COUNT, PLACE, MODEL, ODD_IDLE, PIECES = 0, 1, 2, 3, 4, 5, 6, 7, 8
WIDTH = PIECES + 3 * GPUS
HELD = 8  # flag in STATE; below it the state itself, 0 for well
# columns of a build: memory of each GPU, costs of pairs, cost of each set, what is near each set; and of each number of
# GPUs that was wanted of a set, what `_least_cost` found
PAIRS = GPUS
SETS = PAIRS + GPUS * GPUS
NEAR = SETS + 256
FLAT = NEAR + 256
BEST = FLAT + 1
BUILD_WIDTH = BEST + (GPUS + 1) * 256
# columns of a shape
S_COUNT, S_CPU, S_MEMORY, S_GPU_MEMORY, S_MILLI, S_WHOLE, S_LABELS, S_WIDTH = 0, 1, 2, 3, 4, 5, 6, 7
# reasons by their place in coordinator.index.REASONS: states come first
R_LABELS, R_MODEL, R_IDLE, R_TOTAL, R_DISTINCT, R_GPU_MEMORY, R_MILLI, R_ISOLATION, R_CPU, R_MEMORY, R_HELD = (
    3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,
)  # fmt: skip
# columns of the sums of a node: see `_sum_up`; its bounds for each price of CPU stand at the end. Behind those of all
# nodes stands room to work in.
SUM_IS_KNOWN, SUM_IDLE, SUM_LEFT, SUM_BREAKS, SUM_WORTH, SUM_BOUNDS, SUM_WIDTH = 0, 1, 2, 3, 4, 5, 13
# Of the number in PLACE so many bits are the rank by remoteness; above them is that by how badly the GPUs are connected.
REMOTE_BITS = 16
UNKNOWN = -100
NOTHING = np.int64(1 << 62)


@_inlined
def _free_mask(row, shape, build, compat):
    """(mask of GPUs that can take a slice, 0 or a negative reason). Without branches, which would be guessed wrong."""
    match = compat & 0xFF
    if match == 0:
        return 0, -1 - R_MODEL
    want, need_mib, milli = shape[S_COUNT], shape[S_GPU_MEMORY], shape[S_MILLI]
    idle, total, least = 0, 0, NOTHING
    is_open, has_memory, has_compute, mask, have = 0, 0, 0, 0, 0
    for n in range(GPUS):
        is_wanted = match >> n & 1
        left_mib, left = row[PIECES + n], row[PIECES + GPUS + n]
        sharing, size = row[PIECES + 2 * GPUS + n], build[n]
        need = size if need_mib < 0 else need_mib
        idle += is_wanted & (sharing == 0) & (left_mib == size) & (left == 1000)
        total += is_wanted * left_mib
        least = min(least, need if is_wanted else NOTHING)
        step = is_wanted & (sharing >= 0)
        is_open += step
        step &= left_mib >= need
        has_memory += step
        step &= left >= milli
        has_compute += step
        step &= compat >> (8 + (sharing & 15)) & 1
        have += step
        mask |= step << n
    if have >= want and (idle >= want or not shape[S_WHOLE]) and (total >= want * least):
        return mask, 0
    if shape[S_WHOLE]:
        if idle < want:
            return 0, -1 - R_IDLE
    elif total < want * least:
        return 0, -1 - R_TOTAL
    if is_open < want:
        return 0, -1 - R_DISTINCT
    if has_memory < want:
        return 0, -1 - R_GPU_MEMORY
    if has_compute < want:
        return 0, -1 - R_MILLI
    if have < want:
        return 0, -1 - R_ISOLATION
    return mask, 0


@_inlined
def _is_idle(row, build, n):
    return row[PIECES + 2 * GPUS + n] == 0 and row[PIECES + n] == build[n] and row[PIECES + GPUS + n] == 1000


@_inlined
def _least_cost(build, mask, want):
    """(set, cost, domain size): least cost, then smallest domain, then lowest places. Looked for once."""
    known = build[BEST + want * 256 + mask]
    if known == 0:
        known = _look_for_set(build, mask, want)
        build[BEST + want * 256 + mask] = known
    return known & 255, known >> 16, known >> 8 & 255


@_compiled
def _look_for_set(build, mask, want):
    best, best_cost, best_size = 0, NOTHING, NOTHING
    chosen = mask
    while chosen > 0:  # all subsets of the mask, the largest number first
        bits = 0
        for n in range(GPUS):
            bits += chosen >> n & 1
        cost = build[SETS + chosen] if bits == want else NOTHING
        if cost >= best_cost and (bits != want or cost > best_cost):
            chosen = (chosen - 1) & mask
            continue
        size, near = 0, build[NEAR + chosen] & mask
        for n in range(GPUS):
            size += near >> n & 1
        if build[FLAT]:
            size = 0
        if cost < best_cost or size < best_size or (size == best_size and _is_lower(chosen, best)):
            best, best_cost, best_size = chosen, cost, size
        chosen = (chosen - 1) & mask
    return np.int64(best_cost << 16 | best_size << 8 | best)


@_inlined
def _is_lower(first, second):
    """Of two sets of equal size the one with the lower places: the lowest GPU that only one has decides."""
    only = first ^ second
    return first & (only & -only) != 0


@_compiled
def _bounds(row, build, cpu_prices, values, whole, step_mib, cpu, chosen, milli, memory, bounds):
    """The bounds of the worth of what is left (see `coordinator.worth`) once a task is on the GPUs of `chosen`."""
    memory_steps = values.shape[1] - 1
    idle = 0
    for q in range(len(cpu_prices)):
        bounds[q] = cpu_prices[q] * (row[CPU] - cpu)
    for n in range(row[COUNT]):
        if row[PIECES + 2 * GPUS + n] < 0:
            continue
        left_mib, left = row[PIECES + n], row[PIECES + GPUS + n]
        if chosen >> n & 1:
            left_mib -= build[n] if memory < 0 else memory
            left -= milli
        elif _is_idle(row, build, n):
            idle += 1
            continue
        if left_mib > 0 and left > 0:
            m = min(left_mib // step_mib, memory_steps) if memory_steps else 0
            for q in range(len(cpu_prices)):
                bounds[q] += values[left // 10, m, q]
    least = NOTHING
    for q in range(len(cpu_prices)):
        least = min(least, bounds[q] + whole[idle, q])
    return least


@_compiled
def _worst_connected(row, build, mask):
    best, best_idle, best_all = -1, np.int64(-1), np.int64(-1)
    for n in range(row[COUNT]):
        if not mask >> n & 1:
            continue
        to_idle, to_all = np.int64(0), np.int64(0)
        for other in range(row[COUNT]):
            if other != n:
                cost = build[PAIRS + n * GPUS + other]
                to_all += cost
                if _is_idle(row, build, other):
                    to_idle += cost
        if to_idle > best_idle or (to_idle == best_idle and to_all > best_all):
            best, best_idle, best_all = n, to_idle, to_all
    return best


@_compiled
def _has_broken_group(row, build):
    if build[FLAT]:
        return False
    for n in range(row[COUNT]):
        if not _is_idle(row, build, n):
            continue
        least, is_broken = NOTHING, False
        for other in range(row[COUNT]):
            cost = build[PAIRS + n * GPUS + other]
            if other != n and cost <= least:
                is_broken = (cost == least and is_broken) or not _is_idle(row, build, other)
                least = cost
        if is_broken:
            return True
    return False


@_compiled
def rank_of_whole(place, breaks):
    """What decides first where one whole GPU goes: worst connected, then broken already, then most remote."""
    remote = (1 << REMOTE_BITS) - 1
    return (place >> REMOTE_BITS) << (REMOTE_BITS + 1) | breaks << REMOTE_BITS | place & remote


@_compiled
def _sum_up(row, build, price, cpu_prices, values, whole, step_mib, sums):
    """What the answers of all shapes have in common about a node, kept until its row changes."""
    idle, left_mib = 0, 0
    for n in range(row[COUNT]):
        idle += _is_idle(row, build, n)
        left_mib += row[PIECES + n]
    sums[SUM_IDLE], sums[SUM_LEFT] = idle, left_mib
    sums[SUM_BREAKS] = 0 if _has_broken_group(row, build) else 1
    if len(cpu_prices) and price:
        bound = _bounds(row, build, cpu_prices, values, whole, step_mib, 0, 0, 0, 0, sums[SUM_BOUNDS:])
        sums[SUM_WORTH] = price * bound // 1000
    sums[SUM_IS_KNOWN] = 1


@_inlined
def _answer(
    row, shape, build, compat, has_labels, prices, cpu_prices, values, whole, step_mib, sums, scratch
):
    """(answer, set of GPUs). The GPU of a task that wants one whole is chosen by `choose`: it does not matter here."""
    state = row[STATE] & (HELD - 1)
    if state:
        return -state, 0
    if not has_labels:
        return -1 - R_LABELS, 0
    want = shape[S_COUNT]
    mask = 0
    if want:
        mask, reason = _free_mask(row, shape, build, compat)
        if reason:
            return reason, 0
    if row[CPU] < shape[S_CPU]:
        return -1 - R_CPU, 0
    if row[MEMORY] < shape[S_MEMORY]:
        return -1 - R_MEMORY, 0
    if row[STATE] & HELD:
        # The last filter: a hold is the reason only where there is no other.
        return -1 - R_HELD, 0
    price = prices[row[MODEL]]
    is_known = len(cpu_prices) > 0
    if not sums[SUM_IS_KNOWN]:
        _sum_up(row, build, price, cpu_prices, values, whole, step_mib, sums)
    idle, left_mib = sums[SUM_IDLE], sums[SUM_LEFT]
    if want == 0:
        if not is_known:
            return (row[COUNT] << 54) | ((row[CPU] - shape[S_CPU]) << 27) | (row[MEMORY] - shape[S_MEMORY]), 0
        loss = _loss_of_whole(shape[S_CPU], 0, price, cpu_prices, whole, sums)
        return (loss << 1) | (row[COUNT] > 0), 0
    if want > 1:
        chosen, cost, size = _least_cost(build, mask, want)
        score = (cost << 6) | size
    elif shape[S_WHOLE]:
        chosen, score = mask & -mask, rank_of_whole(row[PLACE], sums[SUM_BREAKS])
    else:
        return _fraction(row, shape, build, mask, price, cpu_prices, values, whole, step_mib, sums)
    if not is_known:
        return (score << 32) | (idle << 26) | left_mib, chosen
    if shape[S_WHOLE]:
        return (score << 26) | _loss_of_whole(shape[S_CPU], want, price, cpu_prices, whole, sums), chosen
    loss = np.int64(0)
    if price:
        bound = _bounds(
            row, build, cpu_prices, values, whole, step_mib,
            shape[S_CPU], chosen, shape[S_MILLI], shape[S_GPU_MEMORY], scratch,
        )  # fmt: skip
        loss = _rounded(sums[SUM_WORTH] - price * bound // 1000)
    return (score << 26) | loss, chosen


@_inlined
def _rounded(loss):
    """In thousandths of a GPU, to the nearest."""
    return min((loss + 500_000) // 1_000_000, np.int64((1 << 26) - 1))


@_inlined
def _loss_of_whole(cpu, want, price, cpu_prices, whole, sums):
    """Of a task that takes so many whole GPUs: nothing else about the node changes but its CPU."""
    if not price:
        return np.int64(0)
    left = sums[SUM_IDLE] - want
    least = NOTHING
    for q in range(len(cpu_prices)):
        least = min(least, sums[SUM_BOUNDS + q] - cpu_prices[q] * cpu + whole[left, q])
    return _rounded(sums[SUM_WORTH] - price * least // 1000)


@_inlined
def _fraction(row, shape, build, mask, price, cpu_prices, values, whole, step_mib, sums):
    """GPUs alike side by side are looked at once."""
    best, chosen = NOTHING, 0
    is_known = len(cpu_prices) > 0
    idle, left_mib = sums[SUM_IDLE], sums[SUM_LEFT]
    for n in range(row[COUNT]):
        if not mask >> n & 1:
            continue
        if n and mask >> (n - 1) & 1 and _is_alike(row, build, n):
            continue
        need = build[n] if shape[S_GPU_MEMORY] < 0 else shape[S_GPU_MEMORY]
        mib, milli = row[PIECES + n], row[PIECES + GPUS + n]
        opens = np.int64(_is_idle(row, build, n))
        if is_known:
            score = opens
            if price:
                after = _bound_after(
                    opens, mib, milli, mib - need, milli - shape[S_MILLI], shape[S_CPU], idle,
                    cpu_prices, values, whole, step_mib, sums,
                )  # fmt: skip
                score |= _rounded(sums[SUM_WORTH] - price * after // 1000) << 1
        else:
            left = 1000 * (mib - need) // build[n] + milli - shape[S_MILLI]
            score = (2 * opens << 44) | (left << 32) | ((idle - opens) << 26) | left_mib
        if score < best:
            best, chosen = score, 1 << n
    return best, chosen


@_inlined
def _is_alike(row, build, n):
    return (
        row[PIECES + n] == row[PIECES + n - 1]
        and row[PIECES + GPUS + n] == row[PIECES + GPUS + n - 1]
        and row[PIECES + 2 * GPUS + n] == row[PIECES + 2 * GPUS + n - 1]
        and build[n] == build[n - 1]
    )


@_inlined
def _bound_after(
    opens, mib, milli, mib_after, milli_after, cpu, idle, cpu_prices, values, whole, step_mib, sums
):
    """The least bound once a slice was cut from one GPU, from the bounds before."""
    memory_steps = values.shape[1] - 1
    m_before = min(mib // step_mib, memory_steps) if memory_steps else 0
    m_after = min(mib_after // step_mib, memory_steps) if memory_steps else 0
    is_left = mib_after > 0 and milli_after > 0
    least = NOTHING
    for q in range(len(cpu_prices)):
        bound = sums[SUM_BOUNDS + q] - cpu_prices[q] * cpu + whole[idle - opens, q]
        if not opens:
            bound -= values[milli // 10, m_before, q]
        if is_left:
            bound += values[milli_after // 10, m_after, q]
        least = min(least, bound)
    return least


@_compiled
def catch_up(
    rows, sums, shapes, s, builds, compat, labels, prices, cpu_prices, values, whole, step_mib,
    keys, counts, minima, block_of, block_starts, log, positions, last, stamps, stamp, odd,
):  # fmt: skip
    """Answers anew for the nodes that were logged up to `last` since the shape was asked, or for all where it never was
    (-1) or the log has forgotten some. Returns how many of them are left to the caller in `odd`, since they are of a
    build that this page does not know."""
    scratch = sums[len(rows), SUM_BOUNDS:]
    shape = shapes[s]
    first, positions[s] = positions[s], last
    left = 0
    dirty = -1
    is_all = first < 0 or last - first > len(log)
    count = len(rows) if is_all else last - first
    for i in range(count):
        node = i if is_all else log[(last - 1 - i) & (len(log) - 1)]
        if stamps[node] == stamp:
            continue
        stamps[node] = stamp
        row = rows[node]
        b = row[BUILD]
        if b < 0:
            odd[left] = node
            left += 1
            continue
        answer, _ = _answer(
            row, shape, builds[b], compat[s, b], labels[shape[S_LABELS], node],
            prices, cpu_prices, values, whole, step_mib, sums[node], scratch,
        )  # fmt: skip
        dirty = _put(keys, counts, minima, block_of, s, node, answer, dirty)
    _mend(keys, minima, block_starts, s, dirty)
    return left


@_compiled
def fit_somewhere(
    rows, sums, shapes, numbers, builds, compat, labels, prices, cpu_prices, values, whole, step_mib,
    keys, counts, minima, block_of, block_starts, log, positions, last, stamps, stamp, odd, fits, is_left,
):  # fmt: skip
    """`catch_up` for many shapes, and which of them fit; where nodes are left to the caller it must be done again."""
    for i in range(len(numbers)):
        s = numbers[i]
        first = positions[s]
        if first != last:
            left = catch_up(
                rows, sums, shapes, s, builds, compat, labels, prices, cpu_prices, values, whole, step_mib,
                keys, counts, minima, block_of, block_starts, log, positions, last, stamps, stamp + 1 + i, odd,
            )  # fmt: skip
            if left:
                is_left[i], positions[s] = True, first
        fits[i] = not is_refused(counts, s, len(rows))


@_compiled
def is_refused(counts, s, nodes):
    """Whether all nodes refuse a shape that has caught up."""
    refused = 0
    for reason in range(counts.shape[1]):
        refused += counts[s, reason]
    return refused == nodes


@_compiled
def put(keys, counts, minima, block_of, block_starts, s, node, answer):
    """Enters an answer that was found elsewhere."""
    _mend(keys, minima, block_starts, s, _put(keys, counts, minima, block_of, s, node, answer, -1))


@_inlined
def _put(keys, counts, minima, block_of, s, node, answer, dirty):
    """The last of a chain of blocks whose minimum is no longer known: instead of it each bears which was the last
    before it. `dirty` is the last until now, -1 for none."""
    before = keys[s, node]
    if before == answer:
        return dirty
    if before < 0 and before != UNKNOWN:
        counts[s, -1 - before] -= 1
    if answer < 0:
        counts[s, -1 - answer] += 1
    keys[s, node] = answer
    block = block_of[node]
    if answer >= 0 and answer < minima[s, block]:
        minima[s, block] = answer
    elif before >= 0 and before == minima[s, block]:
        minima[s, block] = -2 - dirty
        return block
    return dirty


@_compiled
def _mend(keys, minima, block_starts, s, dirty):
    while dirty >= 0:
        block, dirty = dirty, -2 - minima[s, dirty]
        least = NOTHING
        for node in range(block_starts[block], block_starts[block + 1]):
            key = keys[s, node]
            if key >= 0 and key < least:
                least = key
        minima[s, block] = least


@_compiled
def best_node(keys, minima, s, block_starts, block_place, idle_in, name_order):
    """The node of the lowest score; then in the place with the fewest idle GPUs; then the first by name. -1: none."""
    least = NOTHING
    for block in range(len(block_place)):
        least = min(least, minima[s, block])
    best_idle, best_node = NOTHING, -1
    if least == NOTHING:
        return best_node
    for block in range(len(block_place)):
        if minima[s, block] != least:
            continue
        idle = idle_in[block_place[block]]
        if idle > best_idle:
            continue
        node = block_starts[block]
        while keys[s, node] != least:
            node += 1
        if idle < best_idle or name_order[node] < name_order[best_node]:
            best_idle, best_node = idle, node
    return best_node


@_compiled
def choose(rows, sums, shapes, s, node, builds, compat, prices, cpu_prices, values, whole, step_mib):
    """How the task would stand on a node where it fits: the set of its GPUs, and behind it in four bits for each of
    them the place of the isolation that it would have there."""
    row, shape = rows[node], shapes[s]
    build = builds[row[BUILD]]
    kept = compat[s, row[BUILD]]
    if shape[S_COUNT] == 1 and shape[S_WHOLE]:
        mask, _ = _free_mask(row, shape, build, kept)
        chosen = np.int64(1) << _worst_connected(row, build, mask)
    else:
        _, chosen = _answer(
            row, shape, build, kept, True, prices, cpu_prices, values, whole, step_mib,
            sums[node], sums[len(rows), SUM_BOUNDS:],
        )  # fmt: skip
    names = np.int64(0)
    for n in range(row[COUNT]):
        if chosen >> n & 1:
            names = names << 4 | isolation_of(kept, row[PIECES + 2 * GPUS + n])
    return np.int64(chosen) << 32 | names


@_inlined
def isolation_of(kept, beside):
    """The place of the isolation that a slice has beside others, of what `coordinator.tables.compat` tells."""
    return kept >> (24 + 2 * beside) & 3


@_compiled
def place(
    rows, sums, shapes, s, builds, compat, labels, prices, cpu_prices, values, whole, step_mib,
    keys, counts, minima, block_of, block_starts, log, positions, last, stamps, stamp, odd,
    block_place, idle_in, name_order, taking,
):  # fmt: skip
    """`catch_up`, `best_node` and `choose` in one, and where it is asked for `take` too: (nodes left to the caller,
    node, how the task stands there, whole GPUs of the node before)."""
    left = catch_up(
        rows, sums, shapes, s, builds, compat, labels, prices, cpu_prices, values, whole, step_mib,
        keys, counts, minima, block_of, block_starts, log, positions, last, stamps, stamp, odd,
    )  # fmt: skip
    if left:
        return left, -1, np.int64(0), 0
    node = best_node(keys, minima, s, block_starts, block_place, idle_in, name_order)
    if node < 0 or rows[node, BUILD] < 0:
        return left, node, np.int64(0), 0
    chosen = choose(rows, sums, shapes, s, node, builds, compat, prices, cpu_prices, values, whole, step_mib)
    idle = idle_gpus(rows[node], builds[rows[node, BUILD]])
    if taking:
        shape = shapes[s]
        take(
            rows, sums, builds, idle_in, block_place[block_of[node]], log, last, node,
            shape[S_CPU], shape[S_MEMORY], shape[S_GPU_MEMORY], shape[S_MILLI], chosen,
        )  # fmt: skip
    return left, node, chosen, idle


@_compiled
def take(
    rows, sums, builds, idle_in, place, log, logged, node, cpu, memory, gpu_memory, milli, chosen
):  # fmt: skip
    """The task is there from now on, as `choose` tells it; that the node changed is logged."""
    sums[node, SUM_IS_KNOWN] = 0
    row = rows[node]
    build = builds[row[BUILD]]
    row[CPU] -= cpu
    row[MEMORY] -= memory
    names = chosen
    for n in range(row[COUNT] - 1, -1, -1):
        if chosen >> (32 + n) & 1:
            idle_in[place] -= _is_idle(row, build, n)
            row[PIECES + n] -= build[n] if gpu_memory < 0 else gpu_memory
            row[PIECES + GPUS + n] -= milli
            row[PIECES + 2 * GPUS + n] |= np.int64(1) << (names & 15)
            names >>= 4
    log[logged & (len(log) - 1)] = node


@_compiled
def idle_gpus(row, build):
    idle = 0
    for n in range(row[COUNT]):
        idle += _is_idle(row, build, n)
    return idle


@_compiled
def restore(rows, sums, base, is_held, touched, builds, place, idle_in, log, logged):
    """Undoes what a draft did to the rows; returns how long the log is then."""
    for node in touched:
        row = rows[node]
        held = HELD * is_held[node]  # who is held differs between those that share a base
        is_same = row[BUILD] >= 0
        for column in range(WIDTH):
            is_same = is_same and row[column] == base[node, column] | (held if column == STATE else 0)
        if is_same:
            continue
        idle_in[place[node]] -= row[ODD_IDLE] if row[BUILD] < 0 else idle_gpus(row, builds[row[BUILD]])
        for column in range(WIDTH):
            row[column] = base[node, column]
        row[STATE] |= held
        idle_in[place[node]] += row[ODD_IDLE] if row[BUILD] < 0 else idle_gpus(row, builds[row[BUILD]])
        sums[node, SUM_IS_KNOWN] = 0
        log[logged & (len(log) - 1)] = node
        logged += 1
    return logged


@_compiled
def hold(rows, nodes, log, logged):
    """Those that were held are so no more, and the others are."""
    for node in nodes:
        rows[node, STATE] ^= HELD
        log[logged & (len(log) - 1)] = node
        logged += 1
    return logged


@_compiled
def free_pieces(rows, s, compat, keys):
    """(largest memory, largest compute, all memory, all compute) that is free on GPUs which the task might have had:
    of nodes that let it in, of its model, with something left of both."""
    largest_mib, largest_milli, mib, milli = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    for node in range(len(rows)):
        row = rows[node]
        key = keys[s, node]
        if row[BUILD] < 0 or row[STATE] & HELD or (key < 0 and key >= -1 - R_LABELS):
            continue
        match = compat[s, row[BUILD]]
        for n in range(row[COUNT]):
            if match >> n & 1:
                mib += row[PIECES + n]
                milli += row[PIECES + GPUS + n]
                if row[PIECES + n] > 0 and row[PIECES + GPUS + n] > 0:
                    largest_mib = max(largest_mib, row[PIECES + n])
                    largest_milli = max(largest_milli, row[PIECES + GPUS + n])
    return largest_mib, largest_milli, mib, milli


@njit(cache=True)
def node_values(rows, builds, cpu_prices, values, whole, step_mib, models):
    """(worth of the nodes of each model at equal prices, nodes by whole GPUs, free compute), for the next prices."""
    worth, idle, milli = np.zeros(models, np.float64), np.zeros(GPUS + 1, np.int64), np.int64(0)
    bounds = np.zeros(8, np.int64)
    for node in range(len(rows)):
        row = rows[node]
        if row[BUILD] < 0 or row[STATE] & (HELD - 1) or row[COUNT] == 0:
            continue
        build = builds[row[BUILD]]
        worth[row[MODEL]] += _bounds(
            row, build, cpu_prices, values, whole, step_mib, 0, 0, 0, 0, bounds
        )  # fmt: skip
        idle[idle_gpus(row, build)] += 1
        for n in range(row[COUNT]):
            milli += row[PIECES + GPUS + n]
    return worth, idle, milli


@njit(cache=True)
def knapsack(compute, memory, worth, steps, memory_steps):
    """values[r, m]: the most that sizes, each as often as one likes, pay for r steps of compute and m of memory."""
    values = np.zeros((steps + 1, memory_steps + 1), np.int64)
    for r in range(1, steps + 1):
        for m in range(memory_steps + 1):
            best = values[r - 1, m]
            if m and values[r, m - 1] > best:
                best = values[r, m - 1]
            for n in range(len(compute)):
                if compute[n] <= r and memory[n] <= m:
                    paid = worth[n] + values[r - compute[n], m - memory[n]]
                    if paid > best:
                        best = paid
            values[r, m] = best
    return values


@njit(cache=True)
def best_pattern(compute, memory, prices, steps, memory_steps):
    """(how often each size stands in the pattern that pays most for one GPU, what it pays)."""
    values = np.zeros((steps + 1, memory_steps + 1), np.float64)
    taken = np.full((steps + 1, memory_steps + 1), -1, np.int64)
    for r in range(1, steps + 1):
        for m in range(memory_steps + 1):
            best, how = values[r - 1, m], np.int64(-1)
            if m and values[r, m - 1] > best:
                best, how = values[r, m - 1], np.int64(-2)
            for n in range(len(compute)):
                if compute[n] <= r and memory[n] <= m:
                    paid = prices[n] + values[r - compute[n], m - memory[n]]
                    if paid > best + 1e-12:
                        best, how = paid, n
            values[r, m], taken[r, m] = best, how
    pattern = np.zeros(len(compute), np.int64)
    r, m = steps, memory_steps
    while r > 0:
        how = taken[r, m]
        if how == -1:
            r -= 1
        elif how == -2:
            m -= 1
        else:
            pattern[how] += 1
            r -= compute[how]
            m -= memory[how]
    return pattern, values[steps, memory_steps]
