"""The tables and the picture in README.md and docs are what bench/report.py makes of the committed results."""

import re
import struct

import pytest

from bench import report

RESULTS = report.load()


@pytest.mark.parametrize("path", report.documents(), ids=lambda path: path.name)
def test_tables_are_those_of_the_results(path):
    text = path.read_text()
    assert report.render(text, RESULTS) == text, "run python -m bench report"


def test_every_result_with_a_table_is_shown():
    shown = {name for path in report.documents() for _, name, _ in report.BLOCK.findall(path.read_text())}
    assert shown == {"summary", *report.TABLES.keys() & RESULTS.keys()}


@pytest.mark.skipif("mla" not in RESULTS, reason="no results of MLA decode")
def test_picture_is_of_the_results():
    data, at, found = report.PLOT.read_bytes(), 8, None
    while at < len(data):  # chunks of a PNG: length, type, data, checksum
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        if kind == b"tEXt":
            key, value = data[at + 8 : at + 8 + length].split(b"\0")
            found = value.decode() if key.decode() == report.DIGEST else found
        at += 12 + length
    assert found == report.digest(RESULTS["mla"]), "run python -m bench report"


def decode_row(**times):
    times = {name: {"us": us, "over_floor": us / 10, "GB/s": 1, "TFLOP/s": 2} for name, us in times.items()}
    shape = dict(rows=2, heads=32, context=8192, varied=True, floor_us=10.0)
    return shape | {"times": {name.replace("_", " "): t for name, t in times.items()}}


def decode_results(*rows):
    about = dict(card="CARD", date="DATE", versions={"jax": "1", "python": "2"}, driver="3")
    return {"mla": about | {"rows": list(rows)}}


def test_ratios_are_ours_over_theirs():
    row = decode_row(ours=12.0, FlashMLA=16.0, FlashMLA_with_schedule=24.0, SGLang_Triton=1200.0)
    text = report.mla(decode_results(row))
    line = "| 2 x 32 x 8192, varied | 10.0 | 12.0 | 1.20 | 1 | 2 | 16.0 | 0.75 | 24.0 | 0.50 | 1,200 | 0.01 |"
    assert line in text.splitlines()
    assert "CARD, driver 3, jax 1; DATE" in text
    lines = report.summary(decode_results(row, decode_row(ours=10.0, FlashMLA=10.0))).splitlines()
    assert "| MLA decode | FlashMLA | 0.88 | 0.75 to 1.00 | 2 |" in lines
    assert "|  | SGLang, Triton | 0.01 | 0.01 to 0.01 | 1 |" in lines


def test_what_was_not_measured_is_left_empty():
    text = report.mla(decode_results(decode_row(FlashMLA=16.0)))
    assert "| 2 x 32 x 8192, varied | 10.0 |  |  |  |  | 16.0 |  |  |  |  |  |" in text.splitlines()
    assert "MLA decode" not in report.summary(decode_results(decode_row(ours=1.0)))


def test_tables_replace_what_stood_there_and_nothing_else():
    text = "a\n<!-- bench: mla -->\nold\n<!-- /bench -->\nb | c\n<!-- bench: mla -->\n<!-- /bench -->\n"
    once = report.render(text, decode_results(decode_row(ours=12.0)))
    assert once.startswith("a\n<!-- bench: mla -->\n| rows x heads")
    assert "old" not in once
    assert "\n<!-- /bench -->\nb | c\n<!-- bench: mla -->\n| rows" in once
    assert report.render(once, decode_results(decode_row(ours=12.0))) == once


@pytest.mark.parametrize(
    "text, words",
    [
        ("<!-- bench: nothing -->\n<!-- /bench -->\n", "no table named 'nothing'"),
        ("<!-- bench: mla -->\n", "needs its own"),
        ("<!-- bench: mla -->\n<!-- bench: mla -->\n<!-- /bench -->\n", "needs its own"),
        ("<!-- /bench -->\n", "needs its own"),
    ],
)
def test_bad_comments_are_errors(text, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        report.render(text, decode_results(decode_row(ours=12.0)))
