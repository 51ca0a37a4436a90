"""One moment for each job, whatever it was before; against a plain mapping."""

from __future__ import annotations

from random import Random

from coordinator.moments import Moments


def test_the_next_moment_is_that_of_a_plain_mapping() -> None:
    random = Random(2)
    moments, plain, now_ms = Moments(), {}, 0
    popped, longest = 0, 0
    for step in range(30_000):
        job = f"j{random.randrange(500)}"
        chance = random.random()
        if chance < 0.6:
            at_ms = now_ms + random.randrange(-5, 1_000)
            moments.set(job, at_ms)
            plain[job] = at_ms
        elif chance < 0.8:
            moments.set(job, None)
            plain.pop(job, None)
        else:
            now_ms += random.randrange(8)
            while (due := moments.pop(now_ms)) is not None:
                assert plain[due] == min(plain.values()) <= now_ms
                assert due == min(job for job, at_ms in plain.items() if at_ms == plain[due])
                del plain[due]
                popped += 1
        longest = max(longest, len(moments._heap))
        if step % 50 == 0:
            assert moments.next_ms == min(plain.values(), default=None)
    assert popped > 500
    assert len(plain) < longest < 2_000
