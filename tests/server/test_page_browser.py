"""The page in a real browser, against a real server with a key and a tiny model."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser import DESKTOP, PHONE, browser, expect, open_page
from tests.server.page_driver import FAINT, KEY, NAMELESS, TEXT, ask, event_stream, keyed, page_of
from tests.server.process import ServerProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["browser", "keyed"]
HOSTILE = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script><b>bold</b>"


def test_the_key_is_requested_and_stored_in_the_tab_only(browser: Browser, keyed: ServerProcess) -> None:
    with open_page(browser, f"{keyed.url}/") as opened:
        page = opened.page
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.wait_for_selector("#key-wrong:not([hidden])")
        page.fill("#key", KEY)
        page.press("#key", "Enter")
        page.wait_for_selector("#set-rule option[value=match]", state="attached")
        assert page.evaluate("Object.values(sessionStorage)") == [KEY]
        assert KEY not in page.evaluate("JSON.stringify(localStorage) + document.cookie + document.body.outerHTML")
        page.reload()
        page.wait_for_selector("#set-rule option[value=match]", state="attached")
        other = page.context.new_page()
        other.goto(f"{keyed.url}/")
        other.wait_for_selector("#key-dialog[open]")
        page.click("#forget-key")
        page.wait_for_selector("#key-dialog[open]")
        page.click("#key-cancel")
        page.wait_for_selector("#banner:not([hidden])")


def test_a_response_streams_with_the_origin_of_its_tokens(browser: Browser, keyed: ServerProcess) -> None:
    with page_of(browser, keyed) as opened:
        page = opened.page
        page.uncheck("#markdown")
        answer = ask(opened, tokens=200)
        drafted = answer.locator("> .text .token:not(.by-target)")
        expect(answer.locator(".foot")).to_contain_text("lossless")
        assert drafted.count() and answer.locator(".round").count() > 5
        expect(page.locator("#figure-split")).to_contain_text("drafting")
        expect(page.locator("#figure-positions li")).not_to_have_count(0)
        assert float(page.inner_text("#figure-speed")) > 0 and float(page.inner_text("#figure-step")) > 1
        response = keyed.http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": TEXT}], "max_tokens": 200, "temperature": 0},
            headers={"Authorization": f"Bearer {KEY}"},
        ).json()
        assert answer.locator("> .text").evaluate("e => e.textContent") == response["choices"][0]["message"]["content"]
        drafted.first.hover()
        card = page.locator("#card")
        expect(card).to_contain_text("drafted by")
        expect(card).to_contain_text("target probability")
        expect(card).to_contain_text(re.compile(r"draft confidence\s*(0\.\d+|1\.000)"))
        opened.screenshot("card")
        page.keyboard.press("Escape")
        expect(card).to_be_hidden()
        page.uncheck("#tint")
        expect(drafted.first).to_have_css("background-color", "rgba(0, 0, 0, 0)")


def test_tokens_are_walked_through_by_keys(browser: Browser, keyed: ServerProcess) -> None:
    with page_of(browser, keyed) as opened:
        page = opened.page
        page.uncheck("#markdown")  # which would hide the characters of Markdown
        answer = ask(opened)
        focused, card = page.locator("*:focus"), page.locator("#card")
        answer.locator("> .text").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        expect(focused).to_have_attribute("data-token", "1")
        expect(focused).to_have_attribute("aria-describedby", "card")
        expect(card).to_contain_text("step")
        page.keyboard.press("End")
        last = answer.locator("> .text .token").last
        expect(last).to_be_focused()
        expect(last).to_have_attribute("data-token", re.compile(r"[1-9]\d"))
        expect(card).to_be_visible()  # also where the page had to scroll to it
        page.locator("#tab-chat").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#view-race")).to_be_visible()
        expect(page.locator("#view-chat")).to_be_hidden()


def test_model_output_is_never_parsed_as_html(browser: Browser, keyed: ServerProcess) -> None:
    """HTML in the user's message and in the output, which a schema forces."""
    with page_of(browser, keyed) as opened:
        page = opened.page
        page.fill("#set-schema", json.dumps({"const": HOSTILE}))
        answer = ask(opened, HOSTILE, tokens=200)
        assert page.locator(".question .text").evaluate("e => e.textContent") == HOSTILE
        assert HOSTILE in json.loads(answer.locator("> .text").evaluate("e => e.textContent"))
        expect(page.locator("#conversation :is(img, script, b)")).to_have_count(0)
        answer.locator(".token").first.hover()
        expect(page.locator("#card")).to_be_visible()
        expect(page.locator("#card :is(img, script, b)")).to_have_count(0)
        assert page.evaluate("window.hacked") is None
        refused = "() => { try { document.body.innerHTML = '<b>x</b>'; return false } catch { return true } }"
        assert page.evaluate(refused), "not even a mistake of ours would be: the browser refuses"
        page.fill("#set-schema", "{not json")
        expect(page.locator("#schema-words")).to_be_visible()
        opened.errors.clear()  # that it was refused is logged


