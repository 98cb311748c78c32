"""The roll call: every rank says who and where it is, rank 0 reads the list back to all.

It settles before the first collective what launchers leave open: which ranks share a host, who
is missing, whose versions differ. And it gives each start of the world a name of its own: after
a restart by torchrun the same store still holds the answers of the dead (their addresses too,
which is why torchrun's own restarts often fail with gloo), so an answer only counts once its
author has confirmed the list it is on.
"""

import importlib.util
import json
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from tutti.machine.cpus import allowed_cpus, format_cpu_list
from tutti.machine.environment import versions
from tutti.machine.system import boot_id
from tutti.world.errors import RanksDiffer, UsageError
from tutti.world.identity import Identity


@dataclass(frozen=True)
class Answer:
    """What a rank says of itself at the roll call. Travels as JSON, never as a pickle."""

    rank: int
    host: str
    # Ranks with the same machine share memory and loopback; a container or a network namespace
    # of its own counts as another machine, since its loopback is another one.
    machine: str
    address: str
    # Where rank 0 waits for the others' lines; 0 on other ranks.
    lines_port: int
    local_rank: int | None
    local_size: int | None
    node: int | None
    gpus: tuple[str, ...]
    cpus: str
    versions: dict[str, str]
    # Whether torch knows the shared-memory backend here: all ranks must use the same one.
    shm: bool
    token: str


@dataclass(frozen=True)
class Roll:
    """All answers, in rank order, and the name of this start of the world."""

    answers: tuple[Answer, ...]
    start: str


def answer_for(
    identity: Identity, address: str, gpus: Sequence[str], lines_port: int = 0
) -> Answer:
    """What this process says of itself."""
    return Answer(
        rank=identity.rank,
        host=socket.gethostname(),
        machine=f"{socket.gethostname()}/{boot_id()}/{os.readlink('/proc/self/ns/net')}",
        address=address,
        lines_port=lines_port,
        local_rank=identity.local_rank,
        local_size=identity.local_size,
        node=identity.node,
        gpus=tuple(gpus),
        cpus=format_cpu_list(allowed_cpus()),
        versions=versions() | {"torch": torch.__version__},  # with its CUDA
        shm=has_shm(),
        token=uuid.uuid4().hex,
    )


def has_shm() -> bool:
    """Whether torch knows the shared-memory backend here, and its compiled core is installed."""
    known = "shm" in dist.Backend.backend_list
    return known and importlib.util.find_spec("tutti.comm.shm._core") is not None


def call_roll(store: dist.Store, answer: Answer, size: int, timeout: float) -> Roll:
    """Exchange answers with all ranks; returns the same Roll everywhere."""
    patience = _Patience(store, size, timeout)
    try:
        store.set(f"tutti/answer/{answer.rank}", json.dumps(asdict(answer)))
        return (
            _lead(store, size, patience) if answer.rank == 0 else _follow(store, answer, patience)
        )
    except RuntimeError:
        raise UsageError(
            "rank 0, or its host, went away at the roll call: see its output"
        ) from None


class _Patience:
    """Waits a little between two looks at the store, and says who is missing when time is up."""

    def __init__(self, store: dist.Store, size: int, timeout: float) -> None:
        self.store = store
        self.answers = [f"tutti/answer/{rank}" for rank in range(size)]
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        # One store answers all ranks: the more they are, the less often each may ask.
        self.interval = 0.02 * (1 + size / 64)

    def pause(self, waiting_for: Sequence[str] = ()) -> None:
        if time.monotonic() < self.deadline:
            time.sleep(self.interval)
            return
        keys = waiting_for or self.answers
        missing = [key.rpartition("/")[2] for key in keys if not self.store.check([key])]
        raise UsageError(
            f"rank {', '.join(missing) or '0'} of {len(self.answers)} did not come to the roll "
            f"call within {self.timeout:g} s: see their output, or give --start-timeout more"
        )


def _lead(store: dist.Store, size: int, patience: _Patience) -> Roll:
    """Rank 0: publish a list, have it confirmed by all, publish again when an answer changed."""
    while not store.check(patience.answers):
        patience.pause()
    while True:
        texts = [text.decode() for text in store.multi_get(patience.answers)]
        start = uuid.uuid4().hex
        store.set(f"tutti/{start}/roll", json.dumps(texts))
        store.set("tutti/start", start)
        confirmations = [f"tutti/{start}/confirmed/{rank}" for rank in range(1, size)]
        next_look = time.monotonic() + 0.5
        while confirmations and not store.check(confirmations):
            patience.pause(confirmations)
            if time.monotonic() > next_look:
                if [text.decode() for text in store.multi_get(patience.answers)] != texts:
                    break
                next_look = time.monotonic() + 0.5
        else:
            store.set(f"tutti/{start}/complete", "yes")
            return _roll(start, texts)


def _follow(store: dist.Store, answer: Answer, patience: _Patience) -> Roll:
    """Other ranks: confirm the first list that holds this very answer, wait until all have."""
    while not store.check(["tutti/start"]):
        patience.pause()
    while True:
        start = store.get("tutti/start").decode()
        texts = json.loads(store.get(f"tutti/{start}/roll"))
        mine = answer.rank < len(texts) and json.loads(texts[answer.rank])["token"] == answer.token
        if mine:
            store.set(f"tutti/{start}/confirmed/{answer.rank}", "yes")
        # A list from before a restart holds another token: rank 0 will write a new one.
        while store.get("tutti/start").decode() == start:
            if mine and store.check([f"tutti/{start}/complete"]):
                return _roll(start, texts)
            patience.pause()


def _roll(start: str, texts: Sequence[str]) -> Roll:
    answers = []
    for text in texts:
        fields = json.loads(text)
        answers.append(Answer(**{**fields, "gpus": tuple(fields["gpus"])}))
    return Roll(tuple(answers), start)


def refuse_different_versions(answers: Sequence[Answer]) -> None:
    """Raise RanksDiffer, naming the odd rank out, unless all ranks run the same versions."""
    for name in sorted({name for answer in answers for name in answer.versions}):
        by_rank = [answer.versions.get(name, "none") for answer in answers]
        usual, count = Counter(by_rank).most_common(1)[0]
        odd = [answer for answer, seen in zip(answers, by_rank, strict=True) if seen != usual]
        if odd:
            who = ", ".join(f"rank {a.rank} on {a.host} has {by_rank[a.rank]}" for a in odd[:4])
            more = f" and {len(odd) - 4} more" if len(odd) > 4 else ""
            raise RanksDiffer(
                f"ranks run different versions of {name}: {who}{more}, the other {count} "
                f"{usual}: install the same everywhere"
            )
