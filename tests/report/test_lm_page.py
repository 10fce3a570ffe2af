"""Language modelling has its place on the page and in the documents, with a story of each model as it wrote it."""

import dataclasses
import io
import re

import pytest
from benchmarks import experiments as documents
from lm_examples import make_all_runs, make_run
from PIL import Image
from report_examples import make_run as make_length_run
from report_examples import tidy, write_lines
from test_page import Elements

from compactattn.report import lm_stories
from compactattn.report.evaluations import Story
from compactattn.report.lm_comparison import choose_story, compare
from compactattn.report.page import write_report

KERNELS = ("gaussian", "sparsemax", "norm_relu")
HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    runs = [make_run(2.5 - 0.1 * n, layers=n, kernel=kernel, source=f"{kernel}-{n}") for n in (1, 8) for kernel in KERNELS[:2]]
    out = tmp_path_factory.mktemp("report")
    write_report([make_length_run(), *runs, make_run(3.0, layers=8, kernel="norm_relu")], out)
    return out


@pytest.fixture(scope="module")
def page(folder):
    return (folder / "index.html").read_text(encoding="utf-8")


def test_each_depth_has_a_section_on_a_page_that_asks_for_nothing(page):
    elements = Elements(page)
    assert elements.open == []
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {"mqmtar", "lm-stories-1", "lm-stories-8", "made"} <= set(ids)
    assert "; Language modelling: stories (BabiStories substitute), 1 layer, stories (BabiStories substitute), 8 layers" in page
    assert not re.search(r"https?:|//[a-z]|@import|@font-face", page)


def test_a_section_says_what_was_found_in_the_order_of_a_reader(page):
    section = page[page.index('id="lm-stories-8"') : page.index('id="made"')]
    places = [
        section.index(text)
        for text in (
            "With 8 layers, ",
            "<figure>",
            "65,536,000 tokens seen by each",
            "<h3>From the lowest loss up</h3>",
            "<h3>Compact kernels against Gaussian attention</h3>",
            "<h3>What context is worth</h3>",
            "<h3>What the models write</h3>",
            "<h3>Beside the paper</h3>",
            "not run here: Gaussian kNN, k=32",
            "<h3>Where this departs from the paper</h3>",
            "<h3>Training</h3>",
        )
    ]
    assert places == sorted(places)
    assert section.count("<figure>") == 4


def test_the_corpus_is_called_a_substitute_wherever_it_is_named(page):
    text = re.sub(r"<style>.*?</style>|<svg.*?</svg>", "", page, flags=re.DOTALL)
    for rest in ("draws curves on BabiStories", "in the paper BabiStories", "stories (BabiStories substitute)"):
        assert rest in text
        text = text.replace(rest, "")
    assert "babistories" not in re.sub("Stories \\(BabiStories substitute\\)", "", text).lower()


def test_the_best_models_story_is_open_and_the_others_are_folded(page):
    section = page[page.index('id="lm-stories-8"') : page.index('id="made"')]
    told = section[section.index("What the models write") : section.index("Beside the paper")]
    assert told.count('<div class="story">') == 3
    assert re.findall("<summary>(.*?)</summary>", told) == ["sparsemax", "normReLU"]
    assert told.index('<div class="story">') < told.index("<details>")
    assert told.count("Sampled with temperature 0.8, top-k 50, top-p 0.95, drawn with seed 7") == 3
    assert told.index("loss 1.700") < told.index("<blockquote>")  # whose it is stands before it


def names(stories):
    return [line.label for line, _ in stories]


def test_beside_a_transformer_that_is_best_the_best_mosaics_story_is_open_too():
    transformers = [make_run(2.0 + rate, rate=rate, kernel="gaussian", architecture="transformer") for rate in (1e-3, 2e-3)]
    mosaics = [make_run(2.6, kernel="gaussian"), make_run(2.5)]
    seen, folded = lm_stories.choose_stories(compare([*mosaics, *transformers])[0])
    assert names(seen) == ["Transformer, rate 0.001", "sparsemax"]
    assert names(folded) == ["Transformer, rate 0.002", "Gaussian"]
    seen, folded = lm_stories.choose_stories(compare(transformers)[0])
    assert (len(seen), len(folded)) == (1, 1)
    worse = make_run(2.9, kernel="gaussian", architecture="transformer")
    seen, folded = lm_stories.choose_stories(compare([*mosaics, worse])[0])
    assert names(seen) == ["sparsemax"]
    assert names(folded) == ["Gaussian", "Transformer"]


