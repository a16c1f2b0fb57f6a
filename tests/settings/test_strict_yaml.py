"""YAML for settings: the core schema, and syntax that presets reject. Reference: the table of YAML 1.2.2, 10.3.2."""

import math

import pytest

from lean_ft.settings.strict_yaml import MAX_BYTES, Plain, parse_yaml, read_yaml_file, to_yaml


@pytest.mark.parametrize(
    ("texts", "value"),
    [
        ("null ~", None),
        ("true True", True),
        ("False", False),
        ("0", 0),
        ("-19", -19),
        ("0o14", 12),
        ("0x3A", 58),
        ("014", 14),
        ("1_000", 1000),
        ("0. -0.0", 0.0),
        (".5", 0.5),
        ("+12e03", 12000.0),
        ("-2E+05", -200000.0),
        ("1e-5", 1e-5),
        (".inf", float("inf")),
        ("-.Inf", float("-inf")),
        *((text, text) for text in ["yes", "off", "12:30", "2024-01-01", "1e", "-", ".", "0x", "1.2.3", "nullable"]),
    ],
)
def test_plain_scalars(texts, value):
    for text in texts.split():
        read = Plain(text).value()
        assert (read, type(read)) == (value, type(value))


def test_other_documents(tmp_path):
    assert math.isnan(Plain(".nan").value())
    for text in ("'1'", '"true"', "'null'"):
        assert parse_yaml(text)[0] == text[1:-1]  # quoted values are text
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_yaml_file(tmp_path / "bom.yaml") == ({"a": "1"}, {"a": 1})
    assert parse_yaml("") == parse_yaml("# only a comment\n") == (None, {})


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("a: 1\nb: &x 2\n", 2, "anchors"),
        ("a: 1\nb: *x\n", 2, "anchors"),
        ("a: !!python/object:os.system x\n", 1, "tags"),
        ("a: !!str 3\n", 1, "tags"),
        ("a: 1\nb: 2\na: 3\n", 3, "'a' is set twice (first in line 1)"),
        ("g:\n  a: 1\n  a: 2\n", 3, "'a' is set twice (first in line 2)"),
        ("l:\n  - {a: 1, a: 2}\n", 2, "'a' is set twice"),
        ("? [a]\n: 1\n", 1, "expected a name before the colon, found a list"),
        ("a: [1\nb: 2\n", 2, "not valid YAML"),
        ("a: 1\n\tb: 2\n", 2, "not valid YAML"),
        ("a: 1\n---\nb: 2\n", 2, "not valid YAML"),
        ("a: \x00\n", None, "not valid YAML"),
        ("[" * 5000, 1, "nested more than"),
        ("- " * 5000, 1, "nested more than"),
    ],
)
def test_what_is_refused_names_file_and_line(tmp_path, text, line, reason):
    file = tmp_path / "preset.yaml"
    file.write_text(text)
    with pytest.raises(ValueError) as refused:
        read_yaml_file(file)
    assert str(refused.value).startswith(f"{file}, line {line}: " if line else f"{file}: ")
    assert reason in str(refused.value)


def test_large_and_binary_files_are_refused(tmp_path):
    large, binary = tmp_path / "large.yaml", tmp_path / "binary.yaml"
    large.write_bytes(b"#" * (MAX_BYTES + 1))
    binary.write_bytes(b"a: \xff\xfe")
    with pytest.raises(ValueError, match="larger than"):
        read_yaml_file(large)
    with pytest.raises(ValueError, match="UTF-8"):
        read_yaml_file(binary)


def test_to_yaml_quotes_what_either_version_of_yaml_would_misread():
    assert to_yaml({"a": "no", "b": "1e5", "c": "x"}) == "a: 'no'\nb: '1e5'\nc: x\n"
    assert to_yaml([0.9, None, "x"], flow=True) == "[0.9, null, x]"
    assert to_yaml("x", flow=True) == "x"
