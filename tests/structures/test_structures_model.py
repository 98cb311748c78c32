"""Model checks of the versioned cell and of the slot: every order of steps that C11 allows.

ThreadSanitizer does not model fences, and stress tests rarely produce the rare orders. So the
protocols of cell.h and structures_rows.c are small state machines here. A thread is a set of steps;
each step names the steps that must come before it because of fences, acquires and releases (the
words of a payload are not ordered among themselves). All reachable states are visited. Leaving out
one rule at a time shows that the check can fail and that each rule is needed.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest

State = dict[str, object]
WORDS = 2


class Step(NamedTuple):
    after: tuple[int, ...]  # positions of steps of the same thread
    act: Callable[[State], bool]  # changes the state, or returns False if this is not possible now


def visit(threads: list[list[Step]], start: State) -> int:
    """Take all steps in all allowed orders, and return the number of states."""
    nothing = tuple(frozenset[int]() for _ in threads)
    waiting = [(start, nothing)]
    visited = set()
    while waiting:
        state, done = waiting.pop()
        key = (tuple(sorted(state.items())), done)
        if key in visited:
            continue
        visited.add(key)
        for number, steps in enumerate(threads):
            for position, step in enumerate(steps):
                if position in done[number] or not done[number].issuperset(step.after):
                    continue
                changed = dict(state)
                if step.act(changed):
                    now_done = done[number] | {position}
                    waiting.append((changed, (*done[:number], now_done, *done[number + 1 :])))
    return len(visited)


class Torn(AssertionError):
    """A reader accepted words of two publications as one value."""


class WentBack(AssertionError):
    """A publication replaced a newer version by an older one."""


def number(state: State, name: str) -> int:
    return int(str(state[name]))


def cell_writer(me: str, publications: int, broken: str) -> list[Step]:
    """Return the steps of a writer: claim, store words, publish. A failed one has no effect.

    As in the C code, the writer remembers the version that it claimed, so a writer whose claim was
    taken over continues with its old version. The process `dead` takes no more steps.
    """
    steps: list[Step] = []
    last: tuple[int, ...] = ()

    def alive(act: Callable[[State], bool]) -> Callable[[State], bool]:
        return lambda state: state["dead"] != me and act(state)

    def claim(state: State) -> bool:
        gone = {state["dead"]} | ({state["left"]} if "left counts as dead" in broken else set())
        if state["writer"] and state["writer"] not in gone:
            return False
        state["writer"], state[f"claimed {me}"] = me, state["version"]
        return True

    def store(word: int) -> Callable[[State], bool]:
        def act(state: State) -> bool:
            version = number(state, f"claimed {me}") + 1
            copy = 0 if broken == "one copy" else version % 2
            state[f"{copy}{word}"] = f"{version}{me}"
            return True

        return act

    def publish(state: State) -> bool:
        claimed = state[f"claimed {me}"]
        owns = (state["version"], state["writer"]) == (claimed, me)
        if not owns and "publish by a store" not in broken:
            return True  # the compare-and-swap fails
        version = number(state, f"claimed {me}") + 1
        if version <= number(state, "version"):
            raise WentBack(f"{me} published {version} over {state['version']}")
        state["version"], state["writer"] = version, ""
        state[f"author{version}"] = me
        return True

    for _ in range(publications):
        first = len(steps)
        # Without the release fence words may be stored before the claim; they then use the version
        # that the state has at that time.
        before_words = last if broken == "no release fence" else (first,)
        stores = [store(word) for word in range(WORDS)]
        if broken == "no release fence":
            stores = [_with_current_version(me, act) for act in stores]
        steps.append(Step(last, alive(claim)))
        steps += [Step(before_words, alive(act)) for act in stores]
        steps.append(Step(tuple(range(first, first + 1 + WORDS)), alive(publish)))
        last = (len(steps) - 1,)
    return steps


def _with_current_version(me: str, act: Callable[[State], bool]) -> Callable[[State], bool]:
    def early(state: State) -> bool:
        kept = state[f"claimed {me}"]
        state[f"claimed {me}"] = state["version"]
        done = act(state)
        state[f"claimed {me}"] = kept
        return done

    return early


def cell_reader(broken: str) -> list[Step]:
    def before(state: State) -> bool:
        state["found"] = state["version"]
        return True

    def load(word: int) -> Callable[[State], bool]:
        def act(state: State) -> bool:
            copy = 0 if broken == "one copy" else number(state, "found") % 2
            state[f"read{word}"] = state[f"{copy}{word}"]
            return True

        return act

    def after(state: State) -> bool:
        ahead = number(state, "version") - number(state, "found")
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


def event(name: str, who: str) -> list[Step]:
    """Return the step in which `who` dies, or leaves the group and may still be writing."""

    def happens(state: State) -> bool:
        state[name] = who
        return True

    return [Step((), happens)]


def check_cell(
    broken: str = "",
    *others: list[Step],
    publications: tuple[int, int] = (3, 1),
    reader: bool = True,
) -> int:
    start: State = {"version": 0, "writer": "", "dead": "", "left": ""}
    start |= {"claimed a": 0, "claimed b": 0}
    start |= {f"{copy}{word}": "" for copy in range(2) for word in range(WORDS)}
    writers = [cell_writer(me, n, broken) for me, n in zip("ab", publications, strict=True)]
    return visit([*writers, *([cell_reader(broken)] if reader else []), *others], start)


def test_no_order_of_steps_gives_a_reader_of_a_cell_a_torn_value() -> None:
    assert check_cell() > 1000


@pytest.mark.parametrize("end", ["dead", "left"])
def test_a_writer_that_dies_or_leaves_at_any_step_leaves_the_cell_intact(end: str) -> None:
    assert check_cell("", event(end, "a"), publications=(2, 2)) > 1000


@pytest.mark.parametrize(
    "broken", ["one copy", "ignores the claim", "no release fence", "no acquire fence"]
)
def test_each_rule_of_the_cell_is_needed(broken: str) -> None:
    with pytest.raises(Torn):
        check_cell(broken)


def test_a_writer_that_left_must_keep_its_claim() -> None:
    """The writer may still store words into the copy that the next owner of the claim writes."""
    with pytest.raises(Torn):
        check_cell("left counts as dead", event("left", "a"), publications=(2, 2))


def test_only_publishing_by_compare_and_swap_keeps_versions_from_going_back() -> None:
    """This holds even if a live writer is treated as dead; a plain store would not be enough."""
    rules = {"publications": (1, 2), "reader": False}
    wrong, left = "left counts as dead", event("left", "a")
    assert check_cell(wrong, left, **rules) > 100  # type: ignore[arg-type]
    with pytest.raises(WentBack):
        check_cell(f"{wrong}, publish by a store", left, **rules)  # type: ignore[arg-type]


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

    def check_again(state: State) -> bool:
        state["good"] = broken == "no second check" or state["sequence"] == state["expected"]
        return True

    def check(state: State) -> bool:
        words = {state[f"read{word}"] for word in range(WORDS)}
        if state["good"] and len(words) > 1:
            raise Torn(f"a copy of {words}")
        return True

    loads = tuple(range(1, 1 + WORDS))
    reader = [
        Step((), expect),
        *(Step((0,), load(word)) for word in range(WORDS)),
        Step((0,) if broken == "no acquire fence" else loads, check_again),
        Step((*loads, 1 + WORDS), check),
    ]
    start: State = {"sequence": 0, "good": False}
    return visit([writer, reader], start | {f"word{word}": 0 for word in range(WORDS)})


def test_no_order_of_steps_gives_a_reader_of_a_slot_a_torn_copy() -> None:
    assert check_slot() > 100


@pytest.mark.parametrize("broken", ["no second check", "no release fence", "no acquire fence"])
def test_each_rule_of_the_slot_is_needed(broken: str) -> None:
    with pytest.raises(Torn):
        check_slot(broken)
