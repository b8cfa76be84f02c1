"""The labels of every task, against slow implementations that share no code with it."""

import itertools
import re
from collections import defaultdict

import numpy as np
import pytest
from elman_tasks.automaton import Automaton
from elman_tasks.catalogue import TASKS, find
from elman_tasks.draws import Draws

from elman_core.extension import ConfigError


def permuted(shown, names, start):
    """Products of permutations by matrices."""
    product, got = np.eye(start), []
    for x in shown:
        product = product @ np.eye(start)[list(eval(names[x]))]
        got.append(str(tuple(product.argmax(1).tolist())))
    return got


def brackets(shown, names, answer):
    """Pairs are removed from the text until none is left."""
    got = []
    for n in range(1, len(shown) + 1):
        text, before = "".join(names[x] for x in shown[:n]), None
        while text != before:
            before, text = text, re.sub(r"\(\)|\[\]", "", text)
        got.append(answer(text))
    return got


def counted(shown, names):
    text, got = "".join(names[x] for x in shown), []
    for n in range(1, len(text) + 1):
        last = re.search(r"(a+)(b*)(c*)$", text[:n])
        a, b, c = map(len, last.groups())
        got.append(None if not b else "b" if b < a else "c" if c < a else "a")
    return got


def held(shown, names):
    return [next((str(x) for x in shown[n::-1] if "flag" in names[x]), None) for n in range(len(shown))]


SLOW = {
    "parity": lambda x, _names: [("even", "odd")["".join(map(str, x)).count("1") % 2]],
    "even_pairs": lambda x, _names: [("even", "odd")[sum(a != b for a, b in itertools.pairwise(x)) % 2]],
    "cycle_navigation": lambda x, _names: [str((x.count(1) - x.count(2)) % 5)],
    "modular_arithmetic": lambda x, names: [str(eval("".join(names[i] for i in x[:-1])) % 5)],
    "s3": lambda x, names: permuted(x, names, 3),
    "a5": lambda x, names: permuted(x, names, 5),
    "a5:generators=2": lambda x, names: permuted(x, names, 5),
    "s5": lambda x, names: permuted(x, names, 5),
    "s5:generators=2": lambda x, names: permuted(x, names, 5),
    "z60": lambda x, _names: [str(sum(x[: n + 1]) % 60) for n in range(len(x))],
    "dyck1": lambda x, names: brackets(x, names, lambda left: str(len(left))),
    "dyck2": lambda x, names: brackets(x, names, lambda left: {"(": ")", "[": "]"}[left[-1]] if left else "none"),
    "anbncn": counted,
    "flag_hold": held,
}


@pytest.mark.parametrize("spec", SLOW)
def test_answers_of_automata_equal_slow_ones(spec):
    task = find(spec)
    made = task._made(task.train[1])
    for drawn, rows in ((task.batch(3, 7, range(40), 40), 40), (task.test(task.tests[0], 5), 5)):
        asked = 0
        for tokens, targets, scored in zip(drawn.tokens, drawn.targets, drawn.scored, strict=True):
            word = tokens[: scored.nonzero()[0][-1] + 1].tolist()
            got = [made.answers[y - len(made.symbols)] if s else None for y, s in zip(targets, scored, strict=True)]
            slow = SLOW[spec](word, made.symbols)
            assert got[len(word) - len(slow) : len(word)] == slow
            asked += len(slow)
        assert asked >= rows


def test_lengths_are_spread_and_one_answer_is_asked():
    drawn = TASKS["modular_arithmetic"].batch(0, 0, range(500), 500)
    lengths = drawn.scored.argmax(1) + 1
    assert (drawn.scored.sum(1) == 1).all()
    assert set(lengths) == set(range(4, 41, 2))


def test_every_n_is_as_likely_in_anbncn():
    drawn = TASKS["anbncn"].batch(0, 0, range(2000), 2000)
    firsts = (drawn.tokens == 1).argmax(1)  # the first b comes after n letters a
    shares = np.bincount(firsts, minlength=14)[1:] / 2000
    assert abs(shares - 1 / 13).max() < 4 * (1 / 13 / 2000) ** 0.5


