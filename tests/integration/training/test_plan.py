"""What a training run pins, and what it refuses before anything starts."""

from typing import Any

import pytest
from support.training_bench import AS_OF, MONTHS, TrainingBench, write_shop

from headway.loading import DeclarationInvalid, load_pipeline
from headway.training.plan import InputAlwaysNull, LayoutRefused, Overrides, RunPlan, SnapshotsMissing, plan_run
from headway.training.stage import StagedCodeDiffers, stage_code
from trainer.spec import LayoutSpec


def plan(bench: TrainingBench, as_of: str = AS_OF, **overrides: Any) -> RunPlan:  # noqa: ANN401 - fields of Overrides
    with bench.services() as services:
        return plan_run(services, load_pipeline(bench.folder), as_of, Overrides(**overrides))


def edited(bench: TrainingBench, **training: Any) -> TrainingBench:  # noqa: ANN401 - fields of TrainingSpec
    write_shop(bench.folder, lambda attributes: attributes["training"].update(training))
    return bench


def test_the_window_ends_where_the_month_starts(bench: TrainingBench) -> None:
    planned = plan(bench)
    window = planned.pinned.window
    assert window.train == MONTHS[:3]
    assert window.evaluate == ("2026-04-01",)
    assert (window.months, window.declared_months) == (3, 12)
    assert planned.spec.rows.cut == window.cut
    assert window.cut - window.validation_from == 7 * 86_400_000_000
    assert [f.partition for f in planned.spec.rows.files] == list(MONTHS[:3])


def test_a_shorter_window_takes_the_newest_months(bench: TrainingBench) -> None:
    assert plan(edited(bench, window=2)).pinned.window.train == MONTHS[1:3]


def test_the_same_things_are_the_same_run(bench: TrainingBench) -> None:
    first, second = plan(bench), plan(bench, note="again", retry=True)
    assert first.facts.identity_digest("t") == second.facts.identity_digest("t")
    others = [plan(bench, seed=4), plan(bench, lr=0.5), plan(bench, nodes=1), plan(bench, repeat=1)]
    others.append(plan(bench, as_of="2026-05-01"))
    assert len({p.facts.identity_digest("t") for p in (first, *others)}) == 6


def test_the_model_file_is_part_of_the_identity(bench: TrainingBench) -> None:
    before = plan(bench).facts
    model = bench.folder / "model.py"
    model.write_text(model.read_text() + "\n# another thought\n")
    assert plan(bench).facts.code_digest != before.code_digest


def test_field_B09_training_names_inputs_that_are_null_nearly_everywhere(bench: TrainingBench) -> None:
    with pytest.raises(InputAlwaysNull) as refused:
        plan(edited(bench, max_null_share=0.001))
    assert "by_person__mean_9d" in str(refused.value)
    assert "training.exclude" in refused.value.remedy
    assert plan(
        edited(bench, max_null_share=0.001, exclude=["by_person__mean_9d", "by_person__share_9d", "by_shop__share_9d"])
    ).spec.rows.numeric


def test_refused_snapshots_are_left_out_by_name_up_to_the_declared_share(bench: TrainingBench) -> None:
    with bench.services() as services:
        services.catalog.refuse_snapshot(services.principal, None, "shop", MONTHS[1], "leaks", ("x",))
    with pytest.raises(SnapshotsMissing) as refused:
        plan(bench)
    assert f"{MONTHS[1]} (leaks)" in str(refused.value)
    planned = plan(edited(bench, max_missing_share=0.4))
    assert planned.pinned.left_out == {MONTHS[1]: "leaks"}
    assert len(planned.facts.inputs) == 2


