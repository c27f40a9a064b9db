"""The page in a real browser, used as a person would: with mouse, wheel and keys.

Chromium and its driver are looked for on the PATH; where either is missing these tests are skipped.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from wavetrain.errors import InputError, UnknownNameError
from wavetrain.schedule.timeline import Timeline
from wavetrain.view.page import write_page
from wavetrain.view.server import ViewServer

from .conftest import MakeTimeline

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="no chromium and chromedriver found (Debian: apt install chromium chromium-driver)"
)

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,860",
)
PATIENCE = 60


class Reader:
    """Someone who looks at the page: what they can do and what they see."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        # A blank page first: going from one fragment of a page to another would not load it again.
        self.driver.get("about:blank")
        self.driver.get(address)
        self.settle()

    def open_file(self, path: Path, timelines: list[Timeline]) -> None:
        write_page(path, timelines)
        self.open(path.as_uri())

    def settle(self) -> None:
        self.driver.execute_async_script("const done = arguments[0]; wavetrainView.settled().then(() => done());")

    def state(self) -> dict[str, Any]:
        self.settle()
        state: dict[str, Any] = self.driver.execute_script("return wavetrainView.state()")
        return state

    def shown_seconds(self) -> float:
        state = self.state()
        return float(state["t1"] - state["t0"])

    def where(self, at: int, kind: str, stage: int, micro_batch: int) -> tuple[int, int]:
        self.settle()
        place = self.driver.execute_script("return wavetrainView.locate(...arguments)", at, kind, stage, micro_batch)
        return round(place["x"]), round(place["y"])

    def point_at(self, point: tuple[int, int]) -> None:
        actions = ActionChains(self.driver, duration=20)
        actions.w3c_actions.pointer_action.move_to_location(*point)
        actions.perform()
        self.settle()

    def click_at(self, point: tuple[int, int]) -> None:
        self.point_at(point)
        ActionChains(self.driver).click().perform()
        self.settle()

    def wheel(self, point: tuple[int, int], pixels: int, *, shift: bool = False) -> None:
        from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

        actions = ActionChains(self.driver)
        if shift:
            actions.key_down(Keys.SHIFT)
        actions.scroll_from_origin(ScrollOrigin.from_viewport(*point), 0, pixels)
        if shift:
            actions.key_up(Keys.SHIFT)
        actions.perform()
        self.settle()

    def drag(self, start: tuple[int, int], by: int, *, steps: int = 10, shift: bool = False) -> None:
        if shift:
            ActionChains(self.driver).key_down(Keys.SHIFT).perform()
        actions = ActionChains(self.driver, duration=10)
        pointer = actions.w3c_actions.pointer_action
        pointer.move_to_location(*start)
        pointer.pointer_down()
        for step in range(1, steps + 1):
            pointer.move_to_location(start[0] + by * step // steps, start[1])
        pointer.pointer_up()
        actions.perform()
        if shift:
            ActionChains(self.driver).key_up(Keys.SHIFT).perform()
        self.settle()

    def press(self, *keys: str) -> None:
        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()
            self.settle()

    def find(self, css: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def text(self, css: str) -> str:
        return str(self.find(css).text)

    def row(self, at: int) -> str:
        return self.text(f"#summary tr[data-timeline='{at}']")

    def pixel(self, point: tuple[int, int]) -> tuple[int, int, int]:
        script = """
            const canvas = document.getElementById("canvas"), box = canvas.getBoundingClientRect();
            const ratio = canvas.width / box.width;
            const data = canvas.getContext("2d").getImageData(
              Math.round((arguments[0] - box.left) * ratio), Math.round((arguments[1] - box.top) * ratio), 1, 1).data;
            return [...data];"""
        r, g, b, _ = self.driver.execute_script(script, *point)
        return r, g, b

    def wait_for(self, what: Callable[[], bool]) -> None:
        WebDriverWait(self.driver, PATIENCE, poll_frequency=0.05).until(lambda _: what())

    def complaints(self) -> list[str]:
        """Errors of the console, such as an exception or a breach of the page's policy."""
        errors = [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
        return [text for text in errors if "400 (Bad Request)" not in text]


def start_browser(profile: Path) -> Any:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(PATIENCE)
    return driver


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with ExitStack() as stack:
        driver = start_browser(tmp_path_factory.mktemp("profile"))
        stack.callback(driver.quit)
        yield driver


@pytest.fixture
def reader(browser: Any) -> Iterator[Reader]:
    browser.get_log("browser")
    someone = Reader(browser)
    yield someone
    assert someone.complaints() == []


@pytest.fixture
def one(reader: Reader, make_timeline: MakeTimeline, tmp_path: Path) -> Reader:
    reader.open_file(tmp_path / "one.html", [make_timeline(4, 6, hop_latency=0.25, memory_cap=6)])
    return reader


def test_hovering_an_action_tells_about_it(one: Reader) -> None:
    assert not one.find("#tooltip").is_displayed()
    one.point_at(one.where(0, "B", 1, 0))
    text = one.text("#tooltip")
    for words in (
        "Backward of stage 1, micro-batch 0",
        "rank\n1",
        "time\n14.25 s – 16.25 s",
        "duration\n2 s",
        "waited for\ngradients of stage 2 from rank 2: sent 14 s, arrived 14.25 s; rank 1 idled 7 s",
        "sends\ngradients to rank 0, there 16.5 s, used 16.5 s",
        "holds\n5 micro-batches of at most 6 after it",
    ):
        assert words in text, text
    one.point_at((5, 5))
    assert not one.find("#tooltip").is_displayed()


def test_hovering_idle_time_and_ranks(one: Reader) -> None:
    x, y = one.where(0, "F", 1, 0)
    left, _ = one.where(0, "F", 0, 0)
    one.point_at((left, y))
    assert "Rank 1 idle (warm-up)" in one.text("#tooltip")
    assert "next\nF of stage 1, micro-batch 0" in one.text("#tooltip")
    one.point_at((40, y))
    assert "Rank 1" in one.text("#tooltip")
    assert "imbalance" in one.text("#tooltip")
    assert x > left


def test_boxes_are_coloured_by_kind(one: Reader) -> None:
    def beside_the_number(*action: Any) -> tuple[int, int, int]:
        x, y = one.where(0, *action)
        return one.pixel((x, y - 9))

    assert beside_the_number("F", 1, 2) == (0x00, 0x72, 0xB2)
    assert beside_the_number("B", 1, 2) == (0xD5, 0x5E, 0x00)


def test_wheel_zooms_at_the_pointer(one: Reader) -> None:
    before = one.shown_seconds()
    point = one.where(0, "B", 2, 3)
    one.wheel(point, -400)
    assert one.shown_seconds() < before / 1.5
    x, _ = one.where(0, "B", 2, 3)
    assert abs(x - point[0]) <= 2, "what is under the pointer stays there"
    one.wheel(point, 4000)
    assert one.shown_seconds() == pytest.approx(before)


def test_keys_and_buttons_zoom_pan_and_fit(one: Reader) -> None:
    whole = one.shown_seconds()
    one.press("+", "+")
    closer = one.state()
    assert closer["t1"] - closer["t0"] < whole / 2
    one.press(Keys.ARROW_RIGHT)
    assert one.state()["t0"] > closer["t0"]
    one.press(Keys.ARROW_LEFT)
    assert one.state()["t0"] == pytest.approx(closer["t0"])
    one.press("-")
    assert one.shown_seconds() > closer["t1"] - closer["t0"]
    one.press("0")
    assert one.shown_seconds() == pytest.approx(whole)
    for button, smaller in (("zoom-in", True), ("zoom-out", False), ("zoom-in", True)):
        before = one.shown_seconds()
        one.find(f"#{button}").click()
        assert (one.shown_seconds() < before) is smaller
    one.find("#fit").click()
    assert one.shown_seconds() == pytest.approx(whole)


def test_dragging_moves_and_shift_wheel_too(one: Reader) -> None:
    one.press("+", "+", "+")
    start = one.state()
    one.drag((700, 500), -200)
    moved = one.state()
    assert moved["t0"] > start["t0"]
    assert moved["t1"] - moved["t0"] == pytest.approx(start["t1"] - start["t0"])
    one.wheel((700, 500), -150, shift=True)
    assert one.state()["t0"] < moved["t0"]


def test_shift_drag_zooms_to_a_stretch(one: Reader) -> None:
    (x0, y), (x1, _) = one.where(0, "F", 0, 1), one.where(0, "F", 0, 4)
    one.drag((x0, y), x1 - x0, shift=True)
    state = one.state()
    assert (state["t0"], state["t1"]) == pytest.approx((1.5, 4.5), abs=0.1)


def test_toggles(one: Reader) -> None:
    off_path = one.where(0, "F", 0, 3)
    on_path = one.where(0, "F", 0, 0)

    def colour(point: tuple[int, int]) -> tuple[int, int, int]:
        return one.pixel((point[0], point[1] - 9))

    before = colour(off_path)
    button = one.find("#toggle-critical")
    button.click()
    one.settle()
    assert button.get_attribute("aria-pressed") == "true"
    assert colour(off_path) != before, "what is off the critical path fades"
    assert colour(on_path) == before
    one.press("c")
    assert colour(off_path) == before
    row_before = one.where(0, "F", 1, 0)[1]
    one.press("h")
    assert one.state()["show"]["memory"] is True
    assert one.where(0, "F", 1, 0)[1] != row_before, "the memory curve takes room below each lane"
    one.find("#toggle-messages").click()
    assert one.state()["show"] == {"critical": False, "memory": True, "messages": False}


def test_selecting_with_mouse_and_keys(one: Reader) -> None:
    one.click_at(one.where(0, "F", 2, 1))
    assert "Forward of stage 2, micro-batch 1" in one.text("#selection")
    one.press("n")
    assert "Forward of stage 2, micro-batch 2" in one.text("#selection")
    one.press("k")
    assert "of stage 1" in one.text("#selection")
    one.press("f")
    assert one.shown_seconds() < 10
    one.press(Keys.ESCAPE)
    assert not one.find("#selection").is_displayed()


def test_help_lists_the_keys(one: Reader) -> None:
    one.press("?")
    assert one.find("#help").is_displayed()
    assert "critical path" in one.text("#help")
    one.press(Keys.ESCAPE)
    assert not one.find("#help").is_displayed()


def test_all_controls_can_be_reached_by_tab(one: Reader) -> None:
    reached = set()
    for _ in range(12):
        ActionChains(one.driver).send_keys(Keys.TAB).perform()
        reached.add(one.driver.execute_script("return document.activeElement.id"))
    toggles = {"toggle-critical", "toggle-messages", "toggle-memory"}
    assert reached >= toggles | {"zoom-in", "zoom-out", "fit", "show-help", "canvas"}


def test_two_timelines_share_an_axis(reader: Reader, make_timeline: MakeTimeline, tmp_path: Path) -> None:
    slow = make_timeline(4, 6, name="plain", hop_latency=0.5)
    quick = make_timeline(4, 6, name="<b>split</b>", split=True)
    reader.open_file(tmp_path / "two.html", [slow, quick])
    assert "plain" in reader.row(0)
    assert f"{slow.makespan:g} s" in reader.row(0)
    second = reader.row(1)
    assert "<b>split</b>" in second, "a name is text"
    assert f"{100 * quick.bubble:.1f} %" in second
    assert f"−{100 * (1 - quick.makespan / slow.makespan):.1f} %" in second
    assert reader.where(0, "F", 0, 3)[0] == reader.where(1, "F", 0, 3)[0]
    assert reader.where(0, "F", 0, 3)[1] < reader.where(1, "F", 0, 3)[1]
    reader.wheel(reader.where(1, "F", 0, 3), -300)
    assert reader.where(0, "F", 0, 3)[0] == reader.where(1, "F", 0, 3)[0]
    reader.point_at(reader.where(1, "W", 1, 0))
    assert "Backward-weight of stage 1, micro-batch 0" in reader.text("#tooltip")
    assert not reader.find("#panel").is_displayed(), "a file has no controls"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colour_schemes(one: Reader, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    one.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        one.settle()
        one.wait_for(lambda: (sum(one.pixel((300, 250))) > 380) == (scheme == "light"))
        background = one.driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert background == {"light": "rgb(246, 247, 249)", "dark": "rgb(15, 19, 25)"}[scheme]
    finally:
        one.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_link_keeps_what_was_shown(one: Reader) -> None:
    one.press("c", "+", "+")
    shown = one.state()
    one.wait_for(lambda: "show=critical" in one.driver.current_url and "t=" in one.driver.current_url)
    one.open(one.driver.current_url)
    again = one.state()
    assert again["show"] == shown["show"]
    assert (again["t0"], again["t1"]) == pytest.approx((shown["t0"], shown["t1"]))


@pytest.fixture
def server(make_timeline: MakeTimeline) -> Iterator[ViewServer]:
    def simulate(given: Mapping[str, str]) -> list[Timeline]:
        def one(name: str) -> Timeline:
            if name not in ("gpipe", "split"):
                raise UnknownNameError("schedule", name, ("gpipe", "split"))
            ranks, micro_batches = int(given["ranks"]), int(given["micro_batches"])
            if ranks < 1:
                raise InputError(f"{ranks} ranks: a pipeline needs at least 1")
            return make_timeline(ranks, micro_batches, name=name, split=name == "split", forward=float(given["forward"]))

        return [one(name) for key in ("schedule", "compare") if (name := given.get(key))]

    settings = {"schedule": "gpipe", "ranks": "3", "micro_batches": "4", "forward": "1"}
    with ViewServer(simulate, names=["gpipe", "split"], settings=settings) as running:
        yield running


def enter(reader: Reader, name: str, value: str) -> None:
    field = reader.find(f"#panel [name={name}]")
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys(value)


def test_controls_simulate_live(reader: Reader, server: ViewServer) -> None:
    reader.open(server.url)
    reader.wait_for(lambda: reader.state()["state"] == "current" and "gpipe" in reader.row(0))
    assert "18 s" in reader.row(0)
    Select(reader.find("#panel [name=schedule]")).select_by_visible_text("split")
    reader.wait_for(lambda: reader.state()["state"] == "current" and "split" in reader.row(0))
    assert "W backward-weight" in reader.text("#legend")
    enter(reader, "ranks", "5")
    reader.wait_for(lambda: reader.state()["timelines"][0]["actions"] == 5 * 4 * 3)
    Select(reader.find("#panel [name=compare]")).select_by_visible_text("gpipe")
    reader.wait_for(lambda: len(reader.state()["timelines"]) == 2)
    assert "+" in reader.row(1)
    reader.wait_for(lambda: "compare=gpipe" in reader.driver.current_url)
    reader.open(reader.driver.current_url)
    reader.wait_for(lambda: len(reader.state()["timelines"]) == 2)
    assert [t["name"] for t in reader.state()["timelines"]] == ["split", "gpipe"]
    assert reader.find("#panel [name=ranks]").get_attribute("value") == "5"


def test_a_refusal_is_shown_and_old_results_do_not_look_current(reader: Reader, server: ViewServer) -> None:
    reader.open(server.url)
    reader.wait_for(lambda: reader.state()["state"] == "current" and len(reader.state()["timelines"]) == 1)
    enter(reader, "ranks", "0")
    reader.wait_for(lambda: reader.state()["state"] == "refused")
    assert reader.text("#refusal") == "0 ranks: a pipeline needs at least 1"
    assert "Not simulated" in reader.text("#stale")
    assert reader.driver.execute_script("return getComputedStyle(document.getElementById('scroller')).filter") != "none"
    enter(reader, "ranks", "2")
    reader.wait_for(lambda: reader.state()["state"] == "current")
    assert not reader.find("#refusal").is_displayed()
    assert reader.state()["timelines"][0]["actions"] == 2 * 4 * 2


def test_a_link_to_an_unknown_schedule_is_refused_in_words(reader: Reader, server: ViewServer) -> None:
    reader.open(f"{server.url}#schedule=gpip&ranks=2&micro_batches=2&forward=1")
    reader.wait_for(lambda: reader.state()["state"] == "refused")
    assert "did you mean 'gpipe'" in reader.text("#refusal")


def test_a_server_that_is_gone_is_told(reader: Reader, make_timeline: MakeTimeline) -> None:
    with ViewServer(lambda given: [make_timeline()], names=["gpipe"], settings={"schedule": "gpipe"}) as short_lived:
        reader.open(short_lived.url)
        reader.wait_for(lambda: len(reader.state()["timelines"]) == 1)
    enter(reader, "ranks", "7")
    reader.wait_for(lambda: reader.state()["state"] == "refused")
    assert "still running?" in reader.text("#refusal")
    reader.driver.get_log("browser")  # Chromium's own line about the lost connection


def test_a_hundred_thousand_actions_pan_smoothly(reader: Reader, make_timeline: MakeTimeline, tmp_path: Path) -> None:
    reader.open_file(tmp_path / "big.html", [make_timeline(32, 128, waves=4, hop_latency=0.01)])
    assert reader.state()["timelines"][0]["actions"] == 98_304
    watch = """
        window.ticks = []; window.watching = true; wavetrainView.frames.length = 0;
        (function tick(now) { ticks.push(now); if (watching) requestAnimationFrame(tick); })(performance.now());"""
    for zooms in (1, 7, 4):  # from all in view to boxes with numbers and arrows
        reader.press(*["+"] * zooms)
        before = reader.state()
        reader.driver.execute_script(watch)
        reader.drag((900, 500), -400, steps=60)
        ticks, draws = reader.driver.execute_script("watching = false; return [ticks, wavetrainView.frames]")
        assert reader.state()["t0"] > before["t0"]
        intervals = [b - a for a, b in itertools.pairwise(ticks)]
        print(
            f"\n{before['t1'] - before['t0']:.4g} s in view: a frame every {statistics.median(intervals):.1f} ms (median), "
            f"{max(intervals):.1f} ms at most; drawing took {statistics.median(draws):.1f} ms (median)"
        )
        assert statistics.median(draws) < 250, "ten times what a slow machine without a graphics card needs"
