"""Compiled: where the equal tasks of a gang go, by the rules of `coordinator.gangs`, which stay the readable form and
the oracle of the tests.

Nodes stand in order of zone, rack and name, so a domain of the tree is a range of them. The tables are those of
`coordinator.kernels`.
"""

from __future__ import annotations

import numpy as np

from coordinator.kernels import (
    BUILD,
    COUNT,
    CPU,
    GPUS,
    MEMORY,
    NOTHING,
    PIECES,
    S_COUNT,
    S_CPU,
    S_GPU_MEMORY,
    S_MEMORY,
    S_MILLI,
    S_WHOLE,
    SETS,
    SUM_IS_KNOWN,
    SUM_WIDTH,
    WIDTH,
    _answer,
    _compiled,
    _free_mask,
    _inlined,
    _is_idle,
    _least_cost,
    _worst_connected,
    idle_gpus,
    isolation_of,
)

# What the functions work in: a row, its sums, the bounds of a task on it; behind it, as long as the gang each, what the
# tasks got on a node that is tried, and the nodes and amounts of a domain that is tried.
_SUMMED = WIDTH + SUM_WIDTH
WORK = _SUMMED + 8
# columns of the tree: (place, zone) of each node
PLACE, ZONE = 0, 1


@_compiled
def _stand(row, sums, shape, build, kept, prices, cpu_prices, values, whole, step_mib, scratch):
    """The set of GPUs that one more task would get; -1 where it does not fit. Which whole GPUs it gets is a question
    of communication alone, so the prices are looked at for slices only."""
    if not shape[S_WHOLE] or not shape[S_COUNT]:
        answer, chosen = _answer(
            row, shape, build, kept, True, prices, cpu_prices, values, whole, step_mib, sums, scratch
        )
        return np.int64(chosen) if answer >= 0 else np.int64(-1)
    mask, reason = _free_mask(row, shape, build, kept)
    if reason or row[CPU] < shape[S_CPU] or row[MEMORY] < shape[S_MEMORY]:
        return np.int64(-1)
    if shape[S_COUNT] == 1:
        return np.int64(1) << _worst_connected(row, build, mask)
    chosen, _, _ = _least_cost(build, mask, shape[S_COUNT])
    return np.int64(chosen)


@_compiled
def _fill_node(
    rows, node, shape, builds, kept, prices, cpu_prices, values, whole, step_mib, work, most, codes, first
):
    """Puts up to so many tasks on the node, one after the other: (how many, the GPUs of all of them). What each got
    stands in `codes` from `first` on, as `kernels.choose` tells it."""
    row, sums, scratch = work[:WIDTH], work[WIDTH:_SUMMED], work[_SUMMED:]
    for column in range(WIDTH):
        row[column] = rows[node, column]
    sums[SUM_IS_KNOWN] = 0
    build = builds[row[BUILD]]
    used, count = np.int64(0), 0
    while count < most:
        chosen = _stand(row, sums, shape, build, kept, prices, cpu_prices, values, whole, step_mib, scratch)
        if chosen < 0:
            break
        names = np.int64(0)
        for n in range(row[COUNT]):
            if chosen >> n & 1:
                name = isolation_of(kept, row[PIECES + 2 * GPUS + n])
                names = names << 4 | name
                row[PIECES + n] -= build[n] if shape[S_GPU_MEMORY] < 0 else shape[S_GPU_MEMORY]
                row[PIECES + GPUS + n] -= shape[S_MILLI]
                row[PIECES + 2 * GPUS + n] |= np.int64(1) << name
        row[CPU] -= shape[S_CPU]
        row[MEMORY] -= shape[S_MEMORY]
        sums[SUM_IS_KNOWN] = 0
        codes[first + count] = chosen << 32 | names
        used |= chosen
        count += 1
    return count, used


