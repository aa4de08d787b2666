"""`trace -o x.html`: the page opens from disk without a network, and what it shows is the run's.

The pages are opened in headless Chromium. The right numbers are the documents' (golden.json), arithmetic by hand, and
torch's own softmax over q and k as the recorder keeps them of a run of its own; nothing is read off the page twice.
"""

import base64
import json
import math
import os
import re
import time
import zlib
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

import gptcli
from gptcli import shipped
from gptcli.config import read_config
from gptcli.cost import Size
from gptcli.model.measure import leading, rank
from gptcli.report.page_codes import codes
from gptcli.report.page_plan import LEVELS, LIMIT, Plan, row_bits
from tests.command import gptcli as run
from tests.oracle import save_toy
from tests.test_maps import TOY
from tests.test_trace_families import IDS, SOURCE_IDS, TOYS, auto

CHROMIUM = Path("/usr/bin/chromium")
CATS = json.loads((Path(__file__).parent / "data/golden.json").read_text(encoding="utf-8"))["cats"]
WORDS = ("Cats", "sit", "on")
GROUPED = TOY.replace("CONTEXT", "2048")
HOSTILE = {  # a token's text, and as it is shown
    "</script><script>alert(1)</script>": "</script><script>alert(1)</script>",
    "<b>bold</b>": "<b>bold</b>",
    "\u202eabc\u2066": r"\u{202e}abc\u{2066}",
    "שלום": "שלום",
    "a\x1b[31m\x00": r"a\x1b[31m\x00",
    "http://x/y": "http://x/y",
    "猫": "猫",
}


