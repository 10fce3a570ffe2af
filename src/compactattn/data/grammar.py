"""The words and sentences of the built-in stories (stories.py puts them together).

A slot such as {toy} stands for words drawn once per story. {a_toy} introduces a thing ("a red kite", "an old drum"), {toy} in
"the {toy}" refers back to it, and a capital ({He}, {A_helper}) begins a sentence. A sentence may refer only to what an
earlier part of its story has introduced; tests check this for every one.
"""

from __future__ import annotations

VERSION = 1  # raise it with every change of a word: the same seed and number must give the same story

GIRLS = (
    "Ada", "Anouk", "Beatrix", "Clara", "Daphne", "Edith", "Freya", "Greta", "Hazel", "Ines", "Juno", "Kiri", "Leila", "Mabel",
    "Nadia", "Odette", "Priya", "Rosalind", "Sanna", "Tamsin", "Una", "Vera", "Wilma", "Yara", "Zelda",
)  # fmt: skip
BOYS = (
    "Alfred", "Bruno", "Cyril", "Dario", "Emil", "Felix", "Gustav", "Hugo", "Idris", "Jonas", "Kofi", "Leander", "Milo", "Nils",
    "Otis", "Pavel", "Quentin", "Rafael", "Soren", "Tobias", "Umberto", "Viktor", "Walter", "Yusuf", "Zeno",
)  # fmt: skip
PETS = (
    "Acorn", "Biscuit", "Button", "Clover", "Crumb", "Dumpling", "Ember", "Fennel", "Ginger", "Juniper", "Marble", "Mittens",
    "Nutmeg", "Pebble", "Pepper", "Pickle", "Puddle", "Smudge", "Socks", "Thimble", "Toffee", "Truffle", "Waffle", "Whisker",
)  # fmt: skip
TRAITS = ("shy", "brave", "curious", "cheerful", "quiet", "clever", "gentle", "lively", "patient", "stubborn")
ANIMALS = (
    "small dog", "spotted cat", "tame crow", "brown goat", "lame donkey", "grey goose", "white hen", "young fox", "fat pony",
    "sleepy owl", "tiny mouse", "fluffy lamb", "old hound", "striped kitten", "black rabbit", "noisy duck",
)  # fmt: skip
COLOURS = ("red", "blue", "green", "yellow", "orange", "purple", "silver", "golden", "striped", "wooden", "painted", "tin")
TOYS = (
    "kite", "drum", "boat", "whistle", "lantern", "cart", "flute", "top", "bell", "ball", "bucket", "horn", "wagon", "puppet",
    "cap", "hoop", "mirror", "spoon", "ribbon box", "music box",
)  # fmt: skip
PLACES = (
    "quiet river", "windy hill", "deep forest", "stony beach", "busy harbour", "sleepy village", "wide meadow", "cold lake",
    "high mountain", "old mill", "narrow valley", "grey castle", "sunny orchard", "misty marsh", "empty railway",
    "tall lighthouse",
)  # fmt: skip
SPOTS = (
    "hollow log", "thorn bush", "dry well", "broken wall", "fallen oak", "muddy ditch", "rabbit hole", "heap of stones",
    "stone bridge", "bramble hedge", "ruined tower", "pile of leaves", "rusty gate", "sunken barrel", "crooked willow",
    "dark cave",
)  # fmt: skip
GIFTS = (
    "white feather", "ripe pear", "smooth pebble", "sprig of mint", "handful of cherries", "bunch of daisies", "curly shell",
    "wild rose", "round walnut", "sweet plum", "blue flower", "bag of chestnuts", "bundle of reeds", "pine cone",
    "basket of berries", "speckled egg", "yellow leaf", "branch of lilac", "sour apple", "piece of honeycomb",
)  # fmt: skip
ELDERS = ("grandmother", "grandfather", "mother", "father", "aunt", "uncle", "big sister", "big brother")
HELPERS = (
    "old miller", "tired postman", "kind baker", "tall shepherd", "young sailor", "singing gardener", "wise beekeeper",
    "friendly giant", "small witch", "travelling tailor", "busy beaver", "polite badger", "grumpy bear", "quick squirrel",
    "white swan", "brave hedgehog",
)  # fmt: skip
TIMES = ("sunset", "moonrise", "supper", "dinner", "nightfall", "the evening bell", "the first star", "bedtime")
DAYS = ("One morning", "One windy day", "On a bright Monday", "Early one spring day", "One cold afternoon", "On market day")

