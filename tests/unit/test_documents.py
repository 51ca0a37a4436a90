from decimal import Decimal
from time import process_time

import pytest

from jobspecs.documents import MAX_DEPTH, MAX_DOCUMENT_BYTES, DocumentInvalid, parse_json, parse_yaml


def test_yaml_means_what_it_looks_like():
    """Norway, octal, base 60 and dates stay text; fractions keep their digits."""
    text = "a: no\nb: 010\nc: 1:30\nd: 2024-01-01\ne: 1.10\nf: true\ng:\nh: -5\ni: .nan\nj: 5-00:00:00\nk: 0x10\nl: 1_0"
    assert parse_yaml(text) == {
        "a": "no", "b": "010", "c": "1:30", "d": "2024-01-01", "e": Decimal("1.10"), "f": True, "g": None, "h": -5,
        "i": ".nan", "j": "5-00:00:00", "k": "0x10", "l": "1_0",
    }  # fmt: skip


def test_json_keeps_digits_and_text():
    """AP-4: odd names come through byte for byte."""
    name = "¯\\_(ツ)_/¯"
    assert parse_json('{"name": "¯\\\\_(ツ)_/¯", "compute": 0.10}') == {
        "name": name,
        "compute": Decimal("0.10"),
    }
    assert parse_yaml("name: ¯\\_(ツ)_/¯") == {"name": name}
    assert parse_json(b"\xef\xbb\xbf{}") == {}


BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3", "line 3: the key 'a' stands twice"), ("a: {b: 1, b: 2}", "stands twice"),
        (BOMB, "aliases"), ("[" * 50, "nested deeper"), ("a: " * 3, "not YAML"), ("--- 1\n--- 2", "one document"),
        ("!!python/object/apply:os.system [ls]", "tags"), ("!!binary aGk=", "tags"), ("1: 2", "a key must be text"),
        ("[1]: 2", "a key must be text"), ("? {a: 1}\n: 2", "a key must be text"), ("a: " + "9" * 6000, "too many digits"),
        ("a: 1e99999999999999999999", "too many digits"), ("a: \x01", "character"), ("a:\n\t- b", "not YAML"),
        ("x" * (MAX_DOCUMENT_BYTES + 1), "bytes"),
    ],
)  # fmt: skip
def test_yaml_refused(text, said):
    with pytest.raises(DocumentInvalid) as error:
        parse_yaml(text)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a":1,"a":2}', "stands twice"), ('{"a":NaN}', "NaN"), ('{"a":-Infinity}', "Infinity"), ("{", "not JSON"),
        ("[" * 100_000, "nested deeper"), ('{"a":' * 17, "nested deeper"), ('{"a":' + "9" * 6000 + "}", "too many digits"),
        ('{"a":1e99999999999999999999}', "too many digits"), (b"\xff", "UTF-8"), ("", "not JSON"), ("01", "not JSON"),
        (" " * (MAX_DOCUMENT_BYTES + 1), "bytes"),
    ],
)  # fmt: skip
def test_json_refused(text, said):
    with pytest.raises(DocumentInvalid) as error:
        parse_json(text)
    assert said in str(error.value)


def test_brackets_in_json_text_are_not_nesting():
    assert parse_json('["' + "[{" * 100 + '\\""]') == ["[{" * 100 + '"']
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert str(parse_json(deep)) == deep
    assert parse_yaml(deep) == parse_json(deep)


@pytest.mark.parametrize("text", ['"' + '\\"' * 500_000, '"' * 500_001, "\\" * 500_000, '"a\\' * 250_000])
def test_no_json_text_costs_more_than_its_length(text):
    """The search for strings that are not closed must not start again at each quote."""
    started = process_time()
    with pytest.raises(DocumentInvalid):
        parse_json(text)
    assert process_time() - started < 5  # a second search for each of the quotes would take hours
