"""Colours: Okabe and Ito's set, which people with any colour vision tell apart; one part of a step
has one colour in every figure of every page.
"""

BLUE, SKY, ORANGE, VERMILION = "#0072b2", "#56b4e9", "#e69f00", "#d55e00"
GREEN, PURPLE, GREY, PALE = "#009e73", "#cc79a7", "#7d8590", "#b6bdc7"

PARTS = {
    "compute": BLUE,
    "hidden": SKY,
    "exposed": ORANGE,
    "wait": VERMILION,
    "bubble": PURPLE,
    "input": GREEN,
    "host_gap": GREY,
    "rest": PALE,
}
PART_NAMES = {
    "compute": "compute",
    "hidden": "hidden communication",
    "exposed": "exposed communication",
    "wait": "wait",
    "bubble": "bubble",
    "input": "input",
    "host_gap": "gaps",
    "rest": "rest",
}
LOSSES = {
    "exposed_comm": ORANGE,
    "wait": VERMILION,
    "bubble": PURPLE,
    "input": GREEN,
    "other": GREY,
}
LOSS_NAMES = {
    "exposed_comm": "exposed communication",
    "wait": "wait",
    "bubble": "bubble",
    "input": "input",
    "other": "other",
}

_SERIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY)
_DASHES = ("solid", "dash", "dot", "dashdot")
_SIGNS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")


def series(number: int) -> str:
    """The colour of a run, a backend or whatever else is numbered."""
    return _SERIES[number % len(_SERIES)]


def dash(number: int) -> str:
    """So that curves on top of each other are all seen."""
    return _DASHES[number % len(_DASHES)]


def sign(number: int) -> str:
    """A second mark beside the colour."""
    return _SIGNS[number % len(_SIGNS)]
