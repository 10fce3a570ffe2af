"""Stories are a pure function of seed and number, and refer only to what they have introduced."""

import re
import string

import pytest

from compactattn.data import grammar
from compactattn.data.corpus import Corpus
from compactattn.data.preparation import prepare
from compactattn.data.stories import THINGS, Stories, tell_stories
from compactattn.data.tokenizers import Bytes

MANY = tell_stories(0, 0, 3000)
NAMES = {*grammar.GIRLS, *grammar.BOYS, *grammar.PETS}


def test_a_story_depends_on_seed_and_number_and_on_nothing_else():
    assert tell_stories(0, 700, 5) == MANY[700:705]
    assert tell_stories(0, 10**12, 1)[0].text
    assert not {story.text for story in tell_stories(1, 0, 500)} & {story.text for story in MANY}


def test_the_first_story_is_frozen():
    """Another text here means another language for everyone: raise grammar.VERSION, then note it."""
    assert grammar.VERSION == 1
    assert MANY[0].text == FIRST


def test_stories_are_distinct():
    assert len({story.text for story in MANY}) == len(MANY)
    assert len({tuple(sorted(story.slots.items())) for story in MANY}) == len(MANY)


def test_a_story_has_60_to_200_words_in_ascii_and_no_slot_left_open():
    allowed = set(string.ascii_letters + " \n.,:!?\"'-")
    for story in MANY:
        assert 60 <= len(story.text.split()) <= 200
        assert set(story.text) <= allowed
        assert "  " not in story.text


def test_all_words_and_sentences_are_used():
    text = "\n".join(story.text for story in MANY)
    for words in (grammar.GIRLS, grammar.BOYS, grammar.PETS, grammar.TOYS, grammar.PLACES, grammar.GIFTS, grammar.HELPERS):
        assert all(word in text for word in words)
    ways = [
        grammar.OPENING, grammar.COMPANION, grammar.TREASURE, grammar.PROMISE, grammar.SETTING_OUT, *grammar.PLOTS,
        grammar.MEETING, grammar.THANKS, grammar.MEMORY, grammar.FINDING, grammar.KEEPING, grammar.ENDING,
    ]  # fmt: skip
    told = [story.text for story in MANY]
    for sentence in (sentence for way in ways for sentence in way):
        pattern = re.compile(re.sub(r"\\{\w+\\}", "[A-Za-z -]+?", re.escape(sentence)))
        assert any(pattern.search(text) for text in told), sentence


def test_whatever_is_referred_to_was_introduced_before():
    for text, slots in MANY:
        for thing in THINGS:
            introduced = text.lower().find(slots[f"a_{thing}"])
            assert introduced >= 0, (thing, text)
            mention = re.search(rf"\b(the|your|no) {slots[thing]}\b", text, re.IGNORECASE)
            assert mention is None or introduced < mention.start(), (thing, text)
        for name, told in (("hero", slots["child"]), ("friend", slots["animal"])):
            first = text.index(slots[name])
            assert told in text[max(0, first - 50) : first + 60], (name, text)
        assert set(re.findall(r"[A-Z][a-z]+", text)) & NAMES == {slots["hero"], slots["friend"]}
        pronoun = re.search(r"\b(he|she|his|her|him)\b", text, re.IGNORECASE)
        assert pronoun is None or re.search(rf"\b{slots['child']}\b", text).start() < pronoun.start()


def test_pronouns_agree_with_the_hero():
    for text, slots in MANY:
        wrong = r"\b(he|his|him)\b" if slots["child"] == "girl" else r"\b(she|her)\b"
        assert not re.search(wrong, text, re.IGNORECASE), text


def test_the_promise_of_the_beginning_is_kept_at_the_end():
    for text, slots in MANY:
        paragraphs = text.split("\n\n")
        assert len(paragraphs) == 4
        for word in ("gift", "elder", "time", "hero"):
            assert slots[word] in paragraphs[1] or word == "hero"
            assert slots[word] in paragraphs[3]
        assert slots["spot"] in paragraphs[1]
        assert slots["spot"] in paragraphs[2]
        assert slots["helper"] in paragraphs[2]


@pytest.mark.parametrize("word", ["a a", "a e", "a i", "a o", "a u"])
def test_articles_fit_their_words(word):
    text = " ".join(story.text for story in MANY).lower()
    assert not re.search(rf"\b{word}", text)
    assert not re.search(r"\ban [^aeiou]", text)


def test_stories_make_a_corpus(tmp_path):
    prepare([Stories(1500, 3)], Bytes(), tmp_path / "out", workers=2)
    corpus = Corpus.open(tmp_path / "out")
    texts = Bytes().decode(corpus.train).split("<|endoftext|>")[:-1]
    told = [story.text for story in tell_stories(3, 0, 1500)]
    assert set(texts) < set(told)
    assert texts[:20] == told[:20]
    assert corpus.meta["sources"] == [{"generator": "demo-stories", "grammar": 1, "seed": 3, "stories": 1500, "split": None}]


def test_wrong_numbers_of_stories_are_told():
    with pytest.raises(ValueError, match="stories = 0 are none"):
        Stories(0)
    with pytest.raises(ValueError, match="numbered from 0"):
        tell_stories(0, -1, 2)


FIRST = """A shy girl named Mabel lived by a cold lake. She had a tame crow called Waffle. Mabel owned a blue puppet.

On a bright Monday Mabel made a promise to her big brother: before the evening bell she would bring home a sour apple. With \
the blue puppet in her hand and Waffle at her side, she left the cold lake. At a dry well the path split in two, and soon \
they were lost.

Then an old miller came by. "Why are you unhappy?" asked the old miller. The old miller drew a map in the sand, from the \
dry well all the way to the cold lake.

They searched beside the cold lake until Waffle found a sour apple. Before the evening bell, Mabel gave the sour apple to \
her big brother. "You kept your promise," said her big brother. From then on Mabel, Waffle and the old miller were friends."""
