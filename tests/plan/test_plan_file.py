"""Plans are written and read again; what is wrong in them is named."""

from __future__ import annotations

import contextlib
import random
import tomllib
from pathlib import Path

import pytest

from wavetrain.cluster import load_cluster
from wavetrain.errors import FormatError, InputError, UnknownNameError
from wavetrain.plan.baselines import amp_model, amp_pick, best_even, megatron_rule
from wavetrain.plan.explain import changes, explain
from wavetrain.plan.export import FRAMEWORKS, export
from wavetrain.plan.layout import even_cut
from wavetrain.plan.lint import lint, parse_flags
from wavetrain.plan.placement import layouts
from wavetrain.plan.plan import Plan, load_plan, plan_from_text, plan_text
from wavetrain.plan.planner import make_plan
from wavetrain.plan.shapes import Limits
from wavetrain.plan.sources import Sources
from wavetrain.plan.training import train_settings
from wavetrain.schedule.simulator import simulate

from .worlds import even, mixed, model

SOURCES = Sources(model="gpt2", cluster="2 x 2 x V100-16", seq=128, precision="fp16")


def plan(limits: Limits | None = None) -> Plan:
    return make_plan(model(10), mixed(), 12, SOURCES, limits).best


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan()


def test_what_is_written_is_read(made: Plan, tmp_path: Path) -> None:
    settings, why = train_settings(made, model(10).workload)
    path = tmp_path / "plan.toml"
    path.write_text(plan_text(made, settings, ["a note"]))
    again = load_plan(path)
    assert again.describe() == made.describe()
    assert again.seconds == pytest.approx(made.seconds)
    assert again.parts == pytest.approx(made.parts)
    assert again.memory_share == pytest.approx(made.memory_share)
    assert again.stages == made.stages
    assert again.devices == made.devices
    assert again.sources == SOURCES
    assert bool(settings) != bool(why)
    assert again.costs is not None
    assert made.costs is not None
    assert again.costs.forward == pytest.approx(made.costs.forward)


def test_a_plan_simulates_as_it_says(made: Plan) -> None:
    schedule, costs = plan_from_text(plan_text(made)).pipeline()
    assert simulate(schedule, costs).makespan == pytest.approx(made.pipeline_seconds, rel=1e-6)
    slow = costs.scaled(2.0, 0.5)
    assert simulate(schedule, slow).makespan == pytest.approx(2 * simulate(schedule, costs).makespan, rel=1e-9)


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("global_batch = 12", "global_batch = -1", "global_batch"),
        ('recompute = "none"', 'recompute = "some"', "recompute"),
        ("cut = [0", "cut = [1", "cut"),
        ("tp = ", "tpp = ", "tp"),
        ("[[ranks]]", "[[rank]]", "rank"),
        ("predicted_seconds = ", "predicted_seconds = -", "predicted_seconds"),
        ("[plan]", "[plans]", "plan"),
        ("micro_batches = [", "micro_batches = [0, ", "micro_batches"),
    ],
)
def test_a_wrong_plan_is_refused(made: Plan, old: str, new: str, word: str) -> None:
    text = plan_text(made)
    assert old in text
    with pytest.raises((FormatError, UnknownNameError), match=word):
        plan_from_text(text.replace(old, new, 1), "p.toml")


@pytest.mark.parametrize("seed", range(150))
def test_damaged_plans_give_our_errors(made: Plan, seed: int) -> None:
    rng = random.Random(seed)
    characters = list(plan_text(made))
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(characters))
        characters[at : at + rng.randint(0, 3)] = rng.choice(
            ["", "=", "-1", "nan", "inf", "[", "]", '"', "\n", "9" * 25, "é", "true"]
        )
    with contextlib.suppress(InputError):
        plan_from_text("".join(characters), "p.toml")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_exports_say_what_they_cannot(made: Plan, name: str) -> None:
    found = export(made, model(10).workload, name)
    assert found.text
    if name == "torchtitan":
        tomllib.loads(found.text)
    if made.schedule == "zb-wave" and name != "torchtitan":
        assert any("zb-wave" in w for w in found.warnings)
    if len(made.device_names) > 1:
        assert any("unlike" in w for w in found.warnings)
    with pytest.raises(UnknownNameError, match="megatron"):
        export(made, model(10).workload, "megatorn")


