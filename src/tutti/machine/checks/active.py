"""Active tests: what every rank, GPU and link really does, and who is slower than the others."""

from collections.abc import Iterator, Sequence
from statistics import median

from tutti.machine.checks.check import Check, on_world
from tutti.machine.checks.environment import settings
from tutti.machine.checks.finding import Skip, Verdict, fail, fine, warn
from tutti.machine.checks.network import chosen, outer
from tutti.machine.checks.outliers import slow_ones
from tutti.machine.checks.patient import Patient, Rate

_NOT_ASKED = "not asked for: --active"
# Below half of the usual speed something is broken; above it, it may be only disturbed.
_BROKEN = 0.5
# One TCP stream depends on the CPU at either end: a fifth less is not yet the link's.
_LINK_FLOOR = 0.2


def _rates(patient: Patient, rates: tuple[Rate, ...] | None, name: str) -> tuple[Rate, ...]:
    if rates is None:
        raise Skip(patient.probes.reasons.get(name, _NOT_ASKED))
    return rates


def _kinds(rates: Sequence[Rate]) -> dict[str, list[Rate]]:
    """Rates of one kind, which alone are compared."""
    kinds: dict[str, list[Rate]] = {}
    for rate in rates:
        kinds.setdefault(rate.kind, []).append(rate)
    return kinds


def _slow(patient: Patient, rates: tuple[Rate, ...], unit: str, scale: float) -> Iterator[Verdict]:
    for rate in rates:
        if rate.error:
            host = patient.machines[rate.host].host
            yield fail(rate.name, f"it could not be measured: {rate.error}", "a rate", host=host)
    for kind, same in _kinds([rate for rate in rates if not rate.error]).items():
        values = {rate.name: rate.value for rate in same}
        usual = median(values.values())
        slow = slow_ones(values)
        for rate in same:
            host = patient.machines[rate.host].host
            if not rate.ok:
                observed = f"the same work gave two different results ({kind})"
                yield fail(rate.name, observed, "the same bits", "have it replaced", host=host)
            elif rate.name in slow:
                say = fail if rate.value < _BROKEN * usual else warn
                observed = f"{rate.value / scale:.3g} {unit} ({kind})"
                expected = f"about {usual / scale:.3g} {unit}, the median of {len(same)}"
                yield say(rate.name, observed, expected, host=host)
        if not slow and all(rate.ok for rate in same):
            low, high = min(values.values()) / scale, max(values.values()) / scale
            told = f"{low:.3g}" if len(same) == 1 else f"{low:.3g} to {high:.3g}"
            yield fine(f"{told} {unit} ({kind}, {len(same)} measured)", "world")


def _compute(patient: Patient) -> Iterator[Verdict]:
    rates = _rates(patient, patient.probes.compute, "compute")
    yield from _slow(patient, rates, "TFLOP/s", 1e12)


def _bandwidth(patient: Patient) -> Iterator[Verdict]:
    rates = _rates(patient, patient.probes.bandwidth, "bandwidth")
    yield from _slow(patient, rates, "GB/s", 1e9)


def slow_links(rates: Sequence[Rate], hosts: dict[str, int]) -> tuple[list[int], list[str]]:
    """Hosts of which every link is slow, and then the slow links between the others.

    `hosts` has the host of each rank, by the rank's name. A host counts by its best link, out and
    in: where one link is bad, its best is as good as anybody's, and the link is what is named.
    Where all links of one host are bad they may be the majority, and the host is the odd one out.
    """
    between = [
        (rate.value, [hosts[rank] for rank in rate.name.split("-")])
        for rate in rates
        if rate.kind == "network"
    ]
    bad: set[int] = set()
    if len({host for _, pair in between for host in pair}) >= 3:
        for end in (0, 1):
            best: dict[str, float] = {}
            for value, pair in between:
                name = str(pair[end])
                best[name] = max(best.get(name, 0.0), value)
            bad |= {int(name) for name in slow_ones(best, _LINK_FLOOR)}
    left = [
        rate
        for rate in rates
        if rate.kind != "network" or not bad & {hosts[rank] for rank in rate.name.split("-")}
    ]
    slow = [
        name
        for same in _kinds(left).values()
        for name in slow_ones({rate.name: rate.value for rate in same}, _LINK_FLOOR)
    ]
    return sorted(bad), slow


def _links(patient: Patient) -> Iterator[Verdict]:
    rates = _rates(patient, patient.probes.links, "links")
    if not rates:
        raise Skip("one rank: no links")
    seat = {str(seat.rank): seat.host for seat in patient.seats}
    hosts, slow = slow_links(rates, seat)
    value = {rate.name: rate.value for rate in rates}
    named = set()
    for host in hosts:
        name = patient.machines[host].host
        its = [r for r in rates if r.kind == "network" and host in map(seat.get, r.name.split("-"))]
        others = [r.value for r in rates if r.kind == "network" and r not in its]
        low, usual = min(r.value for r in its), median(others or [r.value for r in its])
        named |= {frozenset(rate.name.split("-")) for rate in its}
        say = fail if low < _BROKEN * usual else warn
        observed = f"every link of this host is slow, down to {_gbs(low)}"
        yield say("machine", observed, f"about {_gbs(usual)} as between the others", host=name)
    for name in slow:
        src, dst = name.split("-")
        if frozenset((src, dst)) in named:
            continue  # the other way has been named
        named.add(frozenset((src, dst)))
        kind = next(rate.kind for rate in rates if rate.name == name)
        usual = median(rate.value for rate in rates if rate.kind == kind)
        yield _slow_link(patient, seat, src, dst, value[name], usual)
    for rate in rates:
        src, dst = rate.name.split("-")
        least = _least(patient, seat[src], seat[dst])
        if rate.kind == "network" and rate.value < least and frozenset((src, dst)) not in named:
            named.add(frozenset((src, dst)))
            yield _slow_link(patient, seat, src, dst, rate.value, least, "at least")
    for kind, same in _kinds(rates).items():
        if not named:
            low, high = min(r.value for r in same), max(r.value for r in same)
            yield fine(f"{_gbs(low)} to {_gbs(high)} over {kind}, {len(same)} measured", "world")