def test_a_story_is_escaped_and_keeps_its_lines(page, tmp_path):
    assert "<blockquote><b>Once upon a time</b> there was a small fox.\n\nIt met &lt;b&gt;Anna &amp; Tom&lt;/b&gt; by" in page
    hostile = dataclasses.replace(make_run(), stories=[Story(HOSTILE, HOSTILE)])
    write_report([hostile], tmp_path)
    for name in ("index.html", "report.md"):
        text = (tmp_path / name).read_text()
        assert "<script" not in text
        assert text.count("&lt;script") == 2


def story_of(text, **changes):
    (comparison,) = compare([dataclasses.replace(make_run(), stories=[Story("Once", text, **changes)])])
    return comparison, comparison.lines[0], comparison.lines[0].runs[0].stories[0]


def test_markdown_quotes_a_story():
    quoted = lm_stories.format_markdown(*story_of(" a *fox*\n# ran")).split("\n\n")[1]
    assert quoted == "> **Once** a \\*fox\\*\n> \\# ran\n"
    (comparison,) = compare([dataclasses.replace(make_run(), stories=[Story("Said Tom:\n\n I ", "am *I*.")])])
    (((line, story),), _) = lm_stories.choose_stories(comparison)
    quoted = lm_stories.format_markdown(comparison, line, story).partition("\n\n")[2]
    assert quoted == "> **Said Tom:**\n>\n>  **I** am \\*I\\*.\n"
    folded = lm_stories.format_markdown(*story_of("Once"), folded=True)
    assert folded.startswith("<details><summary>sparsemax</summary>\n\nsparsemax, loss 2.500")


def test_the_caption_says_how_a_story_was_sampled():
    assert lm_stories.describe_story(*story_of("x", step=2000)) == (
        "sparsemax, loss 2.500, after 2,000 steps. Sampled with the likeliest token each time; the prompt is in bold."
    )
    caption = lm_stories.describe_story(*story_of("x", temperature=1.0, min_p=0.05, seed=3, row=2))
    assert caption.endswith("Sampled with temperature 1, min-p 0.05, drawn with seed 3 in row 2; the prompt is in bold.")
    assert "each time; cut off before its end; the prompt" in lm_stories.describe_story(*story_of("x", ended=False))
    assert "cut off" not in lm_stories.describe_story(*story_of("x", ended=True))


def test_the_story_shown_is_the_first_of_the_latest_step():
    stories = [Story("", "early", step=5), Story("", "late", step=9), Story("", "later still", step=9)]
    (comparison,) = compare([dataclasses.replace(make_run(), stories=stories)])
    (((line, story),), _) = lm_stories.choose_stories(comparison)
    assert story.text == "late"
    assert "; one of 3 stories that were saved." in lm_stories.describe_story(comparison, line, story)
    html = lm_stories.format_html(comparison, line, story)
    assert "<blockquote>late</blockquote>" in html
    assert "in bold" not in html


def test_a_corpus_goes_by_its_own_name_and_what_made_it_is_listed(tmp_path):
    folder = write_report([make_run(data={"corpus": "lic2", "tokenizer": "bytes"}, rate=0.003)], tmp_path).parent
    for text in ((folder / name).read_text(encoding="utf-8") for name in ("index.html", "report.md")):
        assert "lic2, 1 layer" in text
        assert "Lic2" not in text
        making = text[text.index("How it was made") :]
        assert re.search(r"0\.003( \| |</td><td>)bytes", making)
        assert "compactattn train length-gen --task mqmtar &lt;" in making  # the command that the example notes
        assert "Times are of training alone" in making


def test_of_stories_of_one_step_one_that_ended_is_shown():
    def shown(*ended):
        stories = [Story("", str(i), step=step, ended=end) for i, (step, end) in enumerate(ended)]
        (comparison,) = compare([dataclasses.replace(make_run(), stories=stories)])
        return choose_story(comparison.lines[0]).text

    assert shown((9, False), (9, True), (9, True)) == "1"
    assert shown((9, False), (9, None)) == "0"
    assert shown((5, True), (9, False)) == "1"


def told(loss, ended, **config):
    return dataclasses.replace(make_run(loss, **config), stories=[Story("", "A fox", ended=ended)])