@pytest.fixture(scope="module")
def browser():
    if not CHROMIUM.exists():
        if os.environ.get("CI"):
            pytest.fail(f"{CHROMIUM} is not installed")
        pytest.skip(f"{CHROMIUM} is not installed")
    from playwright.sync_api import sync_playwright

    options = ["--no-sandbox", "--headless=new", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield started
        started.close()


@pytest.fixture
def opened(browser):
    """Opens a file from disk, offline. At the end nothing but the file was asked for, and nothing went wrong."""
    seen, contexts = [], []

    def of(path: Path, width: int = 1280, scheme: str = "light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        contexts.append(context)
        page, address = context.new_page(), path.resolve().as_uri()
        page.on("console", lambda message: seen.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: seen.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (seen.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: seen.append(request.url) if request.url != address else None)
        page.goto(address)
        page.wait_for_selector("html[data-ready=yes]")
        return page

    yield of
    for context in contexts:
        context.close()
    assert seen == []


def written(path: Path, *words: object) -> Path:
    """The page that a command line writes."""
    ran = run("trace", *words, "-o", path, "-q")
    assert ran.status == 0, ran.err
    return path


def grouped(folder: Path, more: str = "") -> Path:
    path = folder / "grouped.yaml"
    path.write_text(GROUPED.replace("MORE", more))
    return path


def ids_of(length: int, vocabulary: int = 32) -> list[int]:
    return torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def comma(ids: list[int]) -> str:
    return ",".join(map(str, ids))


@pytest.fixture(scope="module")
def cats(tmp_path_factory) -> Path:
    return written(tmp_path_factory.mktemp("cats") / "cats.html")


@pytest.fixture(scope="module")
def long(tmp_path_factory) -> tuple[Path, Path, list[int]]:
    """A page of 512 positions, whose other heads are held in steps; its config and ids."""
    folder = tmp_path_factory.mktemp("long")
    config, ids = grouped(folder), ids_of(512)
    page = written(folder / "x.html", "-c", config, "--ids", comma(ids), "--layer", 2, "--head", 5)
    return page, config, ids


def text(page, selector: str) -> str:
    return " ".join(page.inner_text(selector).split())


def facts(page) -> dict[str, str]:
    """What is told of the cell that is chosen or pointed at."""
    terms, told = page.locator("#cell dt").all_inner_texts(), page.locator("#cell dd").all_inner_texts()
    return dict(zip(terms, (" ".join(one.split()) for one in told)))


def go(page, query: int, key: int) -> None:
    """To a cell of the map, by the keyboard."""
    page.focus("#map")
    for word, times in (("PageUp", 1), ("Home", 1), ("ArrowDown", query), ("ArrowRight", key)):
        for _ in range(times):
            page.keyboard.press(word)


def choose_head(page, layer: int, head: int) -> None:
    page.click(f'#picker button[aria-label*="L{layer}H{head}"]')


# The file itself


class Held:
    """What a page's file holds, unpacked as the formats say, by none of the page's own code."""

    def __init__(self, path: Path):
        self.text = path.read_text(encoding="utf-8")
        found = {
            n: re.search(rf'<script type="[a-z/]+" id="{n}">(.*?)</script>', self.text, re.DOTALL)[1]
            for n in ("data", "numbers")
        }
        self.data = json.loads(found["data"])
        self.block = zlib.decompress(base64.b64decode(found["numbers"]), -15)

    def read(self, place: list) -> numpy.ndarray:
        kind, at, count = place
        return numpy.frombuffer(self.block, {"f32": "<f4", "i32": "<i4", "u16": "<u2", "u8": "u1"}[kind], count, at)

    def plane(self, told: list) -> numpy.ndarray:
        place, low, step, root, none = told
        codes = self.read(place)
        if place[0] == "f32":
            return codes
        values = low + step * codes.astype(float)
        return numpy.where(codes == none, math.nan, values**2 if root else values)


def test_no_address_stands_in_the_file(cats):
    held = Held(cats)
    for word in ("http:", "https:", "://", "src=", "href=", "xmlns", "@import", "url(", "fetch(", "XMLHttpRequest"):
        assert word not in held.text, word
    assert "default-src 'none'" in held.text


def test_the_page_is_not_written_over_without_force(tmp_path):
    path = tmp_path / "x.html"
    path.write_text("mine")
    ran = run("trace", "-o", path)
    assert ran.status == 2 and "--force" in ran.err and path.read_text() == "mine"
    assert run("trace", "-o", path, "--force", "-q").status == 0 and path.read_text() != "mine"


@pytest.mark.parametrize("words", [["--list"], ["--attribute", "mats"], ["--at", "layers.0.attn.q"]], ids=" ".join)
def test_a_page_stands_beside_no_option_that_shows_no_head(words, tmp_path):
    ran = run("trace", *words, "-o", tmp_path / "x.html")
    assert ran.status == 2 and words[0] in ran.err and ran.err.count("\n") == 1 and not list(tmp_path.iterdir())


# The worked example


def test_every_view_of_every_head_shows_the_document_s_numbers(cats, opened):
    page = opened(cats)
    for layer, golden in enumerate(CATS["layers"]):
        for head in range(2):
            choose_head(page, layer, head)
            assert f"Layer {layer + 1} of 2 (layers.{layer}) · Head {head} of 2 = L{layer}H{head}" in text(
                page, "#head-title"
            )
            scores = golden["scores (scaled, before mask) [head][query][key]"][head]
            for query, key in ((2, 0), (2, 1), (1, 0), (0, 2)):
                go(page, query, key)
                told = facts(page)
                assert (told["query"], told["key"]) == (f"{query} {WORDS[query]}", f"{key} {WORDS[key]}")
                assert float(told["score"]) == pytest.approx(scores[query][key], abs=6e-5)
                assert float(told["q·k"]) == pytest.approx(scores[query][key] * 2**0.5, abs=6e-5)
                assert float(told["weight"]) == pytest.approx(golden["pattern"][head][query][key], abs=6e-5)
                assert told["mask"].startswith("hidden" if key > query else "seen")


def test_the_map_s_cells_follow_the_pointer_and_its_views_differ(cats, opened):
    page = opened(cats)
    drawn = set()
    for view in ("scores", "scaled", "masked", "weights"):
        page.click(f"#view-{view}")
        assert page.get_attribute(f"#view-{view}", "aria-selected") == "true"
        drawn.add(page.evaluate("document.querySelector('#map canvas').toDataURL()"))
    assert len(drawn) == 4
    box, keys = page.locator("#map canvas").first.bounding_box(), []
    for x in range(0, int(box["width"]), 6):  # along the last row, from left to right
        page.mouse.move(box["x"] + x, box["y"] + box["height"] - 12)
        told = facts(page)
        if told.get("key") and told["key"] not in [key for key, _ in keys]:
            keys.append((told["key"], float(told["weight"])))
    pattern = CATS["layers"][0]["pattern"][0][2]
    assert [key for key, _ in keys] == ["0 Cats", "1 sit", "2 on"]
    assert [weight for _, weight in keys] == pytest.approx(pattern, abs=6e-5)


def test_a_token_under_the_pointer_marks_its_row_and_column_and_says_what_it_is(cats, opened):
    page = opened(cats)
    marks = "document.querySelectorAll('#map canvas')[1].toDataURL()"
    before = page.evaluate(marks)
    page.hover("#tokens [role=option] >> nth=1")
    assert text(page, "#token") == "position 1 sit · id 45 · bytes 73 69 74"
    assert facts(page)["key"] == "1 sit" and facts(page)["query"] == "1 sit"
    assert page.evaluate(marks) != before
    page.mouse.move(5, 5)
    assert page.evaluate(marks) == before


def test_the_next_tokens_are_the_document_s(cats, opened):
    page = opened(cats)
    for position, (mats, chairs, _) in enumerate(CATS["logits at ids 90,91,92 for each position"]):
        page.click(f"#tokens [role=option] >> nth={position}")
        first = page.locator("#best tbody tr").first.inner_text().split()
        assert first[:3] == ["1", "90", "mats"] and float(first[3]) == pytest.approx(mats, abs=6e-5)
        second = page.locator("#best tbody tr").nth(1).inner_text().split()
        assert second[1] == ("91" if chairs > 0 else "0")  # the others tie at 0, in the order of ids
    assert first[4] == f"{100 * CATS['probability of 90,91,92 at the last position'][0]:.2f}"


def test_the_lens_opens_a_cell(cats, opened):
    """The embedding of "sit" by hand: its row over the root of its mean square, times the rows of the head."""
    row = torch.tensor(CATS["weights"]["embedding rows"]["45"], dtype=torch.float64)
    heads = {int(id_): torch.tensor(w, dtype=torch.float64) for id_, w in CATS["weights"]["lm_head rows"].items()}
    logits = torch.zeros(256, dtype=torch.float64)
    for id_, weights in heads.items():
        logits[id_] = row / (row.square().mean() + 1e-6).sqrt() @ weights
    best = int(logits.argmax())
    page = opened(cats)
    page.click('#layers button[aria-label^="embed, position 1"]')
    assert "embed (embed) · position 1 sit" in text(page, "#opened")
    first = page.locator("#opened tbody tr").first.inner_text().split()
    assert first[1] == str(best) and first[3] == f"{100 * float(logits.softmax(0)[best]):.2f}"
    rows = page.locator("#layers tbody th").all_inner_texts()
    assert rows == ["layer 2", "layer 1", "embed"]  # the last on top


def test_a_weight_and_a_component_of_z_say_where_they_come_from(cats, opened):
    golden, page = CATS["layers"][0], opened(cats)
    scores = golden["scores (scaled, before mask) [head][query][key]"][0][2]
    weights, q = golden["pattern"][0][2], golden["q_rot = k_rot"][0]
    total = sum(math.exp(score - max(scores)) for score in scores)
    page.click('#steps [data-key="w0"]')
    told = text(page, "#origin")
    for number in (scores[0], scores[0] * 2**0.5, math.exp(scores[0] - max(scores)), total, weights[0]):
        assert f"{number:.4f}" in told, number
    page.click(f'#origin button:has-text("{scores[0] * 2**0.5:.4f}")')
    told = text(page, "#origin")
    assert "q·k with key 0 Cats" in told
    assert all(f"{a * b:.4f}" in told for a, b in zip(q[2], q[0]))
    page.click('#steps [data-key="attn.z[1]"]')
    told, v = text(page, "#origin"), golden["q = k = v [head][token][dim]"][0]
    for key in range(3):
        assert f"{weights[key]:.4f} {v[key][1]:.4f} {weights[key] * v[key][1]:.4f}" in told
    assert f"{golden['z (head outputs) [head][token][dim]'][0][2][1]:.4f}" in told
    page.click('#steps [data-key="resid_mid[3]"]')
    assert "resid_pre[3] = 0.6000" in text(page, "#origin") and "attn_out[3] = 1.7135" in text(page, "#origin")


def test_every_number_of_the_walk_opens(cats, opened):
    page = opened(cats)
    keys = page.locator("#steps .x").evaluate_all("all => all.map(x => x.dataset.key)")
    assert len(keys) > 60
    for key in keys:
        page.evaluate(f"""document.querySelector('#steps [data-key="{key}"]').click()""")
        assert len(text(page, "#origin")) > 20, key


# The keyboard


def test_the_keyboard_reaches_and_moves_everything(cats, opened):
    page = opened(cats)
    stops = []
    for _ in range(9):
        page.keyboard.press("Tab")
        stops.append(page.evaluate("document.activeElement.closest('[id]')?.id"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or not stops[-1], stops[-1]
    assert stops == ["tokens", "picker", "view-weights", "shade", "map", "layers", "steps", "proof", None]
    page.focus("#tokens [tabindex='0']")
    page.keyboard.press("ArrowLeft")
    assert text(page, "#reads-title") == "What 1 sit reads"
    page.focus("#picker [tabindex='0']")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert "L1H1" in text(page, "#head-title") and "L1H1 · query 1 sit" in text(page, "#walk-title")
    page.focus("#view-weights")
    page.keyboard.press("ArrowLeft")
    assert page.get_attribute("#view-masked", "aria-selected") == "true"
    page.focus("#layers [tabindex='0']")
    page.keyboard.press("ArrowDown")
    assert "layer 1 (layers.0.resid_post) · position 1 sit" in text(page, "#opened")
    page.focus("#steps [tabindex='0']")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert "resid_pre[1]" in text(page, "#origin")
    page.keyboard.press("Escape")
    assert text(page, "#origin") == ""
    assert page.evaluate("document.activeElement.dataset.key") == "resid_pre[1]"


def test_what_is_shown_has_roles_and_names(cats, opened):
    page = opened(cats)
    for role, name in (
        ("listbox", "Queries"),
        ("grid", "Every head"),
        ("tablist", "What of the head"),
        ("grid", "Best token"),
    ):
        assert page.get_by_role(role, name=name).count() == 1
    assert page.locator("#tokens").get_by_role("option", selected=True).count() == 1
    assert page.get_by_role("gridcell", selected=True).count() == 2
    assert page.locator("#cell[aria-live], #origin[aria-live]").count() == 2


# How it looks


@pytest.mark.parametrize("width", [360, 1280, 3840])
@pytest.mark.parametrize("which", ["cats", "long"])
def test_nothing_sticks_out_to_the_side(which, width, cats, long, opened):
    page = opened(cats if which == "cats" else long[0], width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert 14 <= float(page.evaluate("parseFloat(getComputedStyle(document.body).fontSize)")) <= 26


# Of every element with a text of its own: its colour, the ground that it stands on, and what it is.
INKS = """() => [...document.querySelectorAll("main *, header *")]
  .filter((x) => [...x.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
  .filter((x) => x.getClientRects().length && x.tagName !== "OPTION")
  .map((x) => {
    let ground = x;
    while (ground && getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)") ground = ground.parentElement;
    return [getComputedStyle(x).color, getComputedStyle(ground ?? document.body).backgroundColor, x.outerHTML];
  })"""


def luminance(colour: str) -> float:
    channels = [int(x) / 255 for x in re.findall(r"\d+", colour)[:3]]
    r, g, b = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in channels)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_its_ground_in_both_schemes(scheme, tmp_path, opened):
    """The contrast of two colours as WCAG 2 counts it, at least 4.5 for text."""
    page = opened(written(tmp_path / "x.html", "-m", "pronouns"), scheme=scheme)
    page.click('#steps [data-key="w3"]')
    pairs = page.evaluate(INKS)
    assert len(pairs) > 100
    for ink, ground, where in pairs:
        low, high = sorted((luminance(ink), luminance(ground)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, where
    assert (luminance(page.evaluate("getComputedStyle(document.body).backgroundColor")) < 0.1) == (scheme == "dark")


def test_the_scheme_changes_while_it_is_open(cats, opened):
    page = opened(cats)
    drawn = "document.querySelector('#map canvas').toDataURL()"
    light = page.evaluate(drawn)
    page.emulate_media(color_scheme="dark")
    until = time.monotonic() + 10
    while page.evaluate(drawn) == light:
        assert time.monotonic() < until
    page.emulate_media(color_scheme="light", media="print")
    assert not page.is_visible(".keys") and page.is_visible("#map")


# What models may hold


def test_no_token_is_markup(tmp_path, opened):
    vocabulary = ", ".join(f"{id_}: {json.dumps(word)}" for id_, word in enumerate(HOSTILE))
    config = grouped(tmp_path)
    config.write_text(f"name: <i>x</i>\n{config.read_text()}vocabulary: {{{vocabulary}}}\n", encoding="utf-8")
    page = opened(written(tmp_path / "x.html", "-c", config, "--ids", comma([*range(len(HOSTILE))])))
    assert page.locator("#tokens b, #tokens script, i:has-text('x')").count() == 0
    assert text(page, "#model").startswith("<i>x</i>")
    shown = page.locator("#tokens .tok").all_inner_texts()
    assert shown == list(HOSTILE.values())
    chips = [box["x"] for box in (one.bounding_box() for one in page.locator("#tokens [role=option]").all())]
    assert (
        len(set(chips)) > 1
        and page.evaluate("getComputedStyle(document.querySelector('.tok')).unicodeBidi") == "isolate"
    )
    assert "http:" not in (tmp_path / "x.html").read_text(encoding="utf-8")


def test_numbers_that_are_none_are_words(tmp_path, opened):
    """The row of "sit" is NaN: so are the scores that meet it, and the whole row of a query that sees it."""
    source = shipped.samples()["cats"] if hasattr(shipped, "samples") else Path("samples/cats")
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in Path(source).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "cats.safetensors")
    tensors["embed.weight"][45] = math.nan
    save_file(tensors, folder / "cats.safetensors")
    path = tmp_path / "x.html"
    assert run("trace", "-m", folder, "-o", path, "-q").status == 1
    page = opened(path)
    assert "NaN" in text(page, "#facts")
    go(page, 2, 0)
    assert facts(page)["weight"] == "NaN" and float(facts(page)["score"]) == pytest.approx(
        CATS["layers"][0]["scores (scaled, before mask) [head][query][key]"][0][2][0], abs=6e-5
    )
    go(page, 2, 1)
    assert facts(page)["score"] == "NaN"
    go(page, 0, 0)
    assert facts(page)["weight"] == "1.0000"
    assert "NaN" in text(page, "#best") and "NaN" in text(page, "#steps")


def test_grouped_heads_windows_and_sinks_are_named(tmp_path, opened):
    config = grouped(tmp_path, ", window: 3, sinks: true")
    ids = ids_of(7)
    page = opened(written(tmp_path / "x.html", "-c", config, "--ids", comma(ids), "--head", 5))
    about = text(page, "#head-about")
    assert "window of 3 keys" in about and "key/value head 1 of 2, as heads 4, 6, 7 too" in about and "sink" in about
    kept = gptcli.open(config=str(config)).activations(ids, "layers.0.attn.pattern", "layers.0.attn.sink")
    pattern, sink = kept["layers.0.attn.pattern"][0, 5], kept["layers.0.attn.sink"][0, 5]
    go(page, 6, 3)
    assert facts(page)["mask"].startswith("hidden") and facts(page)["weight"] == "0"
    go(page, 6, 4)
    assert facts(page)["mask"] == "seen" and facts(page)["weight"] == f"{pattern[6, 4]:.4f}"
    assert facts(page)["the query's sink"] == f"{sink[6]:.4f}"
    assert f"{float(sink[6]):.4f}" in text(page, "#read") and f"{float(sink[6]):.4f}" in text(page, "#steps")


@pytest.mark.parametrize("attention", ["self", "cross", "encoder"])
def test_the_three_attentions_of_two_stacks(attention, tmp_path, opened):
    page = opened(written(tmp_path / "x.html", "-m", "translate", "--attention", attention))
    asked = {
        "self": ("le chat", "layers.0.attn"),
        "cross": ("le chat", "layers.0.cross"),
        "encoder": ("the cat sat", "encoder.layers.0.attn"),
    }
    words, path = asked[attention]
    assert page.locator("#tokens .tok").all_inner_texts()[: len(words.split())] == words.split()
    opened_model = gptcli.open(model="translate")
    kept = opened_model.activations([3, 4], f"{path}.pattern", source=[0, 1, 2])[f"{path}.pattern"][0, 0]
    go(page, 1, 0)
    assert float(facts(page)["weight"]) == pytest.approx(float(kept[1, 0]), abs=6e-5)
    assert "--attention" in text(page, "#holds")
    assert ("Source, which is read" in text(page, "#tokens")) == (attention == "cross")


def test_a_page_of_a_trace_s_file_shows_the_same(tmp_path, cats, opened):
    run("trace", "--layer", 1, "-o", tmp_path / "x.safetensors", "-q")
    page = opened(written(tmp_path / "x.html", "--from", tmp_path / "x.safetensors"))
    assert text(page, "#steps") == text(opened(cats), "#steps")
    assert "no lens" in text(page, "#holds") and not page.is_visible("#lens")
    run("trace", "--at", "layers.*.attn.pattern", "-o", tmp_path / "y.safetensors", "-q")
    page = opened(written(tmp_path / "y.html", "--from", tmp_path / "y.safetensors", "--map"))
    go(page, 2, 1)
    assert facts(page)["weight"] == "0.5376" and "doesn't hold its layer whole" in text(page, "#steps")
    run("trace", "--at", "embed", "-o", tmp_path / "z.safetensors", "-q")
    ran = run("trace", "--from", tmp_path / "z.safetensors", "--map", "-o", tmp_path / "z.html")
    assert ran.status == 2 and "no weights of layer 1" in ran.err


def test_an_edited_run_says_so(tmp_path, opened):
    page = opened(written(tmp_path / "x.html", "--set", "layers.0.attn.pattern[0,0]=0.5"))
    assert "EDITED" in text(page, "#facts")
    go(page, 0, 2)
    assert facts(page)["weight"] == "0.5000" and facts(page)["mask"].startswith("hidden")


# Long texts


def softmax(config: Path, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """q·k [N, H, T, T] and torch's softmax of it, from q and k of a run of its own; four query heads read one."""
    kept = gptcli.open(config=str(config)).activations(ids, "layers.*.attn.q_rot", "layers.*.attn.k_rot")
    products = []
    for layer in range(2):
        q, k = (kept[f"layers.{layer}.attn.{x}_rot"][0].double() for x in "qk")
        products.append(q @ k.repeat_interleave(4, 0).mT)
    products = torch.stack(products)
    hidden = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
    return products, (products / 2).masked_fill(hidden, -math.inf).softmax(-1)


def test_long_texts_are_held_in_steps_that_are_said_and_kept(long, opened):
    path, config, ids = long
    held, (products, weights) = Held(path), softmax(config, ids)
    assert path.stat().st_size < LIMIT and len(held.data["heads"]) == 16
    [steps] = {round(1 / head["weights"][2]) for head in held.data["heads"] if head["weights"][0][0] == "u8"}
    assert f"steps of their square root of 1/{steps}" in " ".join(held.data["said"])
    below = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    for head in held.data["heads"]:
        right = weights[head["layer"], head["head"]][below].numpy()
        asked = (head["layer"], head["head"]) == (1, 5)
        assert head["weights"][0][0] == ("u16" if asked else "u8")
        error = abs(numpy.sqrt(held.plane(head["weights"])) - numpy.sqrt(right)).max()
        assert error < (2e-5 if asked else 0.5 / steps + 1e-4)
        if head["products"]:
            exact = products[head["layer"], head["head"]].flatten().numpy()
            spread = exact.max() - exact.min()
            for plane, right in ((head["products"], exact), (head["scaled"], exact / 2)):
                assert abs(held.plane(plane) - right).max() < spread / (65_534 if asked else 254) * 0.51 + 1e-6
    page = opened(path)
    go(page, 3, 1)
    assert facts(page)["weight"] == f"{weights[1, 5, 3, 1]:.4f}" and facts(page)["q·k"] == f"{products[1, 5, 3, 1]:.4f}"
    choose_head(page, 0, 2)
    told = facts(page)["weight"]
    assert told.startswith("≈") and float(told[1:]) == pytest.approx(float(weights[0, 2, 3, 1]), abs=2 / steps)
    assert "--layer 1 --head 2" in text(page, "#steps") and "is not in this file" in text(page, "#steps")
    page.click("#steps button")
    assert "L1H5 · query 511" in text(page, "#walk-title")
    assert "496 keys more" in text(page, "#steps")


def test_capped_scores_have_steps_of_their_own(tmp_path):
    """0.5 · tanh(q·k / √D / 0.5), of which no even step is one of q·k."""
    config, ids = grouped(tmp_path, ", softcap: 0.5"), ids_of(300)
    held = Held(written(tmp_path / "x.html", "-c", config, "--ids", comma(ids), "--layer", 2, "--head", 5))
    products = softmax(config, ids)[0][1, 5]
    [head] = [one for one in held.data["heads"] if (one["layer"], one["head"]) == (1, 5)]
    capped = 0.5 * (products / 2 / 0.5).tanh()
    assert abs(held.plane(head["scaled"]) - capped.flatten().numpy()).max() < 1 / 65_534 + 1e-6
    assert abs(held.plane(head["products"]) - products.flatten().numpy()).max() < float(products.abs().max()) / 30_000


def test_a_distance_s_bias_stands_beside_its_score(tmp_path, opened):
    """Of t5: a score is q·k and what the table of biases holds for that distance."""
    save_toy(TOYS["t5"], tmp_path / "t5", auto=auto("t5"))
    words = ["-m", tmp_path / "t5", "--ids", comma(IDS), "--source-ids", comma(SOURCE_IDS), "--dtype", "f32"]
    page = opened(written(tmp_path / "x.html", *words, "--attention", "encoder"))
    row = page.locator("#steps table tbody tr").nth(1).inner_text().split("\t")
    product, bias, score = map(float, (row[2], row[3], row[4]))
    assert abs(bias) > 1e-3 and score == pytest.approx(product + bias, abs=2e-4)
    page.click('#steps [data-key="s1"]')
    assert f"its distance adds {bias:.4f}" in text(page, "#origin")


def test_the_window_of_the_lens_goes_with_the_query(long, opened):
    page = opened(long[0])
    assert "511 of 512" in text(page, "#lens-about")
    page.focus("#map")
    page.keyboard.press("PageUp")
    assert "Positions 0 to" in text(page, "#lens-about")


def plan(name: str, width: int, layers: list[int], heads: list[int]) -> Plan:
    spec = read_config(shipped.configs()[name]).spec
    asked = (layers, heads, [width - 1])
    return Plan(Size(spec, 1, width, 0, "float32"), "self", list(range(spec.n_layers)), asked, walks=asked)


def test_gpt2_small_at_512_positions_fits_whatever_its_weights_are():
    """144 maps of 512 · 513 / 2 weights each."""
    planned = plan("gpt2-small", 512, [4], [3])
    assert planned.weights(planned.layers) == 144 * 512 * 513 // 2
    assert planned.least(planned.layers) < LIMIT


@pytest.mark.parametrize("sharp", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("levels", LEVELS)
def test_no_weights_take_more_than_was_counted(levels, sharp):
    """Softmax of random scores, from even weights to one that takes nearly all."""
    scores = sharp * torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    below = torch.ones(256, 256, dtype=torch.bool).tril()
    weights = scores.masked_fill(~below, -math.inf).softmax(-1)[below]
    found = codes(weights.sqrt(), 0.0, 1 / levels, levels)
    packed = len(zlib.compress(found.byte().numpy().tobytes(), 6))
    assert packed * 8 <= row_bits(levels, len(weights), 256)


def test_what_no_file_holds_is_refused_before_it_runs(tmp_path):
    config = grouped(tmp_path)
    path, ids = tmp_path / "x.html", comma(ids_of(900))
    ran = run("trace", "-c", config, "--ids", ids, "--head", "all", "--position", "all", "-o", path)
    assert ran.status == 2 and "MB" in ran.err and "--layer 1" in ran.err and ran.err.count("\n") == 1
    [fits] = re.findall(r"(--position \d+|--layer 1 --head 0 --position \d+|--layer 1[^;:]*) takes", ran.err)
    assert not path.exists()
    assert run("trace", "-c", config, "--ids", ids, *fits.split(), "-o", path, "-q").status == 0
    assert path.stat().st_size < LIMIT
    ran = run("trace", "--max-memory", "1kB", "-o", tmp_path / "y.html")
    assert ran.status == 2 and "--max-memory" in ran.err and not (tmp_path / "y.html").exists()


def test_the_best_of_each_row_are_those_of_rank():
    """Ties in the order of ids, what is no number last, as one row at a time has them."""
    logits = torch.randint(-3, 4, (40, 23), generator=torch.Generator().manual_seed(0)).float()
    logits[5, 7], logits[6, :], logits[7, 2] = math.nan, 0.0, math.inf
    for row, found in zip(logits, leading(logits, 6)):
        right = rank(row, 6)
        assert [one.id for one in found] == [one.id for one in right]
        same = [(one.prob, other.prob) for one, other in zip(found, right)]
        assert not row.isfinite().all() or all(a == pytest.approx(b, rel=1e-12) for a, b in same)