@pytest.mark.parametrize(
    ("training", "said"),
    [
        ({"batch": 63}, "63 rows do not divide"),
        ({"engine": "ddp", "zero": 3}, "layout.zero"),
        ({"layout": "dp=2,zero=1"}, "only engine deepspeed has ZeRO stages"),
        ({"engine": "deepspeed", "layout": "dp=2", "zero": 2}, "beside a layout"),
        ({"layout": "dp=3"}, "3 ranks of the layout do not divide by nodes 2"),
        ({"layout": "dp=2", "processes_per_node": 2}, "the world size is 4"),
        ({"layout": "tp=2"}, "layout.tp 2, model.options.heads 0 do not go together.*nearest.*ddp dp=2 fp32"),
        ({"engine": "deepspeed", "zero": 0, "precision": "bf16"}, "FP16_UnfusedOptimizer.*deepspeed dp=2,zero=1 bf16"),
        ({"offload": "optimizer"}, "layout.offload 'optimizer', layout.engine 'ddp'"),
        ({"activation_checkpointing": True}, "state no layers; the nearest valid choice is ddp dp=2 fp32"),
        ({"schedule": "gpipe"}, "layout.schedule 'gpipe', layout.pp 1"),
    ],
)
def test_layouts_that_cannot_run_are_refused(bench: TrainingBench, training: dict[str, Any], said: str) -> None:
    with pytest.raises(LayoutRefused, match=said):
        plan(edited(bench, **training))


@pytest.mark.parametrize(
    ("training", "wanted"),
    [
        ({"engine": "deepspeed"}, LayoutSpec(engine="deepspeed", zero=1, nodes=2, dp=2)),
        ({"engine": "deepspeed", "zero": 3}, LayoutSpec(engine="deepspeed", zero=3, nodes=2, dp=2)),
        ({"engine": "fsdp2"}, LayoutSpec(engine="fsdp2", nodes=2, shard=2)),
        ({"processes_per_node": 2}, LayoutSpec(nodes=2, processes_per_node=2, dp=4)),
        ({"layout": "dp=4"}, LayoutSpec(nodes=2, processes_per_node=2, dp=4)),
        (
            {"engine": "fsdp2", "layout": "dp=2,shard=2", "nodes": 1},
            LayoutSpec(engine="fsdp2", processes_per_node=4, dp=2, shard=2),
        ),
        (
            {"engine": "deepspeed", "layout": "dp=2,zero=2", "offload": "optimizer"},
            LayoutSpec(engine="deepspeed", zero=2, nodes=2, dp=2, offload="optimizer"),
        ),
        ({"compile": True}, LayoutSpec(nodes=2, dp=2, compile=True)),
    ],
)
def test_a_layout_is_declared_in_one_place(bench: TrainingBench, training: dict[str, Any], wanted: LayoutSpec) -> None:
    planned = plan(edited(bench, **training))
    assert planned.spec.layout == wanted
    assert planned.facts.layout == wanted.to_json()


def test_precision_is_declared_and_makes_another_run(bench: TrainingBench) -> None:
    before = plan(bench).facts.config_digest
    planned = plan(edited(bench, precision="bf16"))
    assert planned.spec.precision == "bf16"
    assert planned.facts.config_digest != before


def test_a_launch_on_fewer_nodes_keeps_a_written_layout(bench: TrainingBench) -> None:
    layout = plan(edited(bench, layout="dp=2"), nodes=1).spec.layout
    assert (layout.nodes, layout.processes_per_node, layout.dp) == (1, 2, 2)


@pytest.mark.parametrize(
    ("training", "said"),
    [
        ({"categorical": ["nothing"]}, "no column 'nothing'"),
        ({"exclude": ["nothing"]}, "no column 'nothing'"),
        ({"epochs": 0}, "greater than or equal to 1"),
        ({"enginge": "ddp"}, "enginge"),
    ],
)
def test_declarations_name_what_is_wrong(bench: TrainingBench, training: dict[str, Any], said: str) -> None:
    with pytest.raises(DeclarationInvalid, match=said):
        plan(edited(bench, **training))


def test_edited_staged_code_is_refused(bench: TrainingBench) -> None:
    planned = plan(bench)
    target = bench.home / "staged"
    with bench.services() as services:
        stage_code(services.store, planned.spec.model.code_manifest, target)
        stage_code(services.store, planned.spec.model.code_manifest, target)
        file = target / "pipelines" / "shop" / "model.py"
        file.write_text(file.read_text() + "\n")
        with pytest.raises(StagedCodeDiffers):
            stage_code(services.store, planned.spec.model.code_manifest, target)