def test_beside_a_story_that_was_cut_off_the_best_one_that_ended_is_shown_and_named():
    def choose(*ended):
        kernels = ("sparsemax", "biweight", "triweight", "gaussian")
        losses = zip((2.1, 2.2, 2.3, 2.4), ended, kernels, strict=False)
        (comparison,) = compare([told(loss, end, kernel=kernel) for loss, end, kernel in losses])
        seen, folded = lm_stories.choose_stories(comparison)
        named = [
            line.label
            for line, story in [*seen, *folded]
            if "; of the best model whose story came to its end" in lm_stories.describe_story(comparison, line, story)
        ]
        assert len(seen) + len(folded) == len(ended)
        return names(seen), named

    assert choose(False, False, True, True) == (["sparsemax", "4/3-entmax"], ["4/3-entmax"])
    assert choose(True, False, True) == (["sparsemax"], [])
    assert choose(None, True) == (["sparsemax"], [])  # whether it ended was not noted
    assert choose(False, None, False) == (["sparsemax"], [])


def test_a_mosaics_story_that_ended_is_not_shown_twice_beside_a_transformers():
    transformer = told(2.0, False, kernel="gaussian", architecture="transformer")
    (comparison,) = compare([transformer, told(2.1, True), told(2.2, True, kernel="biweight")])
    assert names(lm_stories.choose_stories(comparison)[0]) == ["Transformer", "sparsemax"]
    (comparison,) = compare([transformer, told(2.1, False), told(2.2, True, kernel="biweight")])
    assert names(lm_stories.choose_stories(comparison)[0]) == ["Transformer", "sparsemax", "1.5-entmax"]


LOOP = "Once there was " + "L " * 21 + " ".join(map(str, range(120)))


@pytest.mark.parametrize(
    ("text", "loop"),
    [
        (LOOP, "21 of 144 words"),
        (LOOP.replace("L L ", "L ", 1), ""),  # 20 in a row
        ("a fox and " * 30, "30 of 90 words"),
        ("the fox ran, and so " * 30, ""),  # a fifth and no more
        ("so so so", ""),
        ("", ""),
    ],
)
def test_a_loop_is_one_word_over_and_over(text, loop):
    assert lm_stories.find_loop(Story("", text)) == loop


STUTTER = "A girl named G" + "is" * 26 + "pering ran home. " + " ".join(map(str, range(120)))


@pytest.mark.parametrize(
    ("text", "stutter"),
    [
        (STUTTER, "2 characters 26 times in a row"),
        (STUTTER.replace("isis", "", 3), ""),  # 20 times
        ("N" + "o" * 41 + "!", "1 character 41 times in a row"),
        ("N" + "o" * 40 + "!", ""),
        ("tick-tock, " * 30, ""),  # words, not one word
        ("the fox-" * 21, ""),
        ("tick-tock-" * 21, ""),  # longer than a piece
        ("tiktock-" * 21, "8 characters 21 times in a row"),
        ("-" * 80 + " " + STUTTER.replace("isis", "") * 2, ""),  # a line across the page
        ("A fox" + "!" * 300, "1 character 300 times in a row"),
        ("", ""),
    ],
)
def test_a_stutter_is_a_short_piece_over_and_over_inside_one_word(text, stutter):
    assert lm_stories.find_stutter(Story("", text)) == stutter


def test_stories_that_repeat_a_piece_of_a_word_are_told():
    def state(*texts):
        kernels = ("sparsemax", "biweight", "triweight")
        told = zip(kernels, texts, strict=False)
        runs = [dataclasses.replace(make_run(kernel=kernel), stories=[Story("", text)]) for kernel, text in told]
        (comparison,) = compare(runs)
        return lm_stories.state_loops(comparison)

    often = "2 characters 26 times in a row"
    assert state("A fox.", "A hare.") == []
    (told,) = state(STUTTER)
    assert told == f"Stories of 1 of 1 Memory Mosaic with 1 layer repeat a piece of a word over and over: sparsemax ({often})."
    (told,) = state(STUTTER, LOOP, "A fox.")
    assert told.startswith("Stories of 2 of 3 Memory Mosaics with 1 layer repeat one word or a piece of a word over and over: ")
    assert f"sparsemax ({often})" in told
    assert "(21 of 144 words)" in told
    assert f"each time; inside one word it repeats {often}; the prompt" in lm_stories.describe_story(*story_of(STUTTER))