def test_an_even_plan_needs_no_warning() -> None:
    limits = Limits(schedules=(("1f1b", 1),), tp=(2,), pp=(2,), leave_out=False)
    found = export(make_plan(model(10), even(2, 2), 8, SOURCES, limits).best, model(10).workload, "megatron")
    assert "--tensor-model-parallel-size 2" in found.text
    assert "--pipeline-model-parallel-size 2" in found.text
    assert not found.warnings


def test_an_explanation_adds_up(made: Plan) -> None:
    told = explain(made, model(10), mixed(), what_ifs=True)
    assert sum(seconds for _, seconds, _ in told.parts) == pytest.approx(made.seconds, rel=1e-6)
    assert told.binds
    assert {b.name for b in told.baselines} == {"Megatron's rule", "best even plan", "AMP's pick"}
    assert len(told.what_ifs) == len(list(changes(mixed())))
    more = [w for w in told.what_ifs if w.change.startswith("one more")]
    assert all(w.speedup is not None and w.speedup >= 1 for w in more), "what is more can stay idle"
    assert told.dollars_per_step is None


def test_the_usual_choice_is_not_better() -> None:
    for cluster in (even(2, 4), mixed()):
        best = make_plan(model(10), cluster, 8, SOURCES).best
        usual, even_one = megatron_rule(model(10), cluster, 8), best_even(model(10), cluster, 8)
        assert usual is not None
        assert even_one is not None
        assert usual.seconds >= even_one.seconds >= best.seconds * 0.999
    assert amp_pick(model(10), even(2, 4), 8) is not None


def test_amp_is_linear_in_the_micro_batch() -> None:
    layout = next(layouts(even(2, 2).groups, 1, 2, 2))
    one, cut = amp_model(model(10), layout, 1, 4)
    two, _ = amp_model(model(10), layout, 2, 4, cut)
    assert one < two <= 2 * one


FLAGS = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --micro-batch-size 1 --global-batch-size 8 --fp16 "
)


@pytest.mark.parametrize(
    ("flags", "level", "word"),
    [
        ("--tensor-model-parallel-size 4", "error", "leaves its node"),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3", "error", "cannot be divided"),
        ("--pipeline-model-parallel-size 2 --global-batch-size 9", "error", "does not divide"),
        ("--pipeline-model-parallel-size 4 --global-batch-size 1", "warning", "idle"),
        ("--pipeline-model-parallel-size 2", "note", "predicted"),
    ],
)
def test_lint_says_what_is_wrong(flags: str, level: str, word: str) -> None:
    parsed = parse_flags(FLAGS + flags)
    found, _ = lint(parsed, model(8), even(2, 2))
    assert any(f.level == level and word in f.message for f in found), found


def test_lint_says_what_does_not_fit() -> None:
    parsed = parse_flags(FLAGS.replace("--hidden-size 512", "--hidden-size 8192"))
    from wavetrain.plan.calibration import Calibration
    from wavetrain.plan.estimate import CostModel

    found, estimate = lint(parsed, CostModel(workload=parsed.workload(), calibration=Calibration()), even(2, 2))
    assert estimate is not None
    assert not estimate.fits
    assert any(f.level == "error" and "--use-distributed-optimizer" in f.message for f in found)


@pytest.mark.parametrize(
    ("flags", "error", "word"),
    [
        ("--tensor-model-parallel-size x", InputError, "whole number"),
        ("--tensor-model-paralel-size 2", UnknownNameError, "tensor-model-parallel-size"),
        ("--recompute-granularity half", UnknownNameError, "full"),
        ('--num-layers "8', InputError, "cannot be read"),
    ],
)
def test_flags_that_are_wrong_are_refused(flags: str, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        parse_flags(flags)
    with pytest.raises(InputError, match="--num-layers"):
        parse_flags("--fp16").workload()


def test_a_cut_has_as_many_points() -> None:
    assert even_cut(10, 2) == (0, 5, 10)


def test_devices_without_bfloat16() -> None:
    old, new = load_cluster("2 x 4 x V100-16 + 1 x 4 x T4-16"), load_cluster("1 x 8 x A100-40")
    sources = Sources(model="gpt2", cluster="c")
    assert sources.for_devices(old).precision == "fp16"
    assert sources.for_devices(new).precision is None
    assert Sources(model="gpt2", cluster="c", precision="fp32").for_devices(old).precision == "fp32"
    flags = parse_flags("--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --micro-batch-size 1 --bf16")
    for cluster, refused in ((old, True), (new, False)):
        found, _ = lint(flags, model(8), cluster)
        assert any("use --fp16" in f.message for f in found) == refused
