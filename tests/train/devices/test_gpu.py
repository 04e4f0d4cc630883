"""Training on a GPU."""

from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
import torch
import train_toys
from peer_models import marian
from torch.profiler import ProfilerActivity, profile

from vanilla_transformer import engine_checks_vanilla_transformer as engine_checks
from vanilla_transformer.conversion.shared_weights import SharedConversion
from vanilla_transformer.loading import load
from vanilla_transformer.train import loop
from vanilla_transformer.train.loop import train
from vanilla_transformer.train.run_folder.checkpoint import checkpoints
from vanilla_transformer.train.run_folder.environment import read_environment
from vanilla_transformer.train.run_folder.files import read_metrics
from vanilla_transformer.train.translate import translate_lines

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("new_process"),
]
SETTINGS = {
    # its draws differ from device to device
    "model": {"dropout": 0.0},
    # with seed 1 an activation comes within rounding of the kink of max(0, x), and goes either way
    "seed": 2,
    "max_steps": 30,
    "warmup_steps": 100,
    "save_every_steps": 10,
}


def losses(folder):
    return [line["loss"] for line in read_metrics(folder) if "loss" in line]


@pytest.fixture(scope="module")
def cpu_run(corpus, tmp_path_factory):
    """Run on a CPU, in a separate process."""
    folder = tmp_path_factory.mktemp("cpu") / "run"
    settings = train_toys.toy_settings(corpus, folder, **SETTINGS)
    train_toys.run_command(train_toys.write_recipe(folder.with_suffix(".yaml"), settings))
    assert read_environment(folder)[0]["device"] == "cpu"
    return folder


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 3e-2)])
def test_a_gpu_learns_what_a_cpu_learns(corpus, cpu_run, tmp_path, precision, tolerance):
    config = train_toys.toy_config(corpus, tmp_path, **SETTINGS, precision=precision)
    assert train(config)
    assert read_environment(tmp_path)[0]["device"] == "cuda"
    assert losses(tmp_path) == pytest.approx(losses(cpu_run), rel=tolerance)
    for weight in train_toys.weights(tmp_path).values():
        assert weight.dtype == torch.float32


def test_a_model_of_the_library_is_searched_on_the_gpu():
    theirs = marian()
    inputs = {"input_ids": torch.randint(3, 23, (3, 5), device="cuda")}
    search = {"num_beams": 3, "max_new_tokens": 9}
    conversion = SharedConversion(theirs)
    assert conversion.for_engine()[1] is None
    # the conversion follows its source to another device
    theirs.to("cuda")
    converted, reason = conversion.for_engine()
    assert reason is None
    expected = theirs.generate(**inputs, **search)
    assert torch.equal(converted.generate(**inputs, **search, engine="required"), expected)


def test_attention_makes_no_plan_for_each_shape(corpus, tmp_path):
    assert train(train_toys.toy_config(corpus, tmp_path, **{**SETTINGS, "max_steps": 1}))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_the_scale_of_the_loss_is_resumed(corpus, tmp_path):
    for name, stops in (("whole", [30]), ("parts", [13, 30])):
        for stop in stops:
            config = train_toys.toy_config(
                corpus, tmp_path / name, **{**SETTINGS, "max_steps": stop}, precision="fp16"
            )
            assert train(config, resume=stop != stops[0])
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    # if resuming reset the loss scale, steps would be skipped until it has fallen again
    assert parts == pytest.approx(whole, rel=1e-3)
    skipped = [
        [line["skipped"] for line in read_metrics(tmp_path / name) if "skipped" in line]
        for name in ("whole", "parts")
    ]
    assert skipped[0] == skipped[1]


def test_a_checkpoint_of_a_cpu_resumes_on_a_gpu(corpus, cpu_run, tmp_path):
    settings = train_toys.toy_settings(corpus, tmp_path, **{**SETTINGS, "max_steps": 10})
    train_toys.run_command(train_toys.write_recipe(tmp_path / "toy.yaml", settings))
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["step-10"]
    assert train(train_toys.toy_config(corpus, tmp_path, **SETTINGS), resume=True)
    assert [block["device"] for block in read_environment(tmp_path)] == ["cpu", "cuda"]
    assert losses(tmp_path) == pytest.approx(losses(cpu_run), rel=1e-3)


