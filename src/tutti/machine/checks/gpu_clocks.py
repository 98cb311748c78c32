"""Checks clocks.*: throttling, temperature, power limits and locked clocks of GPUs; clock skew."""

from tutti.machine.checks.cluster import KNOWN_ERRORS, Cluster, Skip, read_gpus
from tutti.machine.checks.finding import Findings, cluster_check, fail, machine_check, passed, warn
from tutti.machine.observation import Machine
from tutti.measure.units import format_seconds


@machine_check("clocks.throttle")
def throttling(machine: Machine) -> Findings:
    for gpu, reasons in read_gpus(machine, "clocks.throttle", lambda g: g.clocks.throttle):
        scope = f"gpu:{gpu.index}"
        heat = f", {gpu.temperature_c} °C" if gpu.temperature_c is not None else ""
        command = f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {gpu.index}"
        # The driver reports hw_slowdown together with its cause. It is a finding of its own only if
        # the cause is unknown.
        causes = [
            r for r in reasons if r in KNOWN_ERRORS["hardware_slowdown"] and r != "hw_slowdown"
        ]
        for reason in causes or [r for r in reasons if r == "hw_slowdown"]:
            cure = "check power supply and cables" if "power" in reason else "check cooling"
            observed = f"{reason}: {KNOWN_ERRORS['hardware_slowdown'][reason]}{heat}"
            yield fail(scope, observed, "no slowdown", command, cure=cure)
        if "sw_thermal" in reasons and not causes:
            observed = f"sw_thermal: the driver lowers its clocks because of heat{heat}"
            yield warn(scope, observed, "no slowdown", command, cure="check cooling")


@machine_check("clocks.heat")
def temperature(machine: Machine) -> Findings:
    temperatures = read_gpus(machine, "temperature_c", lambda g: g.temperature_c)
    for gpu, heat in temperatures:
        if gpu.slowdown_c is not None and heat >= gpu.slowdown_c - 3:
            observed = f"{heat} °C; it slows down at {gpu.slowdown_c} °C"
            command = f"nvidia-smi -q -d TEMPERATURE -i {gpu.index}"
            yield warn(f"gpu:{gpu.index}", observed, f"below {gpu.slowdown_c - 3} °C", command)
    values = [heat for _, heat in temperatures]
    yield passed(f"{min(values)} to {max(values)} °C")


@machine_check("clocks.power")
def power_limit(machine: Machine) -> Findings:
    for gpu, limit in read_gpus(machine, "power_limit_w", lambda g: g.power_limit_w):
        default = gpu.default_power_limit_w
        if default is not None and limit < 0.99 * default:
            observed, expected = f"power limit {limit:.0f} W", f"{default:.0f} W, the default"
            command = f"sudo nvidia-smi -i {gpu.index} -pl {default:.0f}"
            yield warn(f"gpu:{gpu.index}", observed, expected, command)


@machine_check("clocks.locked")
def locked_clocks(machine: Machine) -> Findings:
    reasons = read_gpus(machine, "clocks.throttle", lambda g: g.clocks.throttle)

    def reset(index: int) -> str:
        return f"sudo nvidia-smi -i {index} -rac; sudo nvidia-smi -i {index} -rgc"

    locked = [gpu.index for gpu, each in reasons if "application_clocks" in each]
    if len(locked) < len(reasons):
        for index in locked:
            observed = "its clocks are locked, those of other GPUs are not"
            yield warn(f"gpu:{index}", observed, "the same on all GPUs", reset(index))
    maxima = {gpu.clocks.max_sm_mhz for gpu, _ in reasons if gpu.clocks.max_sm_mhz}
    if len(maxima) > 1 and len({gpu.name for gpu, _ in reasons}) == 1:
        for gpu, _ in reasons:
            if gpu.clocks.max_sm_mhz and gpu.clocks.max_sm_mhz < max(maxima):
                observed = f"its maximum SM clock is {gpu.clocks.max_sm_mhz} MHz"
                expected = f"{max(maxima)} MHz, as on other GPUs"
                yield warn(f"gpu:{gpu.index}", observed, expected, reset(gpu.index))


@cluster_check("clocks.skew")
def clock_skew(cluster: Cluster) -> Findings:
    offsets = cluster.probes.clock_offsets
    if offsets is None:
        raise Skip(cluster.probes.skipped.get("clock_offsets", "needs a world on several hosts"))
    for offset in offsets:
        certain = max(0.0, abs(offset.seconds) - offset.round_trip / 2)
        if certain > 1e-3:
            host, first = (cluster.machines[i].host for i in (offset.host, 0))
            direction = "ahead of" if offset.seconds > 0 else "behind"
            affected = "logs and certificates" if certain > 5 else "traces"
            size = format_seconds(abs(offset.seconds))
            yield warn(
                "world",
                f"{host} is {size} {direction} {first}: {affected} do not line up",
                "within 1 ms",
                f"chronyc tracking  # on {host}",
                f"sudo chronyc makestep  # on {host}",
            )
    if offsets:
        largest = max(abs(offset.seconds) for offset in offsets)
        yield passed(f"offset at most {format_seconds(largest)}", "world")
