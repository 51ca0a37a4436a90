"""The moments of jobs, most of them in order; against a plain mapping."""

from __future__ import annotations

from random import Random

from coordinator.moments import Moments


def test_the_next_moment_is_that_of_a_plain_mapping() -> None:
    random = Random(2)
    plain: dict[str, int] = {}
    moments, now_ms = Moments(plain, lambda job, at_ms: plain.get(job) == at_ms), 0
    popped, longest, in_order, latest_ms = 0, 0, 0, 0
    for step in range(30_000):
        job = f"j{random.randrange(500)}"
        chance = random.random()
        if chance < 0.6:
            at_ms = now_ms + (1_000 if random.random() < 0.7 else random.randrange(-5, 1_000))
            if plain.get(job) != at_ms:
                plain[job] = at_ms
                moments.add(job, at_ms)
            in_order += at_ms >= latest_ms
            latest_ms = max(latest_ms, at_ms)
        elif chance < 0.8:
            plain.pop(job, None)
        else:
            now_ms += random.randrange(8)
            while (due := moments.pop(now_ms)) is not None:
                assert plain[due] == min(plain.values()) <= now_ms
                del plain[due]
                popped += 1
        longest = max(longest, len(moments))
        if step % 50 == 0:
            assert moments.next_ms == min(plain.values(), default=None)
    assert popped > 500
    assert 5_000 < in_order < 15_000
    assert len(plain) < longest < 2_000
