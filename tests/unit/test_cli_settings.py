"""Flag, then environment, then file, then default."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.cli.exits import Stop
from coordinator.cli.settings import DEFAULT_ADDRESS, resolve


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "serai"
    folder.mkdir()
    (folder / "config.yaml").write_text("address: http://file:1\ntoken: from-file\ntenant: team-file\n")
    return {"XDG_CONFIG_HOME": str(tmp_path)}


def test_file(env: dict[str, str]) -> None:
    found = resolve({}, env)
    assert (found.address, found.token, found.tenant) == ("http://file:1", "from-file", "team-file")


def test_environment_goes_before_the_file(env: dict[str, str]) -> None:
    found = resolve(
        {}, env | {"SERAI_ADDRESS": "http://env:1", "SERAI_TOKEN": "from-env", "SERAI_TENANT": "team-env"}
    )
    assert (found.address, found.token, found.tenant) == ("http://env:1", "from-env", "team-env")


def test_flags_go_before_the_environment(env: dict[str, str]) -> None:
    flags = {"address": "http://flag:1", "token": "from-flag"}
    found = resolve(flags, env | {"SERAI_ADDRESS": "http://env:1", "SERAI_TOKEN": "from-env"})
    assert (found.address, found.token, found.tenant) == ("http://flag:1", "from-flag", "team-file")


def test_a_token_file_of_the_environment_goes_before_a_token_of_the_file(
    env: dict[str, str], tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("  from-token-file\n")
    assert resolve({}, env | {"SERAI_TOKEN_FILE": str(secret)}).token == "from-token-file"


def test_default(tmp_path: Path) -> None:
    found = resolve({}, {"XDG_CONFIG_HOME": str(tmp_path)})
    assert (found.address, found.token) == (DEFAULT_ADDRESS, "")


@pytest.mark.parametrize(
    ("text", "code"), [("adress: http://x", 2), ("- a", 2), ("a: [", 2), ("token_file: /nosuch/file", 5)]
)
def test_a_bad_file_says_what_is_wrong(tmp_path: Path, text: str, code: int) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(Stop) as caught:
        resolve({}, {"SERAI_CONFIG": str(file)})
    assert caught.value.code == code


def test_a_named_config_must_be_there() -> None:
    with pytest.raises(Stop):
        resolve({}, {"SERAI_CONFIG": "/nosuch/config.yaml"})
