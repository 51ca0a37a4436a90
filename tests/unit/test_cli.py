"""The `serai` command against a fake API: exit codes, output formats, names of jobs, words of others, errors."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from coordinator.cli import COMMANDS, WORDS, serai
from tests.fakeapi import Answer, FakeApi, ended, job, page, problem, reason

ID = "0mt7h2kqvx3c9a1b"
Run = Callable[..., Result]


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with FakeApi() as fake:
        yield fake


@pytest.fixture
def run(api: FakeApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    for name in [name for name in os.environ if name.startswith("SERAI_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("SERAI_ADDRESS", api.address)
    monkeypatch.setenv("TZ", "UTC")

    def invoke(*words: str, input: str | None = None) -> Result:
        return CliRunner().invoke(serai, list(words), input=input)

    return invoke


# --- exit codes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, 2), (401, 5), (403, 5), (404, 3), (409, 1), (410, 3), (413, 4), (422, 4), (500, 1), (503, 6)],
)
def test_exit_code_of_each_status(api: FakeApi, run: Run, status: int, code: int) -> None:
    api.on("GET", "/v1/cluster", problem(status, "no"))
    assert run("cluster").exit_code == code


def test_exit_code_when_nobody_is_there(run: Run) -> None:
    found = run("cluster", "--address", "http://127.0.0.1:1")
    assert found.exit_code == 6
    assert "127.0.0.1:1" in found.stderr
    assert "Traceback" not in found.stderr


def test_exit_code_of_what_is_not_serai(api: FakeApi, run: Run) -> None:
    api.on("GET", "/v1/cluster", Answer(200, "<html>"))
    assert run("cluster").exit_code == 8


@pytest.mark.parametrize(("theirs", "code"), [("0.1.7", 0), ("0.2.0", 8), ("1.0.0", 8)])
def test_versions_that_do_not_fit(api: FakeApi, run: Run, theirs: str, code: int) -> None:
    api.on("GET", "/v1/cluster", {"version": theirs})
    found = run("version", "--json")
    assert found.exit_code == code
    assert json.loads(found.stdout)["coordinator"] == theirs


@pytest.mark.parametrize(
    ("view", "code"),
    [
        (ended(ID), 0),
        (ended(ID, "FAILED", 3), 3),
        (ended(ID, "FAILED", 137), 137),
        (ended(ID, "FAILED", 124), 124),
        (ended(ID, "FAILED", None), 125),
        (ended(ID, "CANCELLED", None), 1),
        (ended(ID, "CANCELLED", 143), 143),
        (ended(ID, "FAILED", 0), 125),
    ],
)
def test_wait_exits_with_the_code_of_the_job(
    api: FakeApi, run: Run, view: dict[str, object], code: int
) -> None:
    api.on("GET", f"/v1/jobs/{ID}", view)
    assert run("wait", ID).exit_code == code


def test_wait_with_timeout(api: FakeApi, run: Run) -> None:
    api.on("GET", f"/v1/jobs/{ID}", job(ID))
    found = run("wait", ID, "--timeout", "300ms")
    assert found.exit_code == 7
    assert "goes on" in found.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("nosuch",),
        ("jobs", "--nosuch"),
        ("job",),
        ("wait", ID, "--timeout", "5"),
        ("submit",),
        ("jobs", "-o", "xml"),
    ],
)
def test_usage_errors(run: Run, words: tuple[str, ...]) -> None:
    found = run(*words)
    assert found.exit_code == 2
    assert len(found.stderr.strip().splitlines()) == 1


def test_cluster_tells_what_an_operator_has_to_mend(api: FakeApi, run: Run) -> None:
    """LE-1, LE-11, and records that cannot be read; nothing of it while all is well."""
    well = {
        "nodes": {"ready": 1}, "gpus": 0, "memory_mib": 0, "memory_granted_mib": 0, "compute_milli": 0,
        "compute_granted_milli": 0, "jobs": {}, "leader": None, "revision": 1, "unreadable": 0,
        "silent_together": 0, "clocks_off": {}, "engine": "agent", "version": "1",
    }  # fmt: skip
    api.on("GET", "/v1/cluster", well)
    found = run("cluster").stdout
    assert not any(word in found for word in ("unreadable", "silent", "clocks"))
    api.on("GET", "/v1/cluster", well | {"silent_together": 7, "clocks_off": {"n1": 300, "n2": -60}})
    found = " ".join(run("cluster").stdout.split())
    assert "7 nodes, so none of them is given up" in found
    assert "off on n1 +300 s, n2 -60 s" in found


# --- errors ----------------------------------------------------------------------------------------------------------


def test_an_error_is_one_line_with_field_limit_value_and_hint(api: FakeApi, run: Run) -> None:
    fault = {"field": "gpus.memory", "limit": "80GiB", "value": "200GiB", "message": "too much"}
    api.on("POST", "/v1/jobs", problem(422, "no GPU has so much memory", hint="ask for less", errors=[fault]))
    found = run("submit", "--image", "busybox:1.36")
    assert found.exit_code == 4
    (line,) = found.stderr.splitlines()
    assert all(
        part in line for part in ("no GPU has so much", "gpus.memory", "80GiB", "200GiB", "ask for less")
    )


def test_an_error_as_json(api: FakeApi, run: Run) -> None:
    api.on("GET", "/v1/cluster", problem(422, "bad", field="a", limit=1, value=2, hint="try"))
    found = run("cluster", "--json")
    assert json.loads(found.stderr) == {"error": "bad", "field": "a", "limit": 1, "value": 2, "hint": "try"}
    assert found.stdout == ""


def test_all_faults_of_a_spec_are_shown(api: FakeApi, run: Run) -> None:
    faults = [{"field": f"f{i}", "limit": None, "value": i, "message": f"fault {i}"} for i in range(3)]
    api.on("POST", "/v1/jobs", problem(422, "3 faults", errors=faults))
    text = run("submit", "--image", "x:1").stderr
    assert all(f"fault {i}" in text for i in range(3))


def test_a_fault_of_our_own_is_no_stack_trace(api: FakeApi, run: Run) -> None:
    api.on("GET", "/v1/cluster", {"nothing": "of what it should be"})
    found = run("cluster")
    assert found.exit_code == 1
    assert "Traceback" not in found.stderr
    assert len(found.stderr.splitlines()) == 1


# --- output ----------------------------------------------------------------------------------------------------------


def test_formats_of_a_list(api: FakeApi, run: Run) -> None:
    api.on(
        "GET",
        "/v1/jobs",
        page(job(ID), ended("0mt7h2kqvx3c9a1c", "FAILED", 3, name="other", reason=reason())),
    )
    table = run("jobs").stdout.splitlines()
    assert table[0].split()[:4] == ["ID", "NAME", "TENANT", "STATE"]
    assert [line.split()[0] for line in table[1:]] == [ID, "0mt7h2kqvx3c9a1c"]
    assert "20GiB 50%" in table[1]
    assert "no node has 4 idle GPUs" in table[2]
    assert "SUBMITTED (UTC)" in run("jobs", "-o", "wide").stdout
    assert [item["id"] for item in json.loads(run("jobs", "--json").stdout)["items"]] == [
        ID,
        "0mt7h2kqvx3c9a1c",
    ]
    lines = [json.loads(line) for line in run("jobs", "-o", "jsonl").stdout.splitlines()]
    assert lines[0] == job(ID)
    rows = list(csv.DictReader(io.StringIO(run("jobs", "-o", "csv").stdout)))
    assert (rows[1]["state"], rows[1]["exit_code"], rows[0]["exit_code"]) == ("FAILED", "3", "")
    assert run("jobs", "-q").stdout.split() == [ID, "0mt7h2kqvx3c9a1c"]


def test_no_colour_and_nothing_cut_off_a_terminal(api: FakeApi, run: Run) -> None:
    long = "x" * 400
    api.on("GET", "/v1/jobs", page(job(ID, reason=reason(sentence=long))))
    text = run("jobs").stdout
    assert long in text
    assert "\x1b" not in text


@pytest.mark.parametrize("no_colour", ["", "1"])
def test_a_terminal_gets_colour_and_lines_that_fit(api: FakeApi, run: Run, no_colour: str) -> None:
    api.on("GET", "/v1/jobs", page(job(ID, reason=reason(sentence="y" * 400))))
    text = on_terminal("jobs", env={"NO_COLOR": no_colour, "COLUMNS": "100"})
    plain = text.replace("\x1b[32m", "").replace("\x1b[0m", "").replace("\x1b[1m", "")
    assert all(len(line) <= 100 for line in plain.splitlines())
    assert ("\x1b[" in text) is (not no_colour)


def test_sort_and_filter(api: FakeApi, run: Run) -> None:
    api.on(
        "GET",
        "/v1/jobs",
        page(*(job(f"{i}", priority=p, name=n) for i, p, n in [(1, 5, "a"), (2, 1, "bb"), (3, 3, "ab")])),
    )
    assert run("jobs", "-q", "--sort", "priority").stdout.split() == ["2", "3", "1"]
    assert run("jobs", "-q", "--sort", "-priority").stdout.split() == ["1", "3", "2"]
    assert run("jobs", "-q", "--filter", "name=a").stdout.split() == ["1"]
    assert run("jobs", "-q", "--filter", "name!=a").stdout.split() == ["2", "3"]
    assert run("jobs", "-q", "--filter", "name~b", "--filter", "priority=3").stdout.split() == ["3"]
    assert run("jobs", "--filter", "nosuch=1").exit_code == 2
    assert run("jobs", "--sort", "nosuch").exit_code == 2
    assert run("jobs", "--filter", "bad").exit_code == 2


def test_lists_show_ones_own_and_all_with_a(api: FakeApi, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERAI_TENANT", "vision")
    api.on("GET", "/v1/jobs", page())
    run("jobs")
    run("jobs", "-A")
    run("jobs", "--state", "running", "--state", "PENDING")
    own, everyone, states = (call.query for call in api.calls)
    assert own["tenant"] == "vision"
    assert "tenant" not in everyone
    assert states["state"] == "RUNNING,PENDING"


def test_unknown_is_not_nought(api: FakeApi, run: Run) -> None:
    api.on("GET", "/v1/jobs", page(job(ID, ran_seconds=None)))
    assert "n/a" in run("jobs").stdout


def test_one_job_tells_where_and_why(api: FakeApi, run: Run) -> None:
    api.on("GET", f"/v1/jobs/{ID}", job(ID))
    text = run("job", ID).stdout
    assert all(
        part in text
        for part in (
            "vision had the highest priority",
            "fullest GPU",
            "GPU-1",
            "20GiB, 50%",
            "memory by driver",
            "1m01s",
        )
    )
    assert json.loads(run("job", ID, "--json").stdout) == job(ID)
    assert run("job", ID, "-q").stdout.strip() == ID


# --- which job is meant ----------------------------------------------------------------------------------------------


def test_a_unique_prefix_names_a_job(api: FakeApi, run: Run) -> None:
    api.on("GET", "/v1/jobs", page(), page(job(ID)))
    assert run("job", "0mt7", "-q").stdout.strip() == ID
    assert api.calls[-1].query["id_prefix"] == "0mt7"


def test_a_prefix_of_several_is_refused_with_the_ids(api: FakeApi, run: Run) -> None:
    api.on("GET", "/v1/jobs", page(), page(job(ID), job("0mt7h2kqvx3c9a1c")))
    found = run("job", "0mt7")
    assert found.exit_code == 2
    assert ID in found.stderr


def test_a_name_counts_where_one_live_job_has_it(api: FakeApi, run: Run) -> None:
    api.on("GET", "/v1/jobs", page(ended("0mt7h2kqvx3c9a1c"), job(ID)))
    assert run("job", "train", "-q").stdout.strip() == ID
    api.on("GET", "/v1/jobs", page(job("0mt7h2kqvx3c9a1c"), job(ID)))
    assert run("job", "train").exit_code == 2
    api.on("GET", "/v1/jobs", page(ended(ID)), page())
    found = run("job", "train")
    assert found.exit_code == 3
    assert ID in found.stderr  # the hint names the ended one


def test_a_whole_id_is_asked_for_as_it_is(api: FakeApi, run: Run) -> None:
    api.on("GET", f"/v1/jobs/{ID}", ended(ID))
    assert run("job", ID, "-q").stdout.strip() == ID
    assert len(api.calls) == 1


# --- submitting ------------------------------------------------------------------------------------------------------


def test_submit_from_flags(api: FakeApi, run: Run) -> None:
    api.on("POST", "/v1/jobs", (201, job(ID)))
    words = [
        "--image",
        "reg.local/py:3",
        "--gpus",
        "2",
        "--gpu-memory",
        "20GiB",
        "--gpu-compute",
        "50%",
        "--memory",
        "4GiB",
    ]
    words += ["--cpu", "2", "-e", "A=b=c", "--priority", "-5", "--max-runtime", "1h", "--tenant", "vision"]
    found = run("submit", *words, "--", "python", "-c", "print(1)", "--json")
    assert found.exit_code == 0
    assert found.stdout == f"{ID}\n"  # piped: the id alone
    assert api.calls[0].body == {
        "name": "py",
        "tenant": "vision",
        "image": "reg.local/py:3",
        "command": ["python", "-c", "print(1)", "--json"],
        "gpus": {"count": 2, "memory": "20GiB", "compute": "50%"},
        "memory": "4GiB",
        "cpu": "2",
        "env": {"A": "b=c"},
        "priority": -5,
        "max_runtime": "1h",
    }


def test_submit_from_files(api: FakeApi, run: Run, tmp_path: Path) -> None:
    several = tmp_path / "several.yaml"
    several.write_text("# two\n---\nname: a\nimage: x:1\ncpu: 0.5\n---\nname: b\nimage: x:1\n")
    one = tmp_path / "one.json"
    one.write_text('{"name": "c", "image": "x:1"}')
    api.on("POST", "/v1/jobs", (201, {"items": [job("1"), job("2"), job("3")]}))
    found = run("submit", str(several), str(one), "--priority", "7")
    assert found.stdout.split() == ["1", "2", "3"]
    assert api.calls[0].body == [
        {"name": "a", "image": "x:1", "cpu": 0.5, "priority": 7},
        {"name": "b", "image": "x:1", "priority": 7},
        {"name": "c", "image": "x:1", "priority": 7},
    ]


def test_submit_from_standard_input(api: FakeApi, run: Run) -> None:
    api.on("POST", "/v1/jobs", (201, job(ID)))
    assert run("submit", "-", "--json", input="name: a\nimage: x:1\n").exit_code == 0
    assert api.calls[0].body == {"name": "a", "image": "x:1"}


@pytest.mark.parametrize("text", ["name: [a", "just words", "", "- 1\n", "name: a\nname: b\n"])
def test_a_file_that_is_no_job_is_refused_before_anything_is_sent(api: FakeApi, run: Run, text: str) -> None:
    found = run("submit", "-", input=text)
    assert found.exit_code == 4
    assert not api.calls


def test_a_line_of_a_later_document_is_counted_from_the_top_of_the_file(run: Run) -> None:
    found = run("submit", "-", input="name: a\nimage: x\n---\nname: b\nname: c\n")
    assert "line 5" in found.stderr


def test_a_missing_file(run: Run) -> None:
    assert run("submit", "/nosuch/file.yaml").exit_code == 2


def test_run_shows_the_output_and_exits_with_the_code(api: FakeApi, run: Run) -> None:
    async def logs(request):  # type: ignore[no-untyped-def]
        from aiohttp import web

        return web.Response(text="hello\n" if request.query["stream"] == "stdout" else "oops\n")

    task = job()["tasks"][0] | {"state": "EXITED", "exit_code": 3}
    api.on("POST", "/v1/jobs", (201, job(ID, state="PENDING", tasks=[])))
    api.on("GET", f"/v1/jobs/{ID}", ended(ID, "FAILED", 3, tasks=[task]))
    api.on("GET", f"/v1/jobs/{ID}/logs", logs)
    found = run("run", "--image", "x:1", "--", "false")
    assert found.exit_code == 3
    assert found.stdout == "hello\n"
    assert "oops" in found.stderr


def test_submit_with_wait_and_timeout(api: FakeApi, run: Run) -> None:
    api.on("POST", "/v1/jobs", (201, job(ID)))
    api.on("GET", f"/v1/jobs/{ID}", job(ID))
    assert run("submit", "--image", "x:1", "--wait", "--timeout", "300ms").exit_code == 7
    api.on("GET", f"/v1/jobs/{ID}", ended(ID, "FAILED", 9))
    found = run("submit", "--image", "x:1", "--wait", "--json")
    assert found.exit_code == 9
    assert json.loads(found.stdout)["state"] == "FAILED"


def test_the_output_of_several_tasks_is_told_apart(api: FakeApi, run: Run) -> None:
    async def logs(request):  # type: ignore[no-untyped-def]
        from aiohttp import web

        return web.Response(
            text=f"rank {request.query['task']}\n" if request.query["stream"] == "stdout" else ""
        )

    tasks = [job()["tasks"][0] | {"task": number, "state": "EXITED"} for number in range(2)]
    api.on("GET", f"/v1/jobs/{ID}", ended(ID, tasks=tasks))
    api.on("GET", f"/v1/jobs/{ID}/logs", logs)
    assert sorted(run("logs", "-f", ID).stdout.splitlines()) == ["[0] rank 0", "[1] rank 1"]


# --- the rest --------------------------------------------------------------------------------------------------------


def test_cancel(api: FakeApi, run: Run) -> None:
    api.on("GET", f"/v1/jobs/{ID}", job(ID))
    api.on("POST", f"/v1/jobs/{ID}/cancel", (202, job(ID, state="CANCELLING")))
    found = run("cancel", ID)
    assert found.exit_code == 0
    assert "CANCELLING" in found.stdout


def test_queue(api: FakeApi, run: Run) -> None:
    waiting = {
        "position": 1, "id": ID, "name": "train", "tenant": "vision", "priority": 0, "waited_seconds": 61.0,
        "asked": {"tasks": 1, "gpus": 4, "gpu_memory_mib": None, "gpu_compute_milli": 4000}, "reason": reason(),
    }  # fmt: skip
    turns = [{"tenant": "vision", "space_share": -0.25, "time_share": 1.0, "priority": -1.25}]
    api.on("GET", "/v1/queue", {"items": [waiting], "tenants": turns, "next_cursor": None, "revision": 3})
    text = run("queue").stdout
    assert all(part in text for part in ("1m01s", "no node has 4 idle GPUs", "-1.250"))
    assert json.loads(run("queue", "--json").stdout)["tenants"] == turns
    assert run("queue", "-q").stdout.split() == [ID]


def test_tenants(api: FakeApi, run: Run) -> None:
    view = {
        "name": "vision", "quota_memory_mib": 409600, "limit_memory_mib": None, "limit_compute_milli": None, "weight": 1,
        "used_memory_mib": 655360, "used_compute_milli": 8000, "over_by_memory_mib": 245760, "headroom_memory_mib": 0,
        "running": 2, "waiting": 1, "space_share": -0.288, "time_share": None, "priority": -1.288,
    }  # fmt: skip
    api.on("GET", "/v1/tenants", page(view))
    text = run("tenants").stdout
    assert all(part in text for part in ("400GiB", "640GiB", "240GiB", "n/a", "-1.288"))
    api.on("POST", "/v1/tenants", (201, view))
    assert run("tenants", "create", "vision", "--quota", "400GiB", "--weight", "2").exit_code == 0
    assert api.calls[-1].body == {"name": "vision", "quota_memory": "400GiB", "weight": 2}
    api.on("PATCH", "/v1/tenants/vision", view)
    assert run("tenants", "set", "vision", "--limit-memory", "none").exit_code == 0
    assert api.calls[-1].body == {"limit_memory": None}
    assert run("tenants", "set", "vision").exit_code == 2


def test_tokens_are_shown_once_and_deleted_by_a_prefix(api: FakeApi, run: Run) -> None:
    api.on("POST", "/v1/tokens", (201, {"token": "serai_x", "sha256": "ab12", "role": "admin"}))
    assert run("tokens", "create", "--admin").stdout == "serai_x\n"
    assert run("tokens", "create").exit_code == 2
    listed = [{"sha256": sha, "role": "admin", "tenant": "", "label": ""} for sha in ("ab12", "ab34", "cd56")]
    api.on("GET", "/v1/tokens", page(*listed))
    api.on("DELETE", "/v1/tokens/cd56", Answer(200, ""))
    assert run("tokens", "delete", "ab").exit_code == 2
    assert run("tokens", "delete", "x").exit_code == 3
    assert run("tokens", "delete", "c").exit_code == 0
    assert api.asked("DELETE", "/v1/tokens/cd56")


@pytest.mark.parametrize("word", sorted(WORDS))
def test_words_of_slurm_and_docker_lead_to_ours(run: Run, word: str) -> None:
    ours = run(WORDS[word], "--help")
    found = run(word, "--help")
    assert found.exit_code == 0
    assert found.stdout == ours.stdout


def test_our_word_is_said_on_a_terminal(api: FakeApi, run: Run) -> None:
    api.on("GET", "/v1/jobs", page())
    assert "squeue is called `serai jobs` here" in on_terminal("squeue")


def test_a_word_that_is_nearly_right(run: Run) -> None:
    assert "did you mean 'queue'" in run("quue").stderr


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_a_help(run: Run, name: str) -> None:
    if name in ("coordinator", "agent"):  # they become another program, with its own help
        return
    assert run(name, "--help").exit_code == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(run: Run, shell: str) -> None:
    found = run("completion", shell)
    assert found.exit_code == 0
    assert "_SERAI_COMPLETE" in found.stdout


def test_help_imports_no_client_or_server() -> None:
    """What makes `serai --help` fast is what it does not import."""
    code = "import sys\nfrom coordinator.cli import serai\ntry:\n serai.main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([name for name in ('aiohttp', 'rich', 'grpc', 'yaml', 'msgspec', 'docker') if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.splitlines()[-1] == "[]"


def on_terminal(*words: str, env: dict[str, str] | None = None) -> str:
    """What `serai` writes when its output and its errors are a terminal."""
    main, side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", "from coordinator.cli import main; main()", *words],
        stdin=subprocess.DEVNULL,
        stdout=side,
        stderr=side,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", **(env or {})},
    )
    os.close(side)
    text = b""
    try:
        while chunk := os.read(main, 65536):
            text += chunk
    except OSError:
        pass  # a terminal whose other side is closed
    process.wait(60)
    os.close(main)
    return text.decode().replace("\r\n", "\n")