def test_every_letter_of_a_keyed_automaton_is_drawn():
    words = find("keyed_automata:letters=12").test(40, 64).tokens
    assert set(np.unique(words)) == set(range(4 + 12))


def test_a_key_chooses_permutations_and_they_stay_the_same():
    drawn, moves = TASKS["keyed_automata"].batch(0, 0, range(200), 200), defaultdict(set)
    for tokens, targets in zip(drawn.tokens, drawn.targets, strict=True):
        for (before, after), letter in zip(itertools.pairwise(targets), tokens[1:], strict=True):
            moves[tokens[0], letter, before].add(after)
    assert len(moves) == 4 * 3 * 5
    assert all(len(after) == 1 for after in moves.values())
    for key, letter in itertools.product(range(4), range(4, 7)):
        assert len(set.union(*(moves[key, letter, state] for state in range(7, 12)))) == 5


def pairs_of(text, keys):
    """(key, value, place after the pair) of tokens below `keys`, and the run of others that follows."""
    runs = [(k, list(g)) for k, g in itertools.groupby(enumerate(text), lambda item: item[1] < keys)]
    return [([x for _, x in a], b) for (is_key, a), (_, b) in itertools.pairwise(runs) if is_key]


def test_recalled_values_equal_those_of_a_dictionary():
    for spec, keys in (("in_context_recall", 8), ("fuzzy_recall", 7), ("mqar", None), ("mqar:pairs=8", None)):
        task = find(spec)
        drawn = task.batch(1, 2, range(50), 50)
        for tokens, targets, scored in zip(drawn.tokens.tolist(), drawn.targets, drawn.scored, strict=True):
            expected, known = {}, {}
            if keys is None:
                pairs = 8 if "=" in spec else 4
                known = dict(zip(tokens[: 2 * pairs : 2], tokens[1 : 2 * pairs : 2], strict=True))
                asked = scored.nonzero()[0]
                assert sorted(tokens[t] for t in asked) == sorted(known)
                assert [known[tokens[t]] for t in asked] == targets[asked].tolist()
                continue
            text = [*tokens, int(targets[-1])]
            for key, value in pairs_of(text, keys):
                numbers = [x for _, x in value]
                if tuple(key) in known:
                    expected |= {t - 1: x for t, x in value}
                    assert numbers == known[tuple(key)][: len(numbers)]
                else:
                    known[tuple(key)] = numbers
            assert dict(zip(scored.nonzero()[0].tolist(), targets[scored].tolist(), strict=True)) == expected


def test_noise_is_never_asked_and_is_a_fifth():
    drawn = TASKS["noisy_recall"].batch(0, 0, range(300), 300)
    noise = drawn.tokens >= 16
    assert abs(noise.mean() - 0.2) < 0.01
    assert not (noise & drawn.scored).any()
    assert (noise[:, :-1:2] == noise[:, 1::2]).all()


def test_copies_facts_and_inductions():
    for name, blank in (("selective_copying", 14), ("compression", 14)):
        drawn = TASKS[name].batch(0, 0, range(50), 50)
        for tokens, targets, scored in zip(drawn.tokens, drawn.targets, drawn.scored, strict=True):
            mark = tokens.tolist().index(15)
            assert targets[scored].tolist() == [x for x in tokens[:mark] if x != blank]
            assert scored.nonzero()[0][0] == mark + 1
    drawn, values = TASKS["memorization"].batch(0, 0, range(500), 500), defaultdict(set)
    for key, value in zip(drawn.tokens[:, ::2].ravel(), drawn.targets[:, 1::2].ravel(), strict=True):
        values[key].add(value)
    assert {len(v) for v in values.values()} == {1}
    assert len(set.union(*values.values())) == len(values) == 127
    drawn = TASKS["induction"].batch(0, 0, range(50), 50)
    for tokens, targets in zip(drawn.tokens.tolist(), drawn.targets, strict=True):
        assert tokens.count(15) == 2
        assert targets[-1] == tokens[tokens.index(15) + 1]


