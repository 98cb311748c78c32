"""The simulated step: overlap computed by hand, bubbles by formula, parts that add up."""

import json
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.parallel.layout import Layout
from tutti.parallel.pipeline.schedule_timeline import bubble_formula
from tutti.parallel.pipeline.stages import cut_by_cost
from tutti.plan.cluster_spec import named_cluster, parse_gpus
from tutti.plan.collective_cost import MeasuredCollective
from tutti.plan.operator_cost import default_rates
from tutti.plan.schedule_simulation import cut_units
from tutti.plan.step_simulation import (
    CAUSES,
    Calibration,
    StepModel,
    StepOptions,
    step_model,
    trace_events,
)
from tutti.plan.workload import ActivationMemory, Operation, Parameter, Unit, Workload

MEMORY = {"none": ActivationMemory(0, 0, ())}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")


def busy(name, seconds):
    """An operator that takes this time on the plain cluster: 1e12 bytes/s, no overhead."""
    return Operation(name, "memory", "float32", 0.0, seconds * 1e12)


def product(seconds):
    return Operation("mm", "matmul", "float32", seconds * 1e12, 0.0)


def unit(forward, backward, *gradients, block=True, output=0, again=0.0, collectives=()):
    return Unit(
        name="unit",
        forward=(busy("f", forward), *collectives),
        backward=(busy("b", backward), *collectives),
        recomputed={"none": (), "full": (busy("f", again),)},
        parameters=tuple(
            Parameter(f"p{n}", size // 4, 4, True) for n, size in enumerate(gradients)
        ),
        memory=MEMORY,
        output_bytes=output,
        is_block=block,
    )


def workload(*units):
    return Workload(tuple(units), 1, 1, "float32", model_flops=1e12)


def plain(ranks, alpha=0.0, beta=1e-9, slowdown=0.0, **rates):
    """A cluster whose operators take exactly the seconds of `busy`, and its calibration.

    Without bus factors: every collective of S bytes takes alpha × log2(ranks) + beta × S × factor.
    """
    cluster = replace(named_cluster("cpu", ranks), memory_bandwidth=1e12, per_node=ranks)
    peaks = dict.fromkeys(cluster.peak_flops, 1e12)
    cluster = replace(cluster, peak_flops=peaks)
    changed = {
        "memory": 1.0,
        "kernel_s": 0.0,
        "host_step_s": 0.0,
        "overlap_slowdown": slowdown,
        "matmul_float32": 1.0,
    }
    measured = tuple(
        MeasuredCollective(op, ranks, alpha, beta)
        for op in ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
    )
    return cluster, Calibration(
        "cpu", replace(default_rates(cluster), **(changed | rates)), measured
    )


def simulate(work, layout, cluster_and_calibration, **options):
    options = StepOptions(**({"optimizer": "none"} | options))
    return step_model(*cluster_and_calibration).simulate(work, layout, options)


def test_ddp_overlap_computed_by_hand():
    # Two ranks: an all-reduce of S bytes takes 1 s per 2^20 bytes (bus factor 1).
    machine = plain(2, beta=1 / 2**20)
    work = workload(unit(1.0, 4.0, 2 * 2**20), unit(1.0, 3.0, 2**20), unit(2.0, 2.0, 2**20))
    # Buckets of at least 1 MiB, then 2 MiB, from the last parameter: [1], [1, 2].
    # Forward 4 s. Backward ends its units at 2, 5 and 9 s. The first bucket is sent from 2 to 3 s,
    # the second (1 + 2 MiB) from 9 to 12 s.
    step = simulate(work, Layout(dp=2), machine, bucket_mb=2.0)
    assert step.step_s == pytest.approx(4 + 12)
    assert step.parts["exposed_comm"] == pytest.approx(3)
    assert step.comm_s == pytest.approx(4)
    assert step.hidden_s == pytest.approx(1)
    # Buckets of 1 MiB: three of them, at 2, 5 and 9 s; 2 s of the last are exposed.
    step = simulate(work, Layout(dp=2), machine, bucket_mb=1.0)
    assert step.step_s == pytest.approx(4 + 11)
    # Without overlap all 4 s are exposed. With two microbatches only the last communicates.
    assert simulate(work, Layout(dp=2), machine, overlap=False).step_s == pytest.approx(4 + 9 + 4)
    # 12 bytes are moved for each byte of a gradient that is added to the earlier microbatch.
    step = simulate(work, Layout(dp=2), machine, bucket_mb=1.0, accumulation=2)
    adding = 3 * 4 * 2**20 / 1e12
    assert step.step_s == pytest.approx(13 + 15 + 2 * adding, rel=1e-6)


def test_communication_slows_the_computation():
    # The bucket of the last unit is sent for 1 s, while the next backward does 4 s of work.
    work = workload(unit(1.0, 4.0, 4), unit(1.0, 2.0, 2**20))
    step = simulate(work, Layout(dp=2), plain(2, beta=1 / 2**20, slowdown=0.25), bucket_mb=1.0)
    # In this second, 1 / 1.25 = 0.8 s of work are done.
    assert step.parts["compute"] == pytest.approx(2 + 6 + 0.2)


def test_fsdp_prefetch_computed_by_hand():
    # Two shards: gathering 2 MiB takes 2 × 1/2 = 1 s; so does a reduce-scatter of 2 MiB.
    machine = plain(2, beta=1 / 2**20)
    size = 2 * 2**20
    work = workload(unit(3.0, 5.0, size), unit(3.0, 5.0, size), unit(3.0, 5.0, size))
    layout = Layout(shard=2)
    step = simulate(work, layout, machine)
    # Forward: the first gather is exposed. Backward: the gather of the last unit, and the last
    # reduce-scatter. The copies out of and into buffers take microseconds.
    assert step.step_s == pytest.approx(1 + 9 + 1 + 15 + 1, rel=1e-4)
    assert step.parts["exposed_comm"] == pytest.approx(3, rel=1e-4)
    assert step.comm_s == pytest.approx(9, rel=1e-4)
    # Without prefetching, every gather is exposed; without resharding, backward gathers nothing.
    # The reduce-scatter of the previous unit delays the gather.
    exposed = simulate(work, layout, machine, prefetch=0).parts["exposed_comm"]
    assert exposed == pytest.approx(3 + 1 + 2 + 2 + 1, rel=1e-4)
    kept = simulate(work, layout, machine, reshard=False)
    assert kept.parts["exposed_comm"] == pytest.approx(2, rel=1e-4)
    # Replicas (dp) all-reduce the shards, only in the last microbatch.
    both = simulate(work, Layout(dp=2, shard=2), plain(4, beta=1 / 2**20), accumulation=3)
    assert both.comm_s > simulate(work, Layout(shard=4), plain(4, beta=1 / 2**20)).comm_s


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
def test_bubbles_of_even_stages_equal_the_formula(name, ranks, microbatches):
    per_rank = 1 if name in ("gpipe", "1f1b") else 2
    # A backward of 2 s, of which 1 s computes gradients of weights.
    layer = replace(unit(1.0, 0.0), backward=(product(1.0), product(1.0)), parameters=())
    work = workload(*[layer] * ranks * per_rank)
    expected = bubble_formula(name, ranks, microbatches, per_rank)
    model = step_model(*plain(ranks, beta=0.0))
    options = StepOptions(schedule=name, accumulation=microbatches, optimizer="none")
    for predict in (model.simulate, model.estimate):
        step = predict(work, Layout(pp=ranks), options)
        assert step.parts["bubble"] / step.step_s == pytest.approx(expected), predict
        assert sum(step.parts.values()) == pytest.approx(step.step_s)


def test_uneven_stages_and_sends():
    work = workload(unit(1.0, 2.0, output=2**20), unit(2.0, 4.0, output=2**20))
    machine = plain(2, beta=0.0)
    options = {"accumulation": 4, "schedule": "1f1b"}
    step = simulate(work, Layout(pp=2), machine, **options)
    # The second stage computes 4 × 6 s, after the first forward and before the last backward of
    # the first stage.
    assert step.step_s == pytest.approx(24 + 3)
    with_sends = simulate(work, Layout(pp=2), plain(2, beta=0.1 / 2**20), **options)
    assert step.step_s < with_sends.step_s <= step.step_s + 2 * 4 * 0.1
    assert with_sends.parts["exposed_comm"] > 0
    # Both machines compute the same.
    assert with_sends.parts["compute"] == pytest.approx(step.parts["compute"])


def test_one_rank_has_no_communication():
    work = workload(unit(1.0, 2.0, 2**20, again=1.0), unit(1.0, 2.0, 2**20))
    step = simulate(work, Layout(), plain(1), recompute="full", accumulation=2, optimizer="adamw")
    assert step.comm_s == step.parts["exposed_comm"] == step.parts["bubble"] == 0
    assert step.parts["compute"] == pytest.approx(step.step_s)
    assert step.step_s == pytest.approx(2 * (2 + 4 + 1), rel=1e-4)  # recomputed once


def test_a_slow_host_leaves_the_device_idle():
    work = workload(unit(1.0, 1.0), unit(0.1, 1.0))
    machine = plain(1, host_forward_s=0.8, host_backward_s=0.1)
    step = simulate(work, Layout(), machine)
    # Forward: the second unit is issued at 1.6 s. Backward: the device is slower.
    assert step.step_s == pytest.approx(1.6 + 2.0)
    assert step.parts["other"] == pytest.approx(0.5)
    # The host needs 1.8 s to issue both passes, and 3 s for the update: longer than the device.
    slower = replace(machine[1].rates, host_step_s=3.0)
    step = simulate(work, Layout(), (machine[0], replace(machine[1], rates=slower)))
    assert step.step_s == pytest.approx(1.8 + 3.0)
    assert sum(step.parts.values()) == pytest.approx(step.step_s)


def test_hooks_cost_host_time_only_where_they_run():
    work = workload(unit(1e-6, 1e-6, 4096), unit(1e-6, 1e-6, 4096))
    machine = parse_gpus("4xH100")
    model, options = StepModel(machine), StepOptions(optimizer="sgd")
    ddp = model.simulate(work, Layout(dp=4), options)
    shards = model.simulate(work, Layout(shard=4), options)
    assert shards.step_s > ddp.step_s  # tiny units: the host is the slower
    without = model.estimate(work, Layout(shard=4), StepOptions(optimizer="sgd", hooks=False))
    assert without.step_s < shards.step_s


def test_compiled_blocks_have_fewer_and_shorter_elementwise_operators():
    layer = replace(unit(1.0, 2.0), forward=(busy("f", 1.0), product(1.0)))
    work = workload(layer, replace(layer, is_block=False))
    machine = plain(2, beta=0.0)
    eager = simulate(work, Layout(dp=2), machine).parts["compute"]
    compiled = simulate(work, Layout(dp=2), machine, compiled=True).parts["compute"]
    # Only the block is compiled: 3 s of its 4 s are elementwise. The matrix product is not faster.
    assert eager == pytest.approx(8)
    assert 4 + 1 < compiled < 8
    alone = simulate(work, Layout(), plain(1), compiled=True).parts["compute"]
    assert alone == pytest.approx(2 * (compiled - 4))  # one rank compiles the whole model


def test_tp_collectives_are_exposed_unless_they_overlap():
    collective = Operation("all_reduce", "collective", "float32", 0.0, 2**20, axis="tp")
    work = replace(workload(unit(1.0, 2.0, collectives=(collective,))), tp=2)
    machine = plain(2, beta=1 / 2**20)
    step = simulate(work, Layout(tp=2), machine)
    assert step.parts["exposed_comm"] == pytest.approx(2)
    assert step.step_s == pytest.approx(3 + 2)
    assert simulate(work, Layout(tp=2), machine, async_tp=True).step_s < step.step_s


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    axes=st.sampled_from([(4, 1, 1), (1, 4, 1), (2, 2, 1), (1, 1, 4), (2, 1, 2), (1, 2, 2)]),
    accumulation=st.sampled_from([4, 8]),
)
def test_parts_add_up_and_faster_links_are_never_slower(data, axes, accumulation):
    seconds = st.floats(1e-4, 1e-2)
    units = [
        unit(data.draw(seconds), data.draw(seconds), data.draw(st.integers(1, 2**22)) * 4,
             block=data.draw(st.booleans()), output=2**16)
        for _ in range(data.draw(st.integers(4, 7)))
    ]  # fmt: skip
    dp, shard, pp = axes
    layout = Layout(dp=dp, shard=shard, pp=pp)
    cluster = parse_gpus("4xA100", per_node=2)
    steps = []
    for factor in (1, 3):
        faster = replace(
            cluster,
            intra_bandwidth=cluster.intra_bandwidth * factor,
            inter_bandwidth=cluster.inter_bandwidth * factor,
        )
        model = StepModel(faster)
        for predict in (model.estimate, model.simulate):
            step = predict(workload(*units), layout, StepOptions(accumulation=accumulation))
            assert set(step.parts) == set(CAUSES)
            assert sum(step.parts.values()) == pytest.approx(step.step_s)
            assert min(step.parts.values()) >= -1e-9
            assert step.parts["exposed_comm"] <= step.comm_s * (1 + 1e-9) + 1e-12
            steps.append(step)
    assert steps[2].step_s <= steps[0].step_s * (1 + 1e-9)
    assert steps[3].step_s <= steps[1].step_s * (1 + 1e-9)
    low, high = steps[1].band
    assert low < steps[1].step_s < high