def test_stop_ends_an_answer_and_the_next_one_works(browser: Browser, keyed: ServerProcess) -> None:
    with page_of(browser, keyed) as opened:
        page = opened.page
        slow = page.context.new_cdp_session(page)
        slow.send("Network.emulateNetworkConditions", SLOW_WIRE)
        page.fill("#set-tokens", "900")
        page.fill("#message", TEXT)
        page.click("#send")
        page.wait_for_selector(".answer .token")
        page.click("#stop")
        page.wait_for_selector(".answer:not(.writing) .note:not([hidden])")
        expect(page.locator(".answer .note")).to_have_text("stopped")
        expect(page.locator("#send")).to_be_visible()
        assert 0 < page.locator(".answer .token").count() < 800
        slow.send("Network.emulateNetworkConditions", {**SLOW_WIRE, "downloadThroughput": -1})
        assert ask(opened).locator(".token").count() > 5


def test_a_race_is_run_in_turns_and_replayed(browser: Browser, keyed: ServerProcess) -> None:
    with page_of(browser, keyed) as opened:
        page = opened.page
        bodies: list[dict[str, Any]] = []
        page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
        page.fill("#set-tokens", "60")
        page.click("#tab-race")
        page.fill("#race-prompt", TEXT)
        page.select_option("#race-laps", "3")
        page.click("#race-go")
        page.wait_for_selector("#race-result:not([hidden])")
        expect(page.locator("#race-same")).to_have_text("Same output, token for token")
        expect(page.locator("#race-ratio")).to_contain_text("speedup")
        expect(page.locator("#race-laps-rows tr")).to_have_count(3)
        arms = [body["speculative"] is not False for body in bodies]
        assert arms == [True, False, True, True, False, False, True], "warm, then off and on in turns, each first once"
        assert len({body["cache_salt"] for body in bodies}) == 7 and len({body["seed"] for body in bodies}) == 1
        clocks = page.locator(".lane .clock").all_inner_texts()
        page.select_option("#race-slower", "5")
        expect(page.locator("#race-state")).to_have_text("Replayed 5 times slower; the clocks show measured time.")
        page.wait_for_selector("#race-result:not([hidden])")
        assert page.locator(".lane .clock").all_inner_texts() == clocks
        page.select_option("#race-slower", "1")
        expect(page.locator("#race-state")).to_have_text("Replayed in real time.")
        page.wait_for_selector("#race-result:not([hidden])")
        page.click("#race-replay")
        page.wait_for_selector("#race-result:not([hidden])")
        outputs = [page.locator(f"#lane-{arm} .text").evaluate("e => e.textContent") for arm in ("off", "on")]
        assert outputs[0] == outputs[1] != ""
        expect(page.locator("#lane-off .text .token:not(.by-target)")).to_have_count(0)
        expect(page.locator("#lane-on .text .token:not(.by-target)")).not_to_have_count(0)
        page.select_option("#set-drafter", "none")
        page.click("#race-go")
        page.wait_for_selector("#banner:not([hidden])")


def test_slow_motion_stretches_the_slower_run_to_four_seconds(browser: Browser, keyed: ServerProcess) -> None:
    slower = """async (ends) => (await import("./page/replay.js")).slowMotion(ends.map((end) => ({ end })))"""
    with page_of(browser, keyed) as opened:
        found = [opened.page.evaluate(slower, ends) for ends in ([80, 200], [1500, 400], [9000, 100], [0, 0])]
        assert found == [20, 3, 1, 4000], "and is never faster than measured"


SLOW_WIRE = {"offline": False, "latency": 0, "downloadThroughput": 20_000, "uploadThroughput": -1}


