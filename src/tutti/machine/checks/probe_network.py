"""Live probes between ranks: calls between hosts, their clocks, and the rate of every link."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import pairwise

from tutti.machine.checks.active import slow_links
from tutti.machine.checks.company import Company
from tutti.machine.checks.mesh import Caller, Place, Service
from tutti.machine.checks.patient import Call, Offset, Rate

# Above this many ranks one of each host speaks for it: pairs grow with the square.
_ALL_PAIRS = 8
_ROUNDS = 3
_CONFIRMATIONS = 3


def open_mesh(company: Company) -> tuple[Service, list[Place]]:
    """Start this rank's service; returns it and where everybody's is."""
    service = Service(company.own_address())
    return service, [Place(**place) for place in company.gather(asdict(service.place))]


def call_hosts(company: Company, places: Sequence[Place]) -> tuple[Call, ...]:
    """Let every host call every other, all at once."""
    found: list[Call] = []
    if company.leads:
        src = company.hosts[company.rank]
        others = [rank for rank in company.leaders if rank != company.rank]
        with ThreadPoolExecutor(16) as pool:
            errors = pool.map(lambda rank: _call(places[rank]), others)
            found = [
                Call(src, company.hosts[rank], error)
                for rank, error in zip(others, errors, strict=True)
            ]
    gathered = company.gather([asdict(call) for call in found])
    return tuple(Call(**call) for calls in gathered for call in calls)


def _call(place: Place) -> str | None:
    try:
        with Caller(place) as caller:
            caller.hello()
    except TimeoutError:
        return f"no answer at {place.address} port {place.port}"
    except OSError as error:
        return f"{error.strerror or error} at {place.address} port {place.port}"
    return None


def compare_clocks(company: Company, places: Sequence[Place]) -> tuple[Offset, ...]:
    """Each host asks the first host's clock, one after the other: a busy clock answers late."""
    found: list[Offset] = []
    for leader in company.leaders[1:]:
        if company.rank == leader:
            try:
                with Caller(places[0]) as caller:
                    caller.hello()
                    ahead, round_trip = caller.offset()
                found.append(Offset(company.hosts[leader], -ahead, round_trip))
            except OSError:
                pass  # the calls between hosts tell why
        company.gather(None)
    gathered = company.gather([asdict(each) for each in found])
    return tuple(Offset(**each) for offsets in gathered for each in offsets)


def measure_links(
    company: Company, places: Sequence[Place], calls: Sequence[Call] = ()
) -> tuple[Rate, ...]:
    """Both ways between every two ranks, the best of several rounds.

    Whoever looks slow is measured again: noise hits somebody else next time, a bad link stays bad.
    Hosts that could not call each other have been named for that, and are left out.
    """
    cut = {frozenset((call.src, call.dst)) for call in calls if call.error is not None}
    pairs = [
        (low, high)
        for low, high in link_pairs(company.hosts)
        if frozenset((company.hosts[low], company.hosts[high])) not in cut
    ]
    hosts = {str(rank): host for rank, host in enumerate(company.hosts)}
    best: dict[str, float] = {}
    for _ in range(_ROUNDS):
        _measure(company, places, pairs, best)
    for _ in range(_CONFIRMATIONS):
        bad, slow = slow_links(_rates(best, company), hosts)
        again = [
            (low, high)
            for low, high in pairs
            if {f"{low}-{high}", f"{high}-{low}"} & set(slow)
            or {company.hosts[low], company.hosts[high]} & set(bad)
        ]
        if not again:
            break
        _measure(company, places, again, best)
    return _rates(best, company)


def link_pairs(hosts: Sequence[int]) -> list[tuple[int, int]]:
    """Every two ranks; in a large world every two hosts, and neighbours on each."""
    ranks = range(len(hosts))
    everybody = [(low, high) for low in ranks for high in ranks if low < high]
    if len(hosts) <= _ALL_PAIRS:
        return everybody
    leaders = {hosts.index(host) for host in hosts}
    members = {host: [r for r in ranks if hosts[r] == host] for host in hosts}
    near = {pair for each in members.values() for pair in pairwise(each)}
    return [pair for pair in everybody if set(pair) <= leaders or pair in near]


def _measure(
    company: Company,
    places: Sequence[Place],
    pairs: Sequence[tuple[int, int]],
    best: dict[str, float],
) -> None:
    for turn in turns(pairs, company.hosts):
        found: dict[str, float] = {}
        for low, high in turn:
            if company.rank != low:
                continue
            try:
                with Caller(places[high]) as caller:
                    caller.hello()
                    found = {
                        f"{low}-{high}": caller.send_rate(),
                        f"{high}-{low}": caller.receive_rate(),
                    }
            except OSError:
                found = {f"{low}-{high}": 0.0, f"{high}-{low}": 0.0}
        for rates in company.gather(found):
            for name, value in rates.items():
                best[name] = max(best.get(name, 0.0), value)


def turns(pairs: Sequence[tuple[int, int]], hosts: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Pairs that may go at once: no host takes part in two of them."""
    left, order = list(pairs), []
    while left:
        busy: set[int] = set()
        turn = []
        for pair in left:
            taken = {hosts[rank] for rank in pair}
            if not taken & busy:
                busy |= taken
                turn.append(pair)
        left = [pair for pair in left if pair not in turn]
        order.append(turn)
    return order


def _rates(best: dict[str, float], company: Company) -> tuple[Rate, ...]:
    rates = []
    for name, value in best.items():
        src, dst = (company.hosts[int(rank)] for rank in name.split("-"))
        rates.append(Rate(name, src, "loopback" if src == dst else "network", value))
    return tuple(rates)
