import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.reasons import Reason, ReasonCode
from vgpu.sentences import TEMPLATES, sentence

C = ReasonCode
WORDS = {"subject", "subjects", "others", "detail"}
NAMES = sorted(
    {
        name
        for text in TEMPLATES.values()
        for name in re.findall(r"\w+(?=[|}])", text)
        if not name.endswith("_millionths")
    }
    - WORDS
    | {"nodes", "not_enough_cpu", "gpu_model_differs", "something_new_mib"}
)


def test_every_code_has_a_sentence():
    assert set(TEMPLATES) == set(ReasonCode)


@pytest.mark.parametrize("code", list(ReasonCode))
def test_every_name_of_a_template_is_in_a_part_that_may_be_left_out(code):
    outside = re.sub(r"\[[^\]]*\]", "", TEMPLATES[code])
    assert "{" not in outside
    assert "[" not in outside
    assert "]" not in outside


@pytest.mark.parametrize("code", list(ReasonCode))
def test_a_bare_reason_reads_as_a_sentence(code):
    text = sentence(Reason(code))
    assert not re.search(r"[\[\]{}]|\s{2}|\s$|^[\s;:,]|[;:,]$|\(\)|\s[,;:]", text), text


@given(
    st.sampled_from(ReasonCode),
    st.dictionaries(st.sampled_from(NAMES), st.integers(-(10**9), 10**9)),
    st.lists(st.sampled_from(["n1", "team-a", "GPU-1", "odd {name}"]), max_size=12),
    st.sampled_from(["", "no such image", "two\nlines {x}"]),
)
def test_no_negative_count_and_no_placeholder_property(code, numbers, subjects, detail):
    """QT-6: no text says that minus 18 of 40 fit."""
    reason = Reason(code, numbers, tuple(subjects), detail)
    text = sentence(reason)
    assert not re.search(r"(?<![\w-])-\d", re.sub(r"code -\d+", "", text)), text
    assert not re.search(r"\{(?!name\}|x\})", text)
    assert "\n" not in text


def test_what_is_overdrawn_is_shown_as_nothing_left():
    """The companion of the property: a negative figure reaches the text, as 0."""
    reason = Reason(C.NOT_ENOUGH_TOTAL_MEMORY, {"free_memory_mib": -5, "needed_memory_mib": 10})
    assert sentence(reason) == "too little free GPU memory in all: needs 10 MiB, 0 MiB free"


def test_waiting_counts_each_filter_in_the_order_of_the_filters():
    """QF-1: why it waits, with the largest free piece and what is needed."""
    numbers = {
        "not_enough_gpu_memory": 9,
        "gpu_model_differs": 3,
        "nodes": 12,
        "needed_memory_mib": 20480,
        "largest_free_memory_mib": 10240,
    }
    assert sentence(Reason(C.NOT_ENOUGH_GPU_MEMORY, numbers)) == (
        "waits: of 12 nodes 3 have another GPU model, "
        "9 lack GPU memory (largest free piece 10240 MiB, needs 20480 MiB)"
    )


def test_free_compute_is_shown_as_a_part_of_a_gpu():
    """FR-2: the largest free piece is 0.10 of a GPU."""
    numbers = {"not_enough_gpu_compute": 1, "largest_free_compute_milli": 100, "needed_compute_milli": 180}
    assert sentence(Reason(C.NOT_ENOUGH_GPU_COMPUTE, numbers)) == (
        "waits: of 1 node 1 lacks GPU compute (largest free piece 10%, needs 18%)"
    )


def test_waiting_as_placement_tells_it():
    """FR-3: what is free in all beside the largest piece, and nothing that is beside the point."""
    numbers = {
        "nodes": 1, "tasks": 1, "not_enough_gpu_compute": 1, "gpus": 1, "compute_milli": 600, "memory_mib": 1024,
        "largest_free_memory_mib": 30000, "largest_free_compute_milli": 400, "total_free_memory_mib": 60000,
        "total_free_compute_milli": 800, "cpu_milli": 1000, "node_memory_mib": 1024,
    }  # fmt: skip
    assert sentence(Reason(C.NOT_ENOUGH_GPU_COMPUTE, numbers)) == (
        "waits: of 1 node 1 lacks GPU compute (largest free piece 40%, 80% free in all, needs 60%)"
    )
    assert sentence(Reason(C.HELD_FOR_LONG_WAIT, numbers, ("j1",))).startswith(
        "waits: free GPUs are kept for a job that has waited longer: j1: of 1 node"
    )


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (Reason(C.EXIT_CODE, {"exit_code": 3, "task": 1}), "exited with code 3 (task 1)"),
        (
            Reason(C.NODE_NOT_READY, {"silent_seconds": 90}, ("n1",)),
            "the node n1 has not reported for 1 min 30 s",
        ),
        (Reason(C.LAUNCH_FAILED, detail="no such\n  device"), "could not be started: no such device"),
        (Reason(C.PLACED, subjects=("n1", "n2")), "placed on n1, n2"),
        (Reason(C.PLACED, {"nodes": 2, "gpus": 4}, ("n1", "n2")), "placed on n1, n2: 4 GPUs"),
        (
            Reason(C.OUT_OF_MEMORY, {"task": 0, "limit_memory_mib": 64}),
            "task 0: ran out of memory; its limit was 64 MiB; ask for more memory",
        ),
        # a number that nobody wrote a sentence for is shown all the same
        (Reason(C.STARTED, {"waited_seconds": 61}, ("n1",)), "started on n1 (waited 1 min 1 s)"),
        # a share may be negative, since a tenant may be above its quota
        (
            Reason(
                C.CHOSEN,
                {"space_millionths": -125_000, "time_millionths": 100_000, "priority_millionths": -225_000},
                ("team-a",),
            ),
            "the turn of its tenant team-a: priority -0.225 = space share -0.125 - time share 0.1",
        ),
    ],
)
def test_sentences(reason, expected):
    assert sentence(reason) == expected
