import re
from pathlib import Path

import pytest

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.simulator.budgets import Budgets, parse_budgets, read_budgets

DOCUMENT = Path(__file__).parents[2] / "docs/formats/budgets.md"
EXAMPLE = re.findall(r"```toml\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)[0]


def parse(text: str) -> Budgets:
    return parse_budgets(text.encode(), "ci/budgets.toml")


def test_the_documented_example() -> None:
    budgets = parse(EXAMPLE)
    assert {key: limit.limit for key, limit in budgets.overall().items()} == {
        "package_size": 12e6,
        "peak_memory": 200e6,
        "memory_headroom": 20.0,
        "final_loss": 0.5,
        "metric_floor": 0.9,
        "step_latency": 50.0,
    }
    assert budgets.overall()["step_latency"].level == "warn"
    pixel = budgets.for_device("google/pixel-8a", "android")
    assert pixel["step_latency"].limit == pytest.approx(40.0)
    assert pixel["step_latency"].level == "error"
    assert pixel["peak_memory"].limit == 150e6
    assert pixel["time_to_finish"].limit == 600.0
    assert budgets.for_device("raspberrypi/pi-5", "linux")["peak_memory"].limit == 200e6
    assert set(budgets.narrowed("google/pixel-4a", "android")) == {"peak_memory"}


def test_locations_are_lines_of_the_file() -> None:
    lines = EXAMPLE.splitlines()
    budgets = parse(EXAMPLE)
    placed = [*budgets.overall().values(), *budgets.narrowed("google/pixel-8a", "android").values()]
    keys = [*budgets.overall(), *budgets.narrowed("google/pixel-8a", "android")]
    for key, limit in zip(keys, placed, strict=True):
        name, line = limit.location.rsplit(":", 1)
        assert name == "ci/budgets.toml"
        assert lines[int(line) - 1].startswith(f"{key} =")
    dotted = parse('budgets.peak_memory = "1 MB"').overall()["peak_memory"]
    assert dotted.location == "ci/budgets.toml:1"
    inline = parse('budgets = { peak_memory = "1 MB" }').overall()["peak_memory"]
    assert inline.location == "ci/budgets.toml (budgets.peak_memory)"


@pytest.mark.parametrize(
    "text",
    ["", "# nothing", "[budgets]", "[class.ios]\n[device.x]"],
)
def test_empty_files_set_no_limit(text: str) -> None:
    assert parse(text).for_device("x", "ios") == {}


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("[budget]", "budget", "did you mean 'budgets'"),
        ('[budgets]\npeek_memory = "1 MB"', "budgets.peek_memory", "did you mean 'peak_memory'"),
        ("[budgets]\npeak_memory = 12", "budgets.peak_memory", 'such as "20 MB"'),
        ("[budgets]\nstep_latency = 12", "budgets.step_latency", 'such as "50 ms"'),
        ('[budgets]\npeak_memory = "12"', "budgets.peak_memory", "with a unit"),
        ('[budgets]\npeak_memory = "12 Mb"', "budgets.peak_memory", "did you mean MB"),
        ('[budgets]\npeak_memory = "12 ms"', "budgets.peak_memory", "not a unit of bytes"),
        ('[budgets]\npeak_memory = "-1 MB"', "budgets.peak_memory", "with a unit"),
        ("[budgets]\nmemory_headroom = 0.2", "budgets.memory_headroom", "percentage"),
        ('[budgets]\nmemory_headroom = "100 %"', "budgets.memory_headroom", "below 100 %"),
        ('[budgets]\nfinal_loss = "0.5"', "budgets.final_loss", "without quotes"),
        ("[budgets]\nfinal_loss = nan", "budgets.final_loss", "finite"),
        ("[budgets]\nfinal_loss = true", "budgets.final_loss", "finite number"),
        ("[budgets]\nfinal_loss = 1979-05-27", "budgets.final_loss", "finite number"),
        ('[budgets]\nfinal_loss = { limit = 1, lvl = "warn" }', "final_loss.lvl", "'level'"),
        ('[budgets]\nfinal_loss = { level = "warn" }', "final_loss.limit", "is missing"),
        ('[budgets]\nfinal_loss = { limit = 1, level = "w" }', "final_loss.level", "not one of"),
        ("[budgets]\nfinal_loss = []", "budgets.final_loss", "finite number"),
        ("[class.andriod]", "class.andriod", "did you mean 'android'"),
        ("[class]\nandroid = 1", "class.android", "must be a table"),
        ('[device."a/b"]\nx = 1', 'device."a/b".x', "unknown key"),
        ("budgets = 1", "budgets", "must be a table"),
    ],
)
def test_wrong_budgets_are_named_in_one_line(text: str, key: str, message: str) -> None:
    with pytest.raises(OdtpackError) as caught:
        parse(text)
    error = caught.value
    assert error.code == "budgets-invalid"
    assert key in error.what
    assert message in error.what
    assert "\n" not in error.what
    assert (error.where or "").startswith("ci/budgets.toml")


def test_wrong_line_is_named() -> None:
    with pytest.raises(OdtpackError) as caught:
        parse('[budgets]\nfinal_loss = 1\n\n[device."a/b"]\n  step_latency = "5 km"\n')
    assert caught.value.where == "ci/budgets.toml:5"


def test_malformed_and_absent_files(tmp_path: Path) -> None:
    with pytest.raises(OdtpackError, match="not valid TOML"):
        parse("[budgets")
    with pytest.raises(OdtpackError, match="does not exist"):
        read_budgets(tmp_path / "budgets.toml")
    path = tmp_path / "budgets.toml"
    path.write_bytes(b"#" * 70_000)
    with pytest.raises(OdtpackError, match="larger than"):
        read_budgets(path)
    path.write_text(EXAMPLE, "utf-8")
    assert read_budgets(path).overall()["package_size"].location == f"{path}:2"


def test_misspelt_device_is_refused() -> None:
    budgets = parse('\n[device."google/pixel-8"]\n')
    with pytest.raises(OdtpackError, match="did you mean 'google/pixel-8a'") as caught:
        budgets.check_devices(["google/pixel-8a"])
    assert caught.value.where == "ci/budgets.toml:2"
