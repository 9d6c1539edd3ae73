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


def test_every_table_is_shown_once():
    shown = [name for path in report.documents() for _, name, _ in report.BLOCK.findall(path.read_text())]
    assert sorted(shown) == sorted(report.TABLES)


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


def test_gqa_compares_the_better_implementation():
    t = {"us": 12.0, "over_floor": 1.2, "GB/s": 3}
    row = dict(rows=2, heads=8, kv_heads=2, head_dim=64, context=99, varied=False, floor_us=10.0)
    rows = [
        row | {"times": {"triton": t | {"us": 20.0}, "mosaic": t, "torch SDPA, dense": t | {"us": 16.0}}},
        row | {"times": {"triton": t | {"us": 20.0}, "SGLang Triton": t | {"us": 40.0}}},
    ]
    results = {"gqa": dict(card="CARD", date="DATE", versions={"jax": "1"}, rows=rows)}
    lines = report.gqa(results).splitlines()
    assert "| 2 x 8 / 2 x 64 x 99 | 10.0 | 12.0 | 1.20 | 3 | 20.0 | 16.0 | 0.75 |  |  |" in lines
    assert "| 2 x 8 / 2 x 64 x 99 | 10.0 |  |  |  | 20.0 |  |  | 40.0 |  |" in lines
    assert (
        "| GQA decode | torch SDPA over a dense copy | 0.75 | 0.75 to 0.75 | 1 |"
        in report.summary(results).splitlines()
    )


def test_gqa_over_e4m3_rows_stands_beside_bf16():
    t = {"us": 12.0, "over_floor": 1.2, "GB/s": 3, "relative_error": 2e-3}
    row = dict(
        rows=2, heads=8, kv_heads=2, head_dim=64, context=99, varied=False, floor_us=10.0, e4m3_floor_us=5.0
    )
    times = {
        "mosaic": t,
        "mosaic, e4m3": t | {"us": 6.0, "over_floor": 1.3},
        "triton, e4m3": t | {"us": 24.0},
    }
    results = {"gqa": dict(card="CARD", date="DATE", versions={}, rows=[row | {"times": times}])}
    lines = report.gqa(results).splitlines()
    assert "| 2 x 8 / 2 x 64 x 99 | 10.0 | 12.0 | 1.20 | 3 |" in lines
    assert "| 2 x 8 / 2 x 64 x 99 | 5.00 | 6.00 | 1.30 | 3 | 2.0e-03 | 0.50 | 24.0 | 0.25 |" in lines


def test_gqa_prefill_stands_beside_what_was_measured():
    t = {"us": 12.0, "tflops": 321.4, "relative_error": 2e-3}
    row = dict(rows=2, new=64, cached=0, heads=8, kv_heads=2, head_dim=64, window=None)
    rows = [
        row
        | {"times": {"triton": t, "triton, virtual ids": t | {"us": 13.0}, "cuDNN, dense": t | {"us": 10.0}}},
        row | {"cached": 99, "window": 7, "times": {"triton": t, "xla": t | {"us": 120.0}}},
        row | {"sinks": True, "bias": 9, "times": {"mosaic": t | {"us": 6.0}, "triton": t}},
    ]
    results = {"gqa_prefill": dict(card="CARD", date="DATE", versions={"jax": "1"}, rows=rows)}
    lines = report.gqa_prefill(results).splitlines()
    assert "| 2 x 64 after 0, 8 / 2 x 64 | 12.0 | 321 | 13.0 | 10.0 | 1.20 |  |  |  |  | 2.0e-03 |" in lines
    assert (
        "| 2 x 64 after 99, 8 / 2 x 64, window 7 | 12.0 | 321 |  |  |  | 120.0 | 0.10 |  |  | 2.0e-03 |"
        in lines
    )
    assert (
        "| 2 x 64 after 0, 8 / 2 x 64, sinks, bias of 9 | 6.00 | 321 |  |  |  |  |  | 12.0 | 0.50 | 2.0e-03 |"
        in lines
    )
    assert (
        "| GQA prefill | cuDNN over dense K and V | 1.20 | 1.20 to 1.20 | 1 |"
        in report.summary(results).splitlines()
    )


def test_step_shows_the_difference_and_its_interval():
    row = dict(
        rows=64, context=8192, layers=8, equal_tokens=1.0, equal_logprob_bits=0.5,
        us_per_step={name: {"median": us} for name, us in (("unified", 1234.5), ("static", 1200.0))},
        difference={"median_pct": 0.123, "low_pct": -0.2, "high_pct": 0.5},
    )  # fmt: skip
    text = report.step({"step": dict(card="CARD", date="DATE", versions={}, rows=[row])})
    assert (
        "| 64 x 8192 | 8 | 1,234.5 | 1,200.0 | +0.12 % [-0.20, +0.50] | 100.00% | 50.00% |"
        in text.splitlines()
    )


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


def test_missing_results_are_named_as_such():
    text = report.render("<!-- bench: gqa -->\n<!-- /bench -->\n", decode_results())
    assert text == "<!-- bench: gqa -->\nNot measured yet.\n<!-- /bench -->\n"


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