def test_a_race_has_the_machine_for_itself(browser: Browser, keyed: ServerProcess) -> None:
    with page_of(browser, keyed) as opened:
        page, answer = opened.page, ask(opened)
        page.fill("#set-tokens", "900")
        page.context.new_cdp_session(page).send("Network.emulateNetworkConditions", SLOW_WIRE)
        page.click("#tab-race")
        page.fill("#race-prompt", TEXT)
        page.click("#race-go")
        page.wait_for_selector("#race-stop:not([hidden])")
        page.click("#tab-chat")
        page.fill("#message", TEXT)
        page.click("#send")
        expect(page.locator("#banner-words")).to_contain_text("A race is running")
        expect(page.locator(".answer")).to_have_count(1)
        expect(page.locator("#message")).to_have_value(TEXT)  # nothing was sent
        page.click("#banner-close")
        answer.locator(".token").first.hover()
        expect(page.locator("#card")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#card")).to_be_hidden()
        going = page.locator("#race-stop").get_attribute("hidden") is None
        assert going, f"that closed the card and no more: {page.locator('#race-state').text_content()}"
        page.keyboard.press("Escape")
        expect(page.locator("#race-stop")).to_be_hidden()
        expect(page.locator("#race-state")).to_have_text("Stopped.")


def test_settings_reach_the_request(browser: Browser, keyed: ServerProcess) -> None:
    with page_of(browser, keyed) as opened:
        page = opened.page
        bodies: list[dict[str, Any]] = []
        page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
        ask(opened)
        page.select_option("#set-drafter", "suffix")
        page.fill("#set-budget", "2")
        page.fill("#set-seed", "77")
        page.fill("#set-temperature", "0.5")
        page.fill("#set-system", "Be brief.")
        answer = ask(opened, tokens=60)
        usual, asked = bodies
        assert usual["speculative"] == {} and isinstance(usual["seed"], int)
        assert asked["speculative"] == {"drafter": "suffix", "max_draft": 2}
        assert (asked["seed"], asked["temperature"], asked["max_tokens"]) == (77, 0.5, 60)
        assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
        heights = "rounds => rounds.map(each => Number(each.style.getPropertyValue('--drafted')))"
        assert max(answer.locator(".round").evaluate_all(heights)) == 2


def test_the_server_view_shows_load_and_decisions(browser: Browser, keyed: ServerProcess) -> None:
    busy = {"running": 3, "waiting": 2, "pages_held": 5}
    decided = {"drafter": "ngram", "decision": "skipped", "reason": "outdone", "steps": 12}

    def answer(route: Any) -> None:
        response = route.fetch().json()
        response["internal_states"][0] |= busy
        response["speculation"]["decisions"] = [decided]
        route.fulfill(json=response)

    with page_of(browser, keyed) as opened:
        page = opened.page
        ask(opened)
        page.click("#tab-server")
        page.wait_for_selector("#server-drafters tr th")
        drafter, drafted, accepted, rate = page.locator("#server-drafters tr").first.inner_text().split("\t")
        assert drafter in ("ngram", "suffix") and int(drafted) >= int(accepted) and rate.endswith("%")
        expect(page.locator("#server-decisions")).to_contain_text("drafted: ")
        expect(page.locator("#server-decisions")).not_to_contain_text("no decisions yet")
        expect(page.locator("#server-speculation")).to_contain_text("Speculative decoding is on")
        page.route("**/server_info", answer)
        page.wait_for_selector("#server-tiles .tile-value:text-is('3')")
        tiles = dict(zip(*(page.locator(f".tile-{part}").all_inner_texts() for part in ("name", "value")), strict=True))
        assert (tiles["running"], tiles["waiting"]) == ("3", "2")
        (pages,) = [name for name in tiles if name.endswith("pages in use")]
        assert tiles[pages] == "5" and page.locator("#server-tiles meter").get_attribute("value") == "5"
        row = page.locator("#server-decisions tr")
        expect(row).to_have_text(re.compile(r"ngram\s*skipped: another drafter is expected to be faster.*12$"))
        page.unroute("**/server_info")


def test_lossy_rules_are_marked(browser: Browser, keyed: ServerProcess) -> None:
    with page_of(browser, keyed) as opened:
        page = opened.page
        expect(page.locator("#lossy-mark")).to_be_hidden()
        page.select_option("#set-rule", "typical")
        expect(page.locator("#lossy-mark")).to_have_text("Lossy rule: typical")
        expect(page.locator("#rule-words")).to_contain_text("Lossy")
        answer = ask(opened, tokens=80)
        expect(answer.locator(".foot .lossy")).to_contain_text("rule typical, lossy")
        page.fill("#set-temperature", "-1")
        page.fill("#message", TEXT)
        page.click("#send")
        expect(page.locator("#banner-words")).to_contain_text("temperature")
        opened.errors.clear()  # a refusal is logged by the browser


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_page_fits_and_has_enough_contrast(
    browser: Browser, keyed: ServerProcess, size: tuple[int, int], dark: bool
) -> None:
    name = f"{'phone' if size == PHONE else 'desktop'}-{'dark' if dark else 'light'}"
    with page_of(browser, keyed, size, dark) as opened:
        page = opened.page
        opened.screenshot(f"{name}-welcome")
        ask(opened, tokens=90)
        for view in ("chat", "race", "server"):
            page.click(f"#tab-{view}")
            # Without drafts there is a row as well, but without a name.
            page.wait_for_selector("#server-drafters tr th" if view == "server" else f"#view-{view}")
            opened.screenshot(f"{name}-{view}")
            assert opened.overflow == 0
            assert page.evaluate(FAINT) == []
            assert page.evaluate(NAMELESS) == []


REJECTED = {  # a token with a rejected draft token, and an accepted one
    "choices": [
        {
            "delta": {"content": " red fox"},
            "token_details": [
                {"id": 7, "text": " red", "origin": "ngram", "probability": 0.625, "draft_confidence": 0.875,
                 "draft_probability": 0.875, "rejected": []},
                {"id": 8, "text": " fox", "origin": "target", "probability": 0.5, "rejected": [
                    {"id": 9 + i, "text": f" dog{i}", "probability": 0.125, "draft_confidence": 0.25,
                     "draft_probability": None} for i in range(8)]},
            ],
            "rounds": [{"tokens": 2, "drafted": 9, "accepted": 1, "drafter": "ngram", "skipped": None, "at_ms": 1}],
        }
    ],
    "speculation": {"rule": "match", "lossless": True},
}  # fmt: skip


def test_the_card_shows_rejected_draft_tokens_with_both_probabilities(browser: Browser, keyed: ServerProcess) -> None:
    with page_of(browser, keyed) as opened:
        page = opened.page
        page.route("**/v1/chat/completions", lambda route: route.fulfill(**event_stream(REJECTED)))
        tokens, card = ask(opened).locator("> .text .token"), page.locator("#card")
        expect(tokens).to_have_count(2)
        tokens.first.hover()
        expect(card).to_contain_text("drafted by ngram, accepted")
        shown = " ".join(card.inner_text().split())
        assert "draft probability 0.875" in shown
        assert "target probability 0.625" in shown and "rejected" not in shown
        tokens.last.hover()
        expect(card).to_contain_text("sampled by the target after a rejected draft token")
        shown = " ".join(card.inner_text().split())
        assert "drafted here by ngram, rejected" in shown
        assert shown.count("␣dog") == 6 and "and 2 more" in shown
        assert "␣dog0 draft confidence 0.250 target probability 0.125" in shown
        assert "step 1: 9 drafted, 1 accepted" in shown
        opened.screenshot("card-rejected")
        page.unroute("**/v1/chat/completions")


CUT = {  # an answer of which only this came
    "choices": [
        {
            "delta": {"content": "half"},
            "token_details": [{"id": 7, "text": "half", "origin": "target", "probability": 0.5, "rejected": []}],
            "rounds": [
                {"tokens": 1, "drafted": 0, "accepted": 0, "drafter": None, "skipped": "first_token", "at_ms": 1}
            ],
        }
    ]
}


def test_the_banner_reports_a_lost_connection(browser: Browser, keyed: ServerProcess) -> None:
    """Runs last, because it stops the server: offline, during a response, and for good."""
    with page_of(browser, keyed) as opened:
        page = opened.page
        page.context.set_offline(True)
        page.fill("#message", TEXT)
        page.click("#send")
        page.wait_for_selector("#banner.gone:not([hidden])")
        expect(page.locator(".answer .note")).to_contain_text("interrupted")
        expect(page.locator("#message")).to_have_value(TEXT)
        opened.screenshot("banner")
        page.context.set_offline(False)
        page.wait_for_selector("#banner", state="hidden")

        stream = {"content_type": "text/event-stream", "body": f"data: {json.dumps(CUT)}\n\n"}
        page.route("**/v1/chat/completions", lambda route: route.fulfill(**stream))
        page.click("#send")
        page.wait_for_selector("#banner.gone:not([hidden])")
        answer = page.locator(".answer").last
        expect(answer.locator("> .text")).to_have_text("half")  # what came stays
        expect(answer.locator(".note")).to_contain_text("interrupted")
        page.unroute("**/v1/chat/completions")

        page.wait_for_selector("#banner", state="hidden")
        keyed.process.kill()
        page.fill("#message", TEXT)
        page.click("#send")
        page.wait_for_selector("#banner.gone:not([hidden])")
        opened.errors.clear()  # the browser logs it, too
