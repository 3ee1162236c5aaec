"""A frame as a Markdown table."""

from __future__ import annotations

import polars as pl

from stowage.flows.benchmarks.markdown import markdown


def test_words_on_the_left_numbers_on_the_right_and_nothing_where_nothing_is() -> None:
    frame = pl.DataFrame({"who": ["a|b", None], "share": [0.5, float("nan")], "text": ["1", "2"]})
    table = markdown(frame, headings={"share": "of it"}, formats={"share": lambda x: f"{x:.0%}"}, right=["text"])
    assert table == "| who | of it | text |\n|---|---:|---:|\n| a\\|b | 50% | 1 |\n|  |  | 2 |"


def test_a_table_without_rows_has_its_head() -> None:
    assert markdown(pl.DataFrame({"a": []}, schema={"a": pl.Int64})) == "| a |\n|---:|"


def test_values_without_a_format_and_columns_of_structs() -> None:
    frame = pl.DataFrame({"n": [12345], "x": [0.12345], "ok": [True], "pair": [{"a": 1}]})
    table = markdown(frame, formats={"pair": lambda pair: f"{pair['a']} of 2"})
    assert table == "| n | x | ok | pair |\n|---:|---:|---|---:|\n| 12,345 | 0.1235 | yes | 1 of 2 |"


def test_headings_may_be_equal() -> None:
    table = markdown(pl.DataFrame({"a": [1], "b": [2]}), headings={"a": "same", "b": "same"})
    assert table.splitlines()[0] == "| same | same |"