def test_stories_that_repeat_one_word_are_told_at_every_depth(tmp_path, monkeypatch):
    def run(*texts, **config):
        return dataclasses.replace(make_run(source=str(config), **config), stories=[Story("", text, step=9) for text in texts])

    monkeypatch.setattr(documents, "ROOT", tmp_path)
    (tmp_path / "results" / "lm").mkdir(parents=True)
    runs = [run("A fox.", LOOP), run("A fox.", kernel="biweight"), run(kernel="triweight"), run("A fox.", layers=8)]
    runs += [run(LOOP, loss=2.4, layers=8, kernel="gaussian", architecture="transformer")]
    write_lines(tmp_path / "results" / "lm" / "stories.jsonl", [one.to_json() for one in runs])
    text = documents.results_section("lm", 4)
    shallow, deep = text[: text.index("\n#### ")], text[text.index("\n#### ") :]
    told = "Stories of 1 of 2 Memory Mosaics with 1 layer repeat one word over and over: sparsemax (21 of 144 words)."
    assert told in shallow
    assert "What the models write" not in shallow
    told = "Stories of 1 of 1 other model with 8 layers repeat one word over and over: Transformer (21 of 144 words)."
    assert told in deep
    assert deep.count("; one word, over and over, makes up 21 of 144 words.") == 1
    assert text.count("repeat one word") == 2


def test_runs_without_stories_have_no_heading_for_them(tmp_path):
    page = write_report([make_run(stories=False)], tmp_path).read_text()
    assert "What the models write" not in page


def test_two_settings_of_one_depth_have_links_of_their_own(tmp_path):
    page = write_report([make_run(), make_run(steps=1000)], tmp_path).read_text()
    assert re.findall(r'<section id="(lm[^"]+)"', page) == ["lm-stories-1", "lm-stories-1-1"]


def test_markdown_says_the_same_and_its_figures_lie_beside_it(folder):
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert "## stories (BabiStories substitute), 8 layers (2,000 steps of 64 windows)" in text
    linked = re.findall(r"\]\((figures/lm[^)]+)\)", text)
    assert len(linked) == 8
    assert all((folder / path).is_file() for path in linked)


def test_the_documents_link_the_pictures_that_are_asked_for_and_tell_what_they_show(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    (tmp_path / "results" / "lm").mkdir(parents=True)
    file = tmp_path / "results" / "lm" / "stories.jsonl"
    write_lines(file, [make_run(kernel=kernel).to_json() for kernel in KERNELS])
    text = documents.results_section("lm", 4, pictures=("validation", "positions"))
    linked = re.findall(r"!\[(.*)\]\((.*)\)\n\n(.*)\n", text)
    assert [path for _, path, _ in linked] == ["images/lm-stories-1-validation.png", "images/lm-stories-1-positions.png"]
    for alternative, _, caption in linked:
        assert caption.startswith(alternative)
        assert len(alternative) < len(caption)
    assert "##### Training" not in text  # a heading without its picture
    drawn = documents.draw_pictures("lm", ("validation", "positions"))
    assert [path.relative_to(tmp_path / "docs").as_posix() for path in drawn] == [path for _, path, _ in linked]
    assert documents.draw_pictures("lm", ("validation", "positions")) == drawn
    for content in drawn.values():
        picture = Image.open(io.BytesIO(content))
        assert picture.text == {"Source": documents.identify("lm")}
        assert picture.width == 848
        assert len(picture.convert("RGB").getcolors()) > 20
    file.write_text(file.read_text() + "\n")
    assert picture.text["Source"] != documents.identify("lm")


def test_the_documents_state_that_there_are_no_results_until_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    assert documents.results_section("lm", 4) == "No results yet."
    (tmp_path / "results" / "lm").mkdir(parents=True)
    write_lines(tmp_path / "results" / "lm" / "stories.jsonl", [run.to_json() for run in make_all_runs()])
    text = tidy(documents.results_section("lm", 4))
    assert text.startswith("#### stories (BabiStories substitute), 1 layer, 2,000 steps of 64 windows\n\n**With 1 layer, ")
    assert text.count("\n#### ") == 1
    assert text.count("| **normReLU** | ") == 2
    stories = text[text.index("\n#### ") :]  # the deeper models'
    assert text.count("> **Once upon a time** there was a small fox.") == stories.count("> **Once upon a time** there was") == 1
    assert text.count("##### What the models write") == stories.count("##### What the models write") == 1
    assert text.count("##### Beside the paper") == 2
