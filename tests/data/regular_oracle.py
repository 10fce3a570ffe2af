"""Automata as dictionaries and languages as sets of words: slow, and nothing to get wrong."""


def to_dictionary(automata, which):
    """{state: {letter: state}} of one automaton of a table."""
    letters, targets = automata.letters[which].tolist(), automata.targets[which].tolist()
    edges = {
        state: {letter: target for letter, target in zip(*pair, strict=True) if letter >= 0}
        for state, pair in enumerate(zip(letters, targets, strict=True))
    }
    return {state: leaving for state, leaving in edges.items() if leaving}


def words(edges, state, length):
    """All words of up to `length` letters that a walk from `state` spells."""
    found, frontier = {()}, {((), state)}
    for _ in range(length):
        frontier = {((*word, letter), target) for word, place in frontier for letter, target in edges[place].items()}
        found |= {word for word, _ in frontier}
    return frozenset(found)


def reachable(edges):
    """States that a walk from 0 reaches, breadth first with letters in order."""
    order = [0]
    for state in order:
        order += [target for _, target in sorted(edges[state].items()) if target not in order]
    return list(dict.fromkeys(order))


def legal_after(edges, string):
    state = 0
    for letter in string:
        state = edges[state][letter]
    return set(edges[state])
