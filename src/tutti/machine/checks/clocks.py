"""Clocks: what holds GPUs back, power limits, and clocks of hosts that disagree."""

from collections import Counter
from collections.abc import Iterator

from tutti.machine.checks.check import Check, on_machine, on_world
from tutti.machine.checks.finding import Skip, Verdict, fail, fine, warn
from tutti.machine.checks.known import of_gpus
from tutti.machine.checks.patient import Patient
from tutti.machine.observation import Machine

_FATAL = {
    "hw_slowdown": "the hardware halves its clocks or worse",
    "hw_thermal": "the hardware slows down, it is too hot",
    "hw_power_brake": "the power supply asks it to slow down",
}


def _throttle(machine: Machine) -> Iterator[Verdict]:
    for gpu, reasons in of_gpus(machine, "clocks.throttle", lambda gpu: gpu.clocks.throttle):
        scope = f"gpu:{gpu.index}"
        heat = f", {gpu.temperature_c} °C" if gpu.temperature_c is not None else ""
        # The hardware's slowdown comes with its cause, where that is known.
        named = [r for r in reasons if r in _FATAL and r != "hw_slowdown"]
        for reason in named or [r for r in reasons if r == "hw_slowdown"]:
            cure = "check power supply and cables" if "power" in reason else "check cooling"
            command = f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {gpu.index}"
            yield fail(scope, f"{reason}: {_FATAL[reason]}{heat}", "none", cure, command)
        if "sw_thermal" in reasons and not named:
            yield warn(scope, f"the driver lowers its clocks{heat}", "none", "check cooling")


def _heat(machine: Machine) -> Iterator[Verdict]:
    told = of_gpus(machine, "temperature_c", lambda gpu: gpu.temperature_c)
    for gpu, heat in told:
        if gpu.slowdown_c is not None and heat >= gpu.slowdown_c - 3:
            observed = f"{heat} °C, and it slows down at {gpu.slowdown_c}"
            yield warn(f"gpu:{gpu.index}", observed, f"below {gpu.slowdown_c - 3} °C", "")
    if told:
        yield fine(f"{min(t for _, t in told)} to {max(t for _, t in told)} °C")


def _power(machine: Machine) -> Iterator[Verdict]:
    told = of_gpus(machine, "power_limit_w", lambda gpu: gpu.power_limit_w)
    for gpu, limit in told:
        default = gpu.default_power_limit_w
        if default is not None and limit < 0.99 * default:
            observed = f"the power limit is {limit:.0f} W"
            command = f"sudo nvidia-smi -i {gpu.index} -pl {default:.0f}"
            yield warn(f"gpu:{gpu.index}", observed, f"{default:.0f} W, its default", "", command)


def _locked(machine: Machine) -> Iterator[Verdict]:
    told = of_gpus(machine, "clocks.throttle", lambda gpu: gpu.clocks.throttle)
    locked = [gpu.index for gpu, reasons in told if "application_clocks" in reasons]
    if locked and len(locked) < len(told):
        for index in locked:
            command = f"sudo nvidia-smi -i {index} -rac; sudo nvidia-smi -i {index} -rgc"
            observed = "its clocks are set by hand, its neighbours' are not"
            yield warn(f"gpu:{index}", observed, "the same on all", "", command)
    most = Counter(gpu.clocks.max_sm_mhz for gpu, _ in told if gpu.clocks.max_sm_mhz)
    if len(most) > 1 and len({gpu.name for gpu, _ in told}) == 1:
        usual = max(most)
        for gpu, _ in told:
            if gpu.clocks.max_sm_mhz and gpu.clocks.max_sm_mhz < usual:
                observed = f"it may run at {gpu.clocks.max_sm_mhz} MHz at most"
                yield warn(f"gpu:{gpu.index}", observed, f"{usual} MHz as the others", "")


_TRACES_S, _LOGS_S = 1e-3, 5.0


def _skew(patient: Patient) -> Iterator[Verdict]:
    offsets = patient.probes.offsets
    if offsets is None:
        raise Skip(patient.probes.reasons.get("offsets", "needs a world on several hosts"))
    for offset in offsets:
        sure = max(0.0, abs(offset.seconds) - offset.round_trip / 2)
        host, first = (patient.machines[i].host for i in (offset.host, 0))
        words = f"{_seconds(abs(offset.seconds))} {'ahead of' if offset.seconds > 0 else 'behind'}"
        if sure > _TRACES_S:
            what = "logs and certificates" if sure > _LOGS_S else "traces"
            observed = f"{host} is {words} {first}: {what} of the two do not line up"
            commands = (f"chronyc tracking  # on {host}", f"sudo chronyc makestep  # on {host}")
            yield warn("world", observed, "within 1 ms", "", *commands)
    if offsets:
        widest = max(offsets, key=lambda each: abs(each.seconds))
        yield fine(f"at most {_seconds(abs(widest.seconds))} apart", "world")


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


CHECKS = (
    Check(
        "clocks.throttle",
        "what holds a GPU's clocks back (idle and the usual power cap do not count)",
        "one hot or underpowered GPU slows all of them",
        "check cooling and power supply",
        on_machine(_throttle),
    ),
    Check(
        "clocks.heat",
        "temperature against the point where the GPU slows down",
        "it will throttle under load",
        "check fans, filters and airflow",
        on_machine(_heat),
    ),
    Check(
        "clocks.power",
        "the power limit against its default",
        "a capped GPU is the slow one of its job",
        "set the limit back, or cap all alike",
        on_machine(_power),
    ),
    Check(
        "clocks.locked",
        "whether clocks are set by hand on some GPUs only",
        "GPUs of different speed wait for each other",
        "reset the clocks (nvidia-smi -rac, -rgc), or set all alike",
        on_machine(_locked),
    ),
    Check(
        "clocks.skew",
        "how far the hosts' clocks are apart, by messages there and back",
        "above 1 ms traces of ranks do not line up; above 5 s logs do not either",
        "run chrony or ntpd on every host",
        on_world(_skew),
        "world",
    ),
)
