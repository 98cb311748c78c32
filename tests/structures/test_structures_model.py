"""Every order in which C11 lets the steps of the versioned cell and of the slot happen, tried out.

ThreadSanitizer does not understand fences, and chance does not meet the rare orders. So here the
protocols of cell.h and structures_slot.c are small machines: a thread is a set of steps, each with
the steps that must be seen before it (what its fences, acquires and releases order; two words of a
payload are not ordered). All reachable states are visited. That the check can fail is shown by
leaving out one rule at a time.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest

State = dict[str, object]
WORDS = 2


class Step(NamedTuple):
    after: tuple[int, ...]  # positions of steps of the same thread
    act: Callable[[State], bool]  # changes the state; False: not possible now


def visit(threads: list[list[Step]], start: State) -> int:
    """Take all steps in all orders that are allowed; returns how many states there were."""
    nothing = tuple(frozenset[int]() for _ in threads)
    waiting = [(start, nothing)]
    seen = set()
    while waiting:
        state, done = waiting.pop()
        key = (tuple(sorted(state.items())), done)
        if key in seen:
            continue
        seen.add(key)
        for number, steps in enumerate(threads):
            for position, step in enumerate(steps):
                if position in done[number] or not done[number].issuperset(step.after):
                    continue
                changed = dict(state)
                if step.act(changed):
                    mine = done[number] | {position}
                    waiting.append((changed, (*done[:number], mine, *done[number + 1 :])))
    return len(seen)


class Torn(AssertionError):
    pass


def cell_writer(me: str, publications: int, broken: str) -> list[Step]:
    steps: list[Step] = []
    last: tuple[int, ...] = ()
    for _ in range(publications):
        first = len(steps)

        def claim(state: State) -> bool:
            if state["writer"] and state["writer"] != state["dead"]:
                return False
            state["writer"] = me
            return True

        def store(word: int) -> Callable[[State], bool]:
            def act(state: State) -> bool:
                version = int(str(state["version"])) + 1
                copy = 0 if broken == "one copy" else version % 2
                state[f"{copy}{word}"] = f"{version}{me}"
                return True

            return act

        def publish(state: State) -> bool:
            if state["writer"] != me:  # it was declared dead: it publishes nothing any more
                return False
            version = int(str(state["version"])) + 1
            state["version"], state["writer"] = version, ""
            state[f"author{version}"] = me
            return True

        before_words = last if broken == "no release fence" else (first,)
        steps.append(Step(last, claim))
        steps += [Step(before_words, store(word)) for word in range(WORDS)]
        steps.append(Step(tuple(range(first, first + 1 + WORDS)), publish))
        last = (len(steps) - 1,)
    return steps


def cell_reader(broken: str) -> list[Step]:
    def before(state: State) -> bool:
        state["found"] = state["version"]
        return True

    def load(word: int) -> Callable[[State], bool]:
        def act(state: State) -> bool:
            copy = 0 if broken == "one copy" else int(str(state["found"])) % 2
            state[f"read{word}"] = state[f"{copy}{word}"]
            return True

        return act

    def after(state: State) -> bool:
        ahead = int(str(state["version"])) - int(str(state["found"]))
        state["good"] = ahead == 0 or (
            ahead == 1 and (broken == "ignores the claim" or not state["writer"])
        )
        return True

    def check(state: State) -> bool:
        version = state["found"]
        if version and state["good"]:
            words = {state[f"read{word}"] for word in range(WORDS)}
            if words != {f"{version}{state[f'author{version}']}"}:
                raise Torn(f"version {version} read as {sorted(map(str, words))}")
        return True

    loads = tuple(range(1, 1 + WORDS))
    before_after = (0,) if broken == "no acquire fence" else loads
    return [
        Step((), before),
        *(Step((0,), load(word)) for word in range(WORDS)),
        Step(before_after, after),
        Step((*loads, 1 + WORDS), check),
    ]


def check_cell(broken: str = "") -> int:
    start: State = {"version": 0, "writer": "", "dead": ""}
    start |= {f"{copy}{word}": "" for copy in range(2) for word in range(WORDS)}
    writers = [cell_writer("a", 3, broken), cell_writer("b", 1, broken)]
    return visit([*writers, cell_reader(broken)], start)


def test_no_order_of_steps_lets_a_reader_of_a_cell_see_a_mixture() -> None:
    assert check_cell() > 1000


def test_a_writer_that_dies_anywhere_leaves_a_cell_whole_for_readers_and_for_the_next_writer() -> (
    None
):
    def die(state: State) -> bool:
        state["dead"] = "a"
        return True

    start: State = {"version": 0, "writer": "", "dead": ""}
    start |= {f"{copy}{word}": "" for copy in range(2) for word in range(WORDS)}
    dying = [
        Step(step.after, lambda state, act=step.act: state["dead"] != "a" and act(state))
        for step in cell_writer("a", 2, "")
    ]
    assert visit([dying, cell_writer("b", 2, ""), cell_reader(""), [Step((), die)]], start) > 1000


@pytest.mark.parametrize(
    "broken", ["one copy", "ignores the claim", "no release fence", "no acquire fence"]
)
def test_each_rule_of_the_cell_is_needed(broken: str) -> None:
    with pytest.raises(Torn):
        check_cell(broken)


def check_slot(broken: str = "") -> int:
    writer: list[Step] = []
    last: tuple[int, ...] = ()
    for value in (1, 2):
        first = len(writer)

        def begin(state: State) -> bool:
            state["sequence"] = int(str(state["sequence"])) | 1
            return True

        def store(word: int, value: int) -> Callable[[State], bool]:
            def act(state: State) -> bool:
                state[f"word{word}"] = value
                return True

            return act

        def end(state: State) -> bool:
            state["sequence"] = int(str(state["sequence"])) + 1
            return True

        before_words = last if broken == "no release fence" else (first,)
        writer.append(Step(last, begin))
        writer += [Step(before_words, store(word, value)) for word in range(WORDS)]
        writer.append(Step(tuple(range(first, first + 1 + WORDS)), end))
        last = (len(writer) - 1,)

    def expect(state: State) -> bool:
        state["expected"] = state["sequence"]
        return not int(str(state["sequence"])) % 2

    def load(word: int) -> Callable[[State], bool]:
        def act(state: State) -> bool:
            state[f"read{word}"] = state[f"word{word}"]
            return True

        return act

    def again(state: State) -> bool:
        state["good"] = broken == "no second look" or state["sequence"] == state["expected"]
        return True

    def check(state: State) -> bool:
        words = {state[f"read{word}"] for word in range(WORDS)}
        if state["good"] and len(words) > 1:
            raise Torn(f"a copy of {words}")
        return True

    loads = tuple(range(1, 1 + WORDS))
    copier = [
        Step((), expect),
        *(Step((0,), load(word)) for word in range(WORDS)),
        Step((0,) if broken == "no acquire fence" else loads, again),
        Step((*loads, 1 + WORDS), check),
    ]
    start: State = {"sequence": 0, "good": False}
    return visit([writer, copier], start | {f"word{word}": 0 for word in range(WORDS)})


def test_no_order_of_steps_lets_a_copier_of_a_slot_keep_a_mixture() -> None:
    assert check_slot() > 100


@pytest.mark.parametrize("broken", ["no second look", "no release fence", "no acquire fence"])
def test_each_rule_of_the_slot_is_needed(broken: str) -> None:
    with pytest.raises(Torn):
        check_slot(broken)