def _slow_link(
    patient: Patient,
    seat: dict[str, int],
    src: str,
    dst: str,
    value: float,
    usual: float,
    word: str = "about",
) -> Verdict:
    low, high = sorted((src, dst), key=int)
    one, other = (patient.machines[seat[rank]].host for rank in (src, dst))
    where = f"{one} to {other}" if one != other else f"inside {one}"
    say = fail if value < _BROKEN * usual or word == "at least" else warn
    observed = f"rank {src} to rank {dst} ({where}): {_gbs(value)}"
    return say(f"link:{low}-{high}", observed, f"{word} {_gbs(usual)}")


# One stream of a slow CPU still does this; and less than a tenth of a link is no mere overhead.
_STREAM = 100e6


def _least(patient: Patient, src: int, dst: int) -> float:
    """What a link between two hosts must do at least, by what its interfaces say they can."""
    speeds = []
    for host in (src, dst):
        machine = patient.machines[host]
        name = settings(machine).get("GLOO_SOCKET_IFNAME")
        nics = chosen("GLOO_SOCKET_IFNAME", name, machine.nics) if name else outer(machine)
        told = [nic.speed_mbps for nic in nics if nic.speed_mbps]
        if not told:
            return 0.0
        speeds.append(min(told) * 1e6 / 8)
    return min(*speeds, 10 * _STREAM) / 10


def _gbs(value: float) -> str:
    return f"{value / 1e9:.2g} GB/s" if value >= 1e9 else f"{value / 1e6:.3g} MB/s"


def _copies(patient: Patient) -> Iterator[Verdict]:
    if patient.probes.copies is None:
        raise Skip(patient.probes.reasons.get("copies", _NOT_ASKED))
    cure = {
        "corrupt": "switch ACS and IOMMU translation off (pcie.acs, pcie.iommu), update the driver",
        "hung": "switch ACS and IOMMU translation off, until then NCCL_P2P_DISABLE=1",
        "error": "nvidia-smi topo -p2p r, and the driver's log",
    }
    seen = False
    for machine, copies in zip(patient.machines, patient.probes.copies, strict=True):
        speeds = {}
        for copy in copies or ():
            seen = True
            scope = f"pair:{copy.src}-{copy.dst}"
            if copy.status != "ok":
                words = {"corrupt": "the data arrived changed", "hung": "the copy never ended"}
                observed = words.get(copy.status, copy.message)
                yield fail(scope, observed, "the same bits", cure[copy.status], host=machine.host)
            elif copy.gbs is not None:
                speeds[scope] = copy.gbs
        for scope in slow_ones(speeds):
            usual = median(speeds.values())
            say = fail if speeds[scope] < _BROKEN * usual else warn
            observed = f"{speeds[scope]:.3g} GB/s"
            yield say(scope, observed, f"about {usual:.3g} GB/s", host=machine.host)
    if not seen:
        raise Skip("no two GPUs on a host")


def _collective(patient: Patient) -> Iterator[Verdict]:
    results = patient.probes.results
    if results is None:
        raise Skip(patient.probes.reasons.get("results", _NOT_ASKED))
    for rank, said in enumerate(results):
        if said:
            yield fail(f"rank:{rank}", said, "the sum of all ranks, to the bit")
    if not any(results):
        yield fine(f"all_reduce over {len(results)} ranks is exact", "world")


CHECKS = (
    Check(
        "active.compute",
        "a matrix product on every rank or GPU, against the others",
        "one slow rank makes all others wait, at every step",
        "look at its clocks, temperature and neighbours on its CPUs; have it replaced",
        on_world(_compute),
        "world",
    ),
    Check(
        "active.memory",
        "a copy in memory on every rank or GPU, against the others",
        "a missing memory module or a far NUMA node shows here",
        "look at its NUMA binding, its memory modules, or the GPU's memory errors",
        on_world(_bandwidth),
        "world",
    ),
    Check(
        "active.links",
        "data sent both ways over TCP between every two ranks, or every two hosts of a large world",
        "a ring is as fast as its slowest link",
        "look at cable, port, switch and shaping (tc) of that link",
        on_world(_links),
        "world",
    ),
    Check(
        "active.p2p",
        "data copied between every two GPUs of a host and compared, in a process that is watched",
        "wrong routing corrupts data or hangs, and NCCL would not notice",
        "switch ACS and IOMMU translation off",
        on_world(_copies),
        "world",
    ),
    Check(
        "active.collective",
        "an all_reduce over all ranks with gloo, compared to the bit",
        "it uses the ports, names and interfaces that a job would use",
        "see network.calls, network.name and network.ifname",
        on_world(_collective),
        "world",
    ),
)