def test_many_equal_blocks_are_extrapolated_exactly():
    blocks = [unit(1e-3, 2e-3, 2**24)] * 40
    work = workload(unit(5e-4, 1e-3, 2**26, block=False), *blocks, unit(2e-3, 4e-3, 2**22))
    model = StepModel(parse_gpus("8xH100"))
    for layout in (Layout(shard=8), Layout(dp=2, shard=4), Layout(shard=2, pp=4), Layout()):
        options = StepOptions(accumulation=8, schedule="gpipe")
        fast = model.estimate(work, layout, options).step_s
        slow = model.simulate(work, layout, options).step_s
        assert fast == pytest.approx(slow, rel=0.002), layout


def test_cuts_equal_those_of_the_pipeline():
    generator = random.Random(0)
    for _ in range(60):
        costs = [
            generator.choice([0.0, 1.0, 1.0, 2.0, 3.5]) for _ in range(generator.randint(4, 14))
        ]
        stages = generator.randint(2, 4)
        assert list(cut_units(costs, stages)) == [cut.start for cut in cut_by_cost(costs, stages)]


def test_timeline_opens_as_a_chrome_trace():
    work = workload(*[unit(1.0, 2.0, 2**20, output=2**20)] * 4)
    step = simulate(work, Layout(dp=2, pp=2), plain(4), accumulation=2)
    events = json.loads(trace_events(step))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(step.step_s * 1e6)
    # No rank computes two things at the same time.
    for rank in (0, 1):
        lane = sorted((e["ts"], e["dur"]) for e in spans if (e["pid"], e["tid"]) == (rank, 0))
        for (start, length), (following, _) in pairwise(lane):
            assert start + length <= following + 1e-3