@pytest.mark.parametrize("name", TASKS)
def test_rows_depend_on_seed_step_and_row_alone(name):
    task = TASKS[name]
    whole, part = task.batch(5, 9, range(8), 8), task.batch(5, 9, [6, 1], 8)
    for a, b in zip(vars(whole).values(), vars(part).values(), strict=True):
        assert a is None or np.array_equal(a[[6, 1]], b)
    assert not np.array_equal(whole.tokens, task.batch(6, 9, range(8), 8).tokens)
    assert not np.array_equal(whole.tokens, task.batch(5, 10, range(8), 8).tokens)
    assert whole.tokens.max() < task.vocabulary > whole.targets.max()
    assert whole.scored.any()


def test_a_task_of_few_examples_repeats_them_and_tests_others():
    task = find("memorization:examples=16")
    seen = {row.tobytes() for step in range(5) for row in task.batch(0, step, range(64), 64).tokens}
    assert len(seen) == 16
    assert not seen & {row.tobytes() for row in task.test(32, 64).tokens}


@pytest.mark.parametrize("spec", ["parity", "dyck1:depth=3", "modular_arithmetic", "even_pairs", "anbncn"])
def test_what_a_window_tells_equals_counting_all_words(spec):
    task, length = find(spec), 8
    made: Automaton = task._made(length)
    words = [((), made.start, 1.0)]
    for t in range(length):
        grown = []
        for word, state, odds in words:
            free = [x for x in range(len(made.symbols)) if made.step(state, x) is not None and x != made.end]
            free = [made.end] if made.end is not None and t == length - 1 else free
            whole = sum(made.odds(state, x) for x in free)
            grown += [((*word, x), made.step(state, x), odds * made.odds(state, x) / whole) for x in free]
        words = grown
    for w in (0, 1, 3, length):
        by_window = defaultdict(lambda: defaultdict(float))
        for word, state, odds in words:
            if made.answer(state) is not None:
                by_window[word[length - w :]][made.answer(state)] += odds
        exact = sum(max(answers.values()) for answers in by_window.values())
        exact /= sum(sum(answers.values()) for answers in by_window.values())
        got = made.tables().window_accuracy(length, [w], Draws(0, np.arange(2000)))[0]
        assert got == pytest.approx(exact, abs=4 * 0.5 / 2000**0.5)


def test_a_wrong_spec_is_one_line_that_says_what_is_right():
    for spec, said in (
        ("party", "Did you mean 'parity'"),
        ("parity:size=3", "takes train, tests"),
        ("parity:labels=all", "not labels=all"),
        ("mqar:pairs=x", "whole numbers"),
        ("mqar:pairs=99", "do not fit"),
        ("parity:train=9-3", "SHORTEST-LONGEST"),
        ("mqar:pairs=16,tests=64+32", "16 pairs do not fit into 32 inputs"),  # not after the training
        ("mqar:train=10-64", "trains on sequences of one length: train=64"),
        ("z60:generators=5", "generators is 2"),
        ("s3:generators=5", "generators is 2"),
        ("anbncn:tests=40+1", "asks nothing in sequences of 1 inputs"),
        ("s5:tests=40+100000000", "lengths are from 1 to 1,048,576"),
        ("cycle_navigation:places=0", "no sequences with these options"),
        ("flag_hold:gap=0", "no sequences with these options"),
        ("in_context_recall:noise=20", "no sequences with these options"),
        ("fuzzy_recall:vocabulary=4", "no sequences with these options"),
        ("cycle_navigation:places=-3", "places takes whole numbers from 0 to 1,048,576, not '-3'"),
        ("cycle_navigation:places=1000000000", "places takes whole numbers from 0 to 1,048,576"),
        ("dyck2:depth=30", "its automaton has more than 262,144 states"),
        ("keyed_automata:states=100000", "its automaton has more than 149,796 states"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            find(spec)