@_compiled
def _capacity(
    rows, node, shape, builds, kept, prices, cpu_prices, values, whole, step_mib, work, most
):  # fmt: skip
    """How many of the tasks the node takes, at most `most`. Whole GPUs are counted; slices are tried."""
    if shape[S_COUNT] and not shape[S_WHOLE]:
        count, _ = _fill_node(
            rows, node, shape, builds, kept, prices, cpu_prices, values, whole, step_mib, work,
            most, work[WORK:], 0,
        )  # fmt: skip
        return count
    row, count = rows[node], most
    if shape[S_COUNT]:
        mask, reason = _free_mask(row, shape, builds[row[BUILD]], kept)
        free = 0
        for n in range(GPUS):
            free += mask >> n & 1
        count = min(count, free // shape[S_COUNT]) if reason == 0 else 0
    if shape[S_CPU] > 0:
        count = min(count, row[CPU] // shape[S_CPU])
    if shape[S_MEMORY] > 0:
        count = min(count, row[MEMORY] // shape[S_MEMORY])
    return count


@_compiled
def capacities(
    rows, shapes, s, builds, compat, prices, cpu_prices, values, whole, step_mib, work,
    keys, most, room, left_mib, idle,
):  # fmt: skip
    """Of each node how many of the tasks it takes, its free GPU memory and its whole GPUs; 0 where none fits. Returns
    how many all of them take."""
    shape, total = shapes[s], np.int64(0)
    for node in range(len(rows)):
        room[node] = 0
        if keys[s, node] < 0:
            continue
        row = rows[node]
        room[node] = _capacity(
            rows, node, shape, builds, compat[s, row[BUILD]],
            prices, cpu_prices, values, whole, step_mib, work, most,
        )  # fmt: skip
        total += room[node]
        left_mib[node] = 0
        for n in range(GPUS):
            left_mib[node] += row[PIECES + n]
        idle[node] = idle_gpus(row, builds[row[BUILD]])
    return total


@_compiled
def _set_of(rows, node, shape, builds, kept, prices, cpu_prices, values, whole, step_mib, work, count, known):
    """The GPUs that so many tasks get on the node. Where whole GPUs are asked for and all idle ones can be had, that
    follows from which are idle: `known` holds what was found for nodes alike."""
    row = rows[node]
    build = builds[row[BUILD]]
    if shape[S_WHOLE] and shape[S_COUNT]:
        mask, _ = _free_mask(row, shape, build, kept)
        idle = np.int64(0)
        for n in range(row[COUNT]):
            idle |= np.int64(_is_idle(row, build, n)) << n
        if mask == idle:
            used = known[row[BUILD], mask, count]
            if used < 0:
                _, used = _fill_node(
                    rows, node, shape, builds, kept, prices, cpu_prices, values, whole, step_mib, work,
                    count, work[WORK:], 0,
                )  # fmt: skip
                known[row[BUILD], mask, count] = used
            return used
    _, used = _fill_node(
        rows, node, shape, builds, kept, prices, cpu_prices, values, whole, step_mib, work,
        count, work[WORK:], 0,
    )  # fmt: skip
    return used


@_compiled
def best_single(
    rows, shapes, s, builds, compat, prices, cpu_prices, values, whole, step_mib, work,
    room, left_mib, idle, name_order, most, known, nodes, amounts,
):  # fmt: skip
    """The one node that takes all tasks at the least cost; then with the fewest whole GPUs, the least free memory, the
    first name. Answers as `best_domain`."""
    best, best_cost = -1, NOTHING
    for node in range(len(rows)):
        if room[node] < most:
            continue
        b = rows[node, BUILD]
        used = _set_of(
            rows, node, shapes[s], builds, compat[s, b], prices, cpu_prices, values, whole, step_mib, work,
            most, known,
        )  # fmt: skip
        cost = builds[b, SETS + used]
        if cost < best_cost or (cost == best_cost and _is_before(node, best, idle, left_mib, name_order)):
            best, best_cost = node, cost
    nodes[0], amounts[0] = best, most
    return 0 if best < 0 else 1


@_inlined
def _is_before(first, second, idle, left_mib, name_order):
    if idle[first] != idle[second]:
        return idle[first] < idle[second]
    if left_mib[first] != left_mib[second]:
        return left_mib[first] < left_mib[second]
    return name_order[first] < name_order[second]


@_inlined
def _between(tree, first, second, costs):
    """Communication cost between two nodes: see `vgpu.topology.node_cost`."""
    if tree[first, PLACE] == tree[second, PLACE]:
        return costs[0]
    return costs[1] if tree[first, ZONE] == tree[second, ZONE] else costs[2]


@_compiled
def _greedy(start, end, room, left_mib, idle, name_order, tree, costs, most, ends, nodes, amounts):
    """Fills the nodes of a range one after the other, each time the one that takes most of what is left; closest to
    the last one; with the fewest whole GPUs, the least free memory, the first name. (How many nodes; cost between
    them), or (0, 0) where they do not take all."""
    left, count, cost = most, 0, np.int64(0)
    while left > 0:
        best = -1
        for node in range(start, end):
            amount = min(room[node], left)
            if amount == 0:
                continue
            is_taken = False
            for n in range(count):
                is_taken = is_taken or nodes[n] == node
            if is_taken:
                continue
            if best < 0 or amount > min(room[best], left):
                best = node
                continue
            if amount < min(room[best], left):
                continue
            if count:
                near, other = (
                    _between(tree, node, nodes[count - 1], costs),
                    _between(tree, best, nodes[count - 1], costs),
                )
                if near != other:
                    best = node if near < other else best
                    continue
            if _is_before(node, best, idle, left_mib, name_order):
                best = node
        if best < 0:
            return 0, cost
        amount = min(room[best], left)
        for n in range(count):
            cost += ends * ends * amount * amounts[n] * _between(tree, best, nodes[n], costs)
        nodes[count], amounts[count] = best, amount
        count += 1
        left -= amount
    return count, cost


@_compiled
def best_domain(
    rows, shapes, s, builds, compat, prices, cpu_prices, values, whole, step_mib, work,
    room, left_mib, idle, name_order, most, known, nodes, amounts, tree, costs, starts,
):  # fmt: skip
    """The domain, one of the ranges between `starts`, whose nodes take all tasks at the least cost; then with the
    fewest whole GPUs, the least free memory, the first name. Returns how many nodes it takes, 0 where none does; they
    stand in `nodes`, and how many tasks each gets in `amounts`."""
    ends = max(np.int64(1), shapes[s, S_COUNT])
    best_count, best_cost, best_idle, best_left, best_name = 0, NOTHING, NOTHING, NOTHING, NOTHING
    try_nodes, try_amounts = work[WORK + most : WORK + 2 * most], work[WORK + 2 * most :]
    for d in range(len(starts) - 1):
        members, total = 0, np.int64(0)
        sum_idle, sum_left, first_name = np.int64(0), np.int64(0), NOTHING
        for node in range(starts[d], starts[d + 1]):
            if room[node]:
                members += 1
                total += room[node]
                sum_idle += idle[node]
                sum_left += left_mib[node]
                first_name = min(first_name, name_order[node])
        if members < 2 or total < most:
            continue
        count, cost = _greedy(
            starts[d], starts[d + 1], room, left_mib, idle, name_order, tree, costs, most, ends,
            try_nodes, try_amounts,
        )  # fmt: skip
        if count == 0 or cost > best_cost:
            continue  # what the nodes cost inside comes on top
        for n in range(count):
            node = try_nodes[n]
            b = rows[node, BUILD]
            used = _set_of(
                rows, node, shapes[s], builds, compat[s, b], prices, cpu_prices, values, whole, step_mib, work,
                try_amounts[n], known,
            )  # fmt: skip
            cost += builds[b, SETS + used]
        is_better = cost < best_cost
        if cost == best_cost:
            if sum_idle != best_idle:
                is_better = sum_idle < best_idle
            elif sum_left != best_left:
                is_better = sum_left < best_left
            else:
                is_better = first_name < best_name
        if is_better:
            best_count, best_cost = count, cost
            best_idle, best_left, best_name = sum_idle, sum_left, first_name
            for n in range(count):
                nodes[n], amounts[n] = try_nodes[n], try_amounts[n]
    return best_count


@_compiled
def fill(
    rows, shapes, s, builds, compat, prices, cpu_prices, values, whole, step_mib, work,
    nodes, amounts, used, codes,
):  # fmt: skip
    """What each task gets, node after node, as `kernels.choose` tells it."""
    at = 0
    for n in range(used):
        kept = compat[s, rows[nodes[n], BUILD]]
        _fill_node(
            rows, nodes[n], shapes[s], builds, kept, prices, cpu_prices, values, whole, step_mib, work,
            amounts[n], codes, at,
        )  # fmt: skip
        at += amounts[n]