def test_assumptions_are_sorted_by_their_effect():
    work = workload(
        replace(unit(0.0, 0.0, 2**26), forward=(product(1.0),), backward=(product(2.0),))
    )
    step = StepModel(parse_gpus("16xH100")).simulate(work, Layout(dp=16), StepOptions())
    effects = [each.effect for each in step.assumptions]
    assert effects == sorted(effects, reverse=True)
    assert step.assumptions[0].name == "matmul_float32"


def test_bytes_by_link_follow_the_order_of_the_axes():
    collective = Operation("all_reduce", "collective", "float32", 0.0, 1e6, axis="tp")
    work = replace(workload(*[unit(1.0, 1.0, 4096, collectives=(collective,))] * 2), tp=8)
    model = StepModel(parse_gpus("16xH100"))
    layout, options = Layout(dp=2, tp=8), StepOptions()
    inside = model.bytes_by_link(work, layout, options)
    assert inside["tp"]["inter"] == 0
    assert inside["tp"]["intra"] == pytest.approx(4 * 1e6 * 2 * 7 / 8)
    assert inside["dp"]["inter"] == pytest.approx(2 * 4096)
    outside = model.bytes_by_link(work, layout, options, ("pp", "tp", "shard", "dp"))
    assert outside["tp"]["inter"] > 1e6
    assert outside["dp"]["inter"] == 0