def test_micro_batches_are_as_large_as_the_memory_of_the_gpu_allows(corpus, tmp_path):
    step = {"tokens_per_step": 100_000, "tokens_per_micro_batch": None}
    assert train(train_toys.toy_config(corpus, tmp_path, max_steps=2, **step))
    # all of a step and as much padding, where a CPU has at most 4,096
    assert read_environment(tmp_path)[0]["tokens_per_micro_batch"] == "200000"


def test_a_gpu_translates_as_a_cpu_does(cpu_run):
    lines = ["cat dog", "", "ant bee cat dog elk fox", "pig"]
    expected = list(translate_lines(load(cpu_run, device="cpu"), lines))
    pipeline = load(cpu_run)
    assert pipeline.model.device.type == "cuda"
    assert list(translate_lines(pipeline, lines)) == expected


def test_a_step_neither_waits_nor_copies_from_memory_that_is_not_pinned(corpus, tmp_path):
    steps = []
    step = loop.training_step

    def profiled(*arguments, **settings):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            result = step(*arguments, **settings)
        steps.append([event.name for event in trace.events()])
        return result

    with patch.object(loop, "training_step", profiled):
        assert train(train_toys.toy_config(corpus, tmp_path, max_steps=3))
    # the first step prepares libraries
    names = [name for events in steps[1:] for name in events]
    assert any("Pinned" in name for name in names)
    assert not [name for name in names if "Pageable" in name]
    assert not [name for name in names if name.startswith("cudaStreamSync")]


GREEDY = {"num_beams": 1, "max_extra_tokens": 12}
BEAM = {"num_beams": 4, "length_penalty_alpha": 0.6, "max_extra_tokens": 12}


@pytest.fixture
def models():
    """A model whose translations differ, on the CPU and on the GPU."""
    pair = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = train_toys.toy_model(dropout=0.0).eval()
        for name, parameter in model.named_parameters():
            if "_proj.weight" in name or "embed_tokens" in name:
                parameter.data.normal_(std=0.3)
        pair.append(model.to(device))
    return pair


def sources(model, count, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, model.config.vocab_size, (count, 9), generator=generator)
    lengths = torch.randint(2, 10, (count, 1), generator=generator)
    mask = (torch.arange(9) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.parametrize("search", [GREEDY, BEAM, {**BEAM, "num_beams": 7, "min_new_tokens": 9}])
def test_recorded_steps_find_what_a_cpu_finds(models, search):
    on_cpu, on_gpu = models
    inputs = sources(on_cpu, 40, seed=1)
    expected = on_cpu.generate(**inputs, **search, engine="off")
    moved = {name: tensor.to("cuda") for name, tensor in inputs.items()}
    assert on_gpu.generate(**moved, **search).tolist() == expected.tolist()
    assert engine_checks.engine_for(on_gpu)[1] is None


def test_threads_record_and_replay_at_the_same_time(models):
    on_cpu, on_gpu = models
    batches = [sources(on_cpu, 5 + number, seed=number) for number in range(12)]
    expected = [on_cpu.generate(**batch, **BEAM).tolist() for batch in batches]

    def translate(batch):
        moved = {name: tensor.to("cuda") for name, tensor in batch.items()}
        return on_gpu.generate(**moved, **BEAM).tolist()

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(translate, batches)) == expected


def test_searches_share_the_memory_of_their_graphs(models):
    _, on_gpu = models
    moved = {name: tensor.to("cuda") for name, tensor in sources(on_gpu, 40, seed=1).items()}
    taken = []
    for _ in range(6):
        on_gpu.generate(**moved, **BEAM)
        taken.append(torch.cuda.memory_reserved())
    assert taken[-1] == taken[1]
