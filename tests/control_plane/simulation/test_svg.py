"""Charts as SVG: what is drawn where, and text that is escaped."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from control_plane.simulation.svg import POINTS_MOST, Chart, Panel, Series, number

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*series: Series, **given: bool) -> ET.Element:
    chart = Chart("title & <co>", "hours", (Panel("panel", "devices", series, **given),), ("a note",))
    return ET.fromstring(chart.svg())


def places(root: ET.Element) -> list[list[tuple[float, float]]]:
    """Of each line with straight segments."""
    found = []
    for path in root.iter(f"{SVG}path"):
        numbers = re.findall(r"[ML]([-0-9.]+) ([-0-9.]+)", path.attrib["d"])
        found.append([(float(x), float(y)) for x, y in numbers])
    return found


def test_higher_values_are_drawn_higher_and_later_ones_to_the_right() -> None:
    ((first, second, third),) = places(drawn(Series("a", [0.0, 1.0, 2.0], [0.0, 5.0, 2.5])))
    assert first[0] < second[0] < third[0]
    assert second[1] < third[1] < first[1], "y grows downwards"
    assert first[1] - third[1] == third[1] - second[1]


def test_text_is_escaped() -> None:
    root = drawn(Series("<b>&", [0, 1], [1, 2]))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "title & <co>" in texts and "<b>&" in texts and "a note" in texts


def test_steps_hold_a_value_until_the_next() -> None:
    root = drawn(Series("a", [0.0, 1.0], [1.0, 2.0], steps=True))
    (path,) = root.iter(f"{SVG}path")
    assert re.fullmatch(r"M[-0-9.]+ [-0-9.]+H[-0-9.]+V[-0-9.]+", path.attrib["d"])


def test_logarithmic_axes_give_each_decade_the_same_length() -> None:
    ((first, second, third),) = places(drawn(Series("a", [1, 10, 100], [1, 10, 100]), log_x=True, log_y=True))
    assert abs((second[0] - first[0]) - (third[0] - second[0])) < 0.2
    assert abs((second[1] - first[1]) - (third[1] - second[1])) < 0.2


def test_long_lines_are_thinned_and_keep_their_peaks() -> None:
    ys = [1.0] * 20_000
    ys[12_345] = 50.0
    (line,) = places(drawn(Series("a", list(range(20_000)), ys)))
    assert len(line) <= POINTS_MOST + 2
    assert min(y for _, y in line) < max(y for _, y in line) - 100


def test_nothing_and_single_values_can_be_drawn() -> None:
    drawn(Series("empty", [], []))
    drawn(Series("one", [1.0], [3.0], points=True, labels=["30"]))
    drawn(Series("flat", [0.0, 1.0], [0.0, 0.0]), log_y=True)


def test_numbers_have_three_digits() -> None:
    assert [number(value) for value in (0.0, 0.25, 12.0, 999.0, 1000.0, 12345.0, 2.5e6)] == [
        "0", "0.25", "12", "999", "1k", "12.3k", "2.5M",
    ]  # fmt: skip