# each part of a story in turn, in one of its ways; of attempt, thanks and memory (of the promise) at most one is told
SHAPES = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0))
OPENING = (
    "Once upon a time there was a {trait} {child} named {hero}. {He} lived near {a_place}.",
    "Near {a_place} lived a {trait} {child}. {His} name was {hero}.",
    "There was once {a_place}, and beside it lived {hero}, a {trait} {child}.",
    "A {trait} {child} named {hero} lived by {a_place}.",
)
COMPANION = (
    "{His} best friend was {a_animal} named {friend}.",
    "{He} had {a_animal} called {friend}.",
    "Every day {he} played with {friend}, {a_animal}.",
    "{A_animal} named {friend} followed {him} everywhere.",
)
TREASURE = (
    "The thing {he} loved most was {a_toy}.",
    "For {his} birthday {he} had been given {a_toy}.",
    "{hero} owned {a_toy}.",
    "{He} kept {a_toy} under {his} pillow.",
)
PROMISE = (
    '{day} {his} {elder} felt ill. "I will bring you {a_gift}," {hero} promised, "before {time}."',
    '{day} {his} {elder} said, "How I would like {a_gift}!" "You shall have it before {time}," said {hero}.',
    '{day} {his} {elder} was sad. "Wait until {time}," said {hero}. "I will come back with {a_gift}."',
    "{day} {hero} made a promise to {his} {elder}: before {time} {he} would bring home {a_gift}.",
)
SETTING_OUT = (
    "So {he} took the {toy} and set out with {friend}.",
    "{He} put the {toy} under {his} arm and called {friend}.",
    "With the {toy} in {his} hand and {friend} at {his} side, {he} left the {place}.",
)
# a problem, a vain attempt and what the helper does about it
PLOTS = (
    (
        "Near {a_spot} {he} stumbled, and the {toy} fell behind it.",
        "{friend} tried to reach it and could not.",
        "The {helper} bent down behind the {spot} and pulled out the {toy}.",
    ),
    (
        "They slept for a while beside {a_spot}. When {he} woke up, the {toy} was gone.",
        "{friend} sniffed at the ground, but found nothing.",
        'The {helper} pointed at the {spot}. "Look!" And there lay the {toy}, covered with dust.',
    ),
    (
        "The wind tore the {toy} out of {his} hands and carried it to {a_spot}.",
        "It was stuck. {hero} pulled until {his} fingers hurt.",
        "The {helper} pushed against the {spot} while {hero} and {friend} pulled, and the {toy} came free.",
    ),
    (
        "Beside {a_spot} {friend} stepped on a thorn.",
        "Poor {friend} could not walk, and {hero} could not see the thorn.",
        "The {helper} pulled it out, and soon {friend} jumped over the {spot} and back.",
    ),
    (
        "A thief snatched the {toy} and hid it in {a_spot}.",
        '"Give it back!" cried {hero}, but the thief ran away.',
        "The {helper} knew every corner of the {spot} and came back with the {toy}.",
    ),
    (
        "At {a_spot} the path split in two, and soon they were lost.",
        "{friend} walked in a circle, and {hero} began to cry.",
        "The {helper} drew a map in the sand, from the {spot} all the way to the {place}.",
    ),
)
MEETING = (
    'Then {a_helper} came by. "Why are you unhappy?" asked the {helper}.',
    '{A_helper} heard them. "What is the matter?" asked the {helper}.',
    'Just then they met {a_helper}. "Please help us!" said {hero}.',
)
THANKS = (
    '"Thank you!" said {hero} to the {helper}.',
    "{hero} sang a song for the {helper}, and {friend} danced to it.",
    '"You are very kind," said {hero}, and gave the {helper} some bread.',
)
MEMORY = (
    'Suddenly {he} thought of {his} promise. "I need {a_gift} for my {elder}!"',
    '"Oh no," said {hero}, "I still have no {gift} for my {elder}."',
    "On the way home {he} thought of {his} {elder} and of the {gift}.",
)
FINDING = (
    "{friend} ran ahead to the {place}, and there they found {a_gift}.",
    '"Take this," said the {helper}, and gave {him} {a_gift}.',
    "They searched beside the {place} until {friend} found {a_gift}.",
)
KEEPING = (
    'Before {time}, {hero} gave the {gift} to {his} {elder}. "You kept your promise," said {his} {elder}.',
    "{hero} was home before {time}. {His} {elder} held the {gift} and smiled.",
    '"Here is your {gift}," said {hero}, just before {time}. {His} {elder} gave {him} a hug.',
)
ENDING = (
    "That night the {toy} lay beside the bed, and {friend} slept at {his} feet.",
    "From then on {hero}, {friend} and the {helper} were friends.",
    "And when {hero} looks at the {toy}, {he} still thinks of the {helper} by the {spot}.",
    "{friend} fell asleep, and {hero} told {his} {elder} all about the {helper} and the {spot}.",
)
