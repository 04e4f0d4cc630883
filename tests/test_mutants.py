"""A changed model is searched with its change: the inference engine runs no mutant of section 3.

Each mutant first changes the logits of the model's own modules. Then `generate`, the pipeline,
`translate` and `evaluate` must find what these modules find, and an engine that is required must be
refused with the name of what was changed.
"""

import copy
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import digests
import pytest
import torch
import train_toys
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    GenerationMixin,
    PreTrainedModel,
    masking_utils,
)
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.generation import utils as generation_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask, sdpa_mask
from translation_toys import TEXTS, make_model, make_tokenizer

import vanilla_transformer
from vanilla_transformer import TranslationPipeline, loading
from vanilla_transformer import checks_vanilla_transformer as checks
from vanilla_transformer import modeling_vanilla_transformer as modeling
from vanilla_transformer.conversion.library_code import library_digests
from vanilla_transformer.engine_checks_vanilla_transformer import probe, reason_against_engine
from vanilla_transformer.engine_vanilla_transformer import SearchEngine
from vanilla_transformer.released_code_vanilla_transformer import RELEASED
from vanilla_transformer.train.data.batches import IGNORED
from vanilla_transformer.train.devices.cpu_kernels import CheapDropout, use_cpu_kernels
from vanilla_transformer.train.evaluate import evaluate
from vanilla_transformer.train.step import batch_loss_sum, smoothed_loss_sum, takes_fused_loss
from vanilla_transformer.train.translate import translate_lines
from vanilla_transformer.train.validation import validation_loss

pytestmark = pytest.mark.usefixtures("new_process")

ROOT = Path(vanilla_transformer.__file__).parent
SEARCHES = [{"num_beams": 1}, {"num_beams": 4}]

# an edit of each line of section 3: the line, and its replacement
EDITS = {
    "scores, eq. (1)": ("query @ key.transpose(-2, -1) / math.sqrt(d_k)", "0.3 * query @ key.mT"),
    "weights, eq. (1)": (
        "(scores if mask is None else scores + mask).softmax(dim=-1)",
        "(scores if mask is None else scores + mask).sigmoid()",
    ),
    "context, eq. (1)": (
        "F.dropout(weights, dropout, training=dropout > 0) @ value",
        "weights.square() @ value",
    ),
    "scaling, 3.2.2": ("self.scaling = self.d_k**-0.5", "self.scaling = self.d_k**-0.1"),
    "queries, 3.2.2": ("query = self._heads(self.q_proj(x)", "query = self._heads(self.k_proj(x)"),
    "keys, 3.2.2": (
        "key = self._heads(self.k_proj(source)",
        "key = self._heads(-self.k_proj(source)",
    ),
    "values, 3.2.2": ("self._heads(self.v_proj(source)", "self._heads(2 * self.v_proj(source)"),
    "output, 3.2.2": (
        "return self.out_proj(context.reshape(*x.shape[:-1], -1)), weights",
        "return x + self.out_proj(context.reshape(*x.shape[:-1], -1)), weights",
    ),
    "feed-forward, eq. (2)": (
        "self.dropout(self.activation(self.fc1(x)))",
        "self.dropout(self.activation(self.fc1(x)).square())",
    ),
    "add and norm, 3.1": (
        "return norm(x + self.dropout(sublayer(x)))",
        "return norm(x + 0.5 * self.dropout(sublayer(x)))",
    ),
    "encoder layer, 3.1": (
        "x = self.add_and_norm(x, attend_to_source, self.self_attention_norm)\n",
        "pass\n",
    ),
    "decoder layer, 3.1": (
        "x = self.add_and_norm(x, attend_to_memory, self.cross_attention_norm)\n",
        "pass\n",
    ),
    "encoder, 3.1": (
        "x = layer(x, mask, **kwargs)",
        "x = layer(layer(x, mask, **kwargs), mask, **kwargs)",
    ),
    "embedding, 3.4": (
        "return inputs_embeds * math.sqrt(self.config.d_model)",
        "return inputs_embeds",
    ),
    "logits, 3.4": (
        "logits = self.lm_head(outputs.last_hidden_state[:, kept])",
        "logits = self.lm_head(0.4 * outputs.last_hidden_state[:, kept])",
    ),
    "angles, 3.5": ("torch.arange(0, d_model, 2,", "torch.arange(d_model, 0, -2,"),
    "positions, 3.5": ("return x + encoding.to(x.dtype)", "return x + encoding.to(x.dtype).abs()"),
    # the probe reads seven source and three target tokens
    "positions past the probe": (
        "positions = positions + config.position_offset",
        "positions = (positions + config.position_offset).clamp(max=6)",
    ),
}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def run(tmp_path_factory, tokenizer):
    """A model folder with a corpus to evaluate on."""
    folder = tmp_path_factory.mktemp("mutants")
    make_model(tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name in ("train", "validation", "test"):
        for language in ("en", "de"):
            (folder / f"{name}.{language}").write_text("".join(f"{text}\n" for text in TEXTS))
    return folder


def edited_module(folder, old, new, name="modeling_vanilla_transformer"):
    """Import an edited copy of the model's file, beside the other files of the package."""
    source = (ROOT / "modeling_vanilla_transformer.py").read_text(encoding="utf-8")
    assert source.count(old) >= 1
    (folder / f"{name}.py").write_text(source.replace(old, new), encoding="utf-8")
    package = f"edited_{folder.name}"
    for file in ROOT.glob("*_vanilla_transformer.py"):
        known = sys.modules.get(f"vanilla_transformer.{file.stem}")
        if known is not None and file.stem != "modeling_vanilla_transformer":
            sys.modules[f"{package}.{file.stem}"] = known
    spec = importlib.util.spec_from_file_location(f"{package}.{name}", folder / f"{name}.py")
    sys.modules[package] = importlib.util.module_from_spec(
        importlib.util.spec_from_loader(package, loader=None, is_package=True)
    )
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_class(model, kind):
    """Return a model of another class with the same weights."""
    other = kind(model.config).eval()
    other.load_state_dict(model.state_dict())
    other.generation_config = model.generation_config
    return other


def logits(model, tokenizer):
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        return model(**inputs, decoder_input_ids=inputs["input_ids"]).logits


def greedily(model, tokenizer, text, length):
    """Translate by calling the modules for each token, without a cache."""
    source = tokenizer(text, return_tensors="pt")
    ids = torch.tensor([[model.config.decoder_start_token_id]])
    forbidden = model.generation_config.suppress_tokens
    for _ in range(length):
        with torch.no_grad():
            scores = model(**source, decoder_input_ids=ids).logits[0, -1]
        scores[forbidden] = -torch.inf
        ids = torch.cat((ids, scores.argmax().view(1, 1)), dim=1)
        if int(ids[0, -1]) == model.config.eos_token_id:
            break
    return ids[0].tolist()


def check_losses(model, tokenizer):
    """Compare the losses of training and of validation with those from the modules' logits."""
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    inputs = {**inputs, "decoder_input_ids": inputs["input_ids"]}
    labels = inputs["input_ids"].roll(-1, dims=1)
    labels[:, -1] = IGNORED
    label_indices = (labels.flatten() != IGNORED).nonzero().flatten()
    accelerator = Accelerator(cpu=True)
    with torch.no_grad():
        expected = [smoothed_loss_sum(logits(model, tokenizer), labels, it) for it in (0.1, 0.0)]
        batch = {**inputs, "labels": labels, "label_indices": label_indices}
        found = batch_loss_sum(accelerator, model, batch, 0.1)
        torch.testing.assert_close(found, expected[0], rtol=1e-5, atol=1e-4)
        mean = validation_loss(accelerator, model, [{**inputs, "labels": labels}])
    assert mean * len(label_indices) == pytest.approx(float(expected[1]), rel=1e-5)
    model.eval()


def check(model, tokenizer, run, plain, monkeypatch, named):
    """Compare every way to translate, and the losses, with the modules of a mutant."""
    # the mutation changes the logits
    assert (logits(model, tokenizer) - logits(plain, tokenizer)).abs().max() > 1e-3
    check_losses(model, tokenizer)
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    checks.warn_once.cache_clear()
    told = []
    with monkeypatch.context() as patch:
        patch.setattr(checks.logger, "warning", lambda text, *args: told.append(text % args))
        for search in SEARCHES:
            # only the modules record the outputs of each step
            expected = model.generate(**inputs, **search, return_dict_in_generate=True).sequences
            assert model.generate(**inputs, **search).tolist() == expected.tolist()
            with pytest.raises(ValueError, match="engine='required' needs the inference engine"):
                model.generate(**inputs, **search, engine="required")
    assert len(told) == 1
    assert named in told[0]
    alone = model.generate(**tokenizer(TEXTS[2], return_tensors="pt"), num_beams=1)
    ids = greedily(model, tokenizer, TEXTS[2], alone.shape[1] - 1)
    assert alone[0].tolist()[: len(ids)] == ids
    texts = [text.strip() for text in tokenizer.batch_decode(expected, skip_special_tokens=True)]
    translator = TranslationPipeline(model, tokenizer, device="cpu")
    assert [one["translation_text"].strip() for one in translator(TEXTS)] == texts
    assert [line.strip() for line in translate_lines(translator, TEXTS)] == texts
    with monkeypatch.context() as patch:
        patch.setattr(loading, "load_whole", lambda *_: model)
        evaluate(
            str(run / "model"),
            dataset=str(run),
            source_lang="en",
            target_lang="de",
            output_dir=str(run / "scores"),
        )
    (kept,) = (run / "scores" / "hypotheses").glob("*translation.txt")
    assert [line.strip() for line in kept.read_text(encoding="utf-8").splitlines()] == texts


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_line_is_searched_with_the_edit(edit, tokenizer, run, tmp_path, monkeypatch):
    plain = make_model(tokenizer)
    module = edited_module(tmp_path, *EDITS[edit])
    model = of_class(plain, module.VanillaTransformerForConditionalGeneration)
    if "eq. (1)" in edit:
        # otherwise a kernel of the library computes equation (1)
        model.set_attn_implementation("eager")
    check(model, tokenizer, run, plain, monkeypatch, "differs from the released code")


def test_a_probe_alone_would_not_find_all(tokenizer, tmp_path):
    module = edited_module(tmp_path, *EDITS["positions past the probe"])
    model = of_class(make_model(tokenizer), module.VanillaTransformerForConditionalGeneration)
    assert probe(SearchEngine(model), model) is None
    assert "PositionalEncoding differs from the released code" in reason_against_engine(model)


def test_an_edit_that_computes_the_same_uses_the_engine(tokenizer, tmp_path):
    edits = [
        ('"""Transform each position,', '"""Do something else,'),
        ("# CODEPATH: the paper normalizes", "# another comment\n        # CODEPATH:"),
        ("def forward(self, x: Tensor) -> Tensor:", "def forward(self, x):"),
        ("gain = self.config.initializer_gain", "gain = 3 * self.config.initializer_gain"),
    ]
    for number, (old, new) in enumerate(edits):
        folder = tmp_path / str(number)
        folder.mkdir()
        module = edited_module(folder, old, new)
        model = of_class(make_model(tokenizer), module.VanillaTransformerForConditionalGeneration)
        assert reason_against_engine(model) is None


def add_hook(model):
    model.model.decoder.layers[0].register_forward_hook(lambda module, args, output: 0.5 * output)


def patch_forward(model):
    feed_forward = model.model.encoder.layers[1].feed_forward
    feed_forward.forward = lambda x: -x


def parametrize(model):
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    linear = model.model.decoder.layers[0].feed_forward.fc1
    nn.utils.parametrize.register_parametrization(linear, "weight", Doubled())


def normalize_weight(model):
    linear = model.model.decoder.layers[0].feed_forward.fc2
    with warnings.catch_warnings(action="ignore"):
        nn.utils.weight_norm(linear)
    linear.weight_g.data *= 3


class Gated(nn.Linear):
    def forward(self, x):
        return super().forward(x).tanh()


def replace_linear(model):
    attention = model.model.encoder.layers[0].self_attention
    gated = Gated(24, 24, bias=False)
    gated.load_state_dict(attention.v_proj.state_dict())
    attention.v_proj = gated


def replace_norm(model):
    model.model.encoder.layers[1].feed_forward_norm = nn.RMSNorm(24)


def put_a_norm_in_place_of_dropout(model):
    model.model.decoder.layers[0].dropout = nn.LayerNorm(24)


class Alibi(nn.Module):
    def forward(self, x, first_position=0):
        steps = torch.arange(x.shape[1])[:, None] + first_position
        return x + torch.cos(steps * torch.arange(x.shape[2]))


def replace_positions(model):
    model.model.encoder.positions = Alibi()
    model.model.decoder.positions = Alibi()


def register_attention(model):
    def warm(module, query, key, value, attention_mask, **kwargs):
        query = query / 3
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("warm", warm)
    AttentionMaskInterface.register("warm", sdpa_mask)
    model.set_attn_implementation("warm")


def quantize(model):
    with warnings.catch_warnings(action="ignore"):
        torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8, inplace=True)


def add_adapter(model):
    adapted = get_peft_model(model, LoraConfig(target_modules=["v_proj"], r=4))
    for name, weight in adapted.named_parameters():
        if "lora" in name:
            weight.data.normal_(std=1.0)


def put_layers_around_the_head(model):
    class Doubled(nn.Module):
        def forward(self, x):
            return 2 * x

    model.lm_head = nn.Sequential(model.lm_head, Doubled())


def subtract_the_mean_of_the_batch(model):
    class Centered(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y - 0.9 * y.mean(dim=0)

    model.lm_head.__class__ = Centered


CHANGES = {
    add_hook: "model.decoder.layers.0 has a forward hook",
    patch_forward: "model.encoder.layers.1.feed_forward has its own forward",
    parametrize: "model.decoder.layers.0.feed_forward.fc1 is of the class torch.nn.utils",
    normalize_weight: "model.decoder.layers.0.feed_forward.fc2 has a forward pre-hook",
    replace_linear: f"encoder.layers.0.self_attention.v_proj is of the class {__name__}.Gated",
    replace_norm: "model.encoder.layers.1.feed_forward_norm is of the class torch.nn.modules",
    put_a_norm_in_place_of_dropout: "decoder.layers.0.dropout is of the class torch.nn.modules",
    replace_positions: f"model.encoder.positions is of the class {__name__}.Alibi",
    register_attention: "the attention function 'warm'",
    quantize: "v_proj is of the class torch.ao.nn.quantized.dynamic",
    add_adapter: "model.encoder.layers.0.self_attention.v_proj is of the class peft",
    put_layers_around_the_head: "lm_head is of the class torch.nn.modules",
    subtract_the_mean_of_the_batch: f"lm_head is of the class {__name__}",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_model_is_searched_with_the_change(change, tokenizer, run, monkeypatch):
    model = make_model(tokenizer)
    change(model)
    named = CHANGES[change].split(" is of the class ")[-1]
    check(model, tokenizer, run, make_model(tokenizer), monkeypatch, named)
    assert CHANGES[change] in reason_against_engine(model) or change is quantize


def share_the_layers(model):
    model.model.decoder.layers.append(model.model.decoder.layers[0])


def add_a_copy_of_the_layer(model):
    model.model.decoder.layers.append(copy.deepcopy(model.model.decoder.layers[0]))


def remove_the_first_layer(model):
    del model.model.decoder.layers[0]


def share_the_cross_attention(model):
    layers = model.model.decoder.layers
    layers[1].cross_attention = layers[0].cross_attention


def attend_without_an_index(model):
    attention = modeling.MultiHeadAttention(model.config, is_causal=True)
    model.model.decoder.layers[1].self_attention = attention.eval()


@pytest.mark.parametrize(
    "change",
    [
        share_the_layers,
        add_a_copy_of_the_layer,
        remove_the_first_layer,
        share_the_cross_attention,
        attend_without_an_index,
    ],
)
def test_layers_that_would_share_a_cache_are_searched_without_one(change, tokenizer, monkeypatch):
    model = make_model(tokenizer, decoder_layers=2)
    before = logits(model, tokenizer)
    change(model)
    checks.warn_once.cache_clear()
    told = []
    monkeypatch.setattr(checks.logger, "warning", lambda text, *args: told.append(text % args))
    assert "cache indices" in reason_against_engine(model)
    if change is not add_a_copy_of_the_layer:
        assert (logits(model, tokenizer) - before).abs().max() > 1e-3
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    for search in SEARCHES:
        expected = model.generate(**inputs, **search, use_cache=False)
        for engine in ("auto", "off"):
            found = model.generate(**inputs, **search, engine=engine)
            assert found.tolist() == expected.tolist()
    alone = model.generate(**tokenizer(TEXTS[2], return_tensors="pt"), num_beams=1)
    ids = greedily(model, tokenizer, TEXTS[2], alone.shape[1] - 1)
    assert alone[0].tolist()[: len(ids)] == ids
    assert len(told) == 1
    assert "generate uses no cache" in told[0]


def test_a_layer_that_the_configuration_does_not_count_is_searched_without_a_cache(
    tokenizer, monkeypatch
):
    model = make_model(tokenizer, decoder_layers=2)
    layer = copy.deepcopy(model.model.decoder.layers[1])
    for attention in (layer.self_attention, layer.cross_attention):
        attention.layer_idx, attention.config = 2, model.config
    model.model.decoder.layers.append(layer)
    checks.warn_once.cache_clear()
    told = []
    monkeypatch.setattr(checks.logger, "warning", lambda text, *args: told.append(text % args))
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    found = {}
    for engine in ("auto", "off"):
        for number, search in enumerate(SEARCHES):
            found[engine, number] = model.generate(**inputs, **search, engine=engine).tolist()
            expected = model.generate(**inputs, **search, use_cache=False).tolist()
            assert found[engine, number] == expected
    reason = "the decoder has 3 layers, and decoder_layers of its configuration is 2"
    assert len(told) == 1
    assert reason in told[0]
    with pytest.raises(ValueError, match=f"its own cache index, but {reason}"):
        model(**inputs, decoder_input_ids=inputs["input_ids"], cache=DynamicCache())
    # what the warning advises
    model.config.decoder_layers = 3
    for number, search in enumerate(SEARCHES):
        with_cache = model.generate(**inputs, **search, engine="off").tolist()
        assert with_cache == found["auto", number]
        assert model.generate(**inputs, **search, engine="required").tolist() == with_cache


def look_ahead(model):
    for layer in model.model.encoder.layers:
        layer.self_attention.is_causal = True


def own_configuration(model):
    encoder = model.model.encoder
    encoder.config = copy.deepcopy(encoder.config)
    encoder.config.hidden_size = 4


def plain_weight(model):
    linear = model.model.decoder.layers[0].feed_forward.fc1
    weight = linear.weight.detach()
    del linear.weight
    linear.weight = -3 * weight


def weight_as_buffer(model):
    linear = model.model.decoder.layers[0].feed_forward.fc1
    weight = linear.weight.detach()
    del linear.weight
    linear.register_buffer("weight", -3 * weight)


def forbid_a_token_and_scale(model):
    model.lm_head.bias.data[3] = -1e9
    model.set_attn_implementation("eager")
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        # the eager function does not read it
        layer.self_attention.scaling = 2.0


def call_in_another_way(model):
    feed_forward = model.model.encoder.layers[0].feed_forward
    feed_forward._call_impl = lambda x: -feed_forward.forward(x)


def narrow_heads(model):
    attention = model.model.decoder.layers[0].self_attention
    attention.d_k = attention.d_v = 12


def mix_positions(model):
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        layer.feed_forward.activation = ACT2FN["gelu"]
        layer.feed_forward.activation.act = lambda x: 9 * (x - x.mean(dim=-2, keepdim=True))


class NegatedEncoder(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.get_input_embeddings = encoder.get_input_embeddings

    def forward(self, *args, **kwargs):
        output = self.encoder(*args, **kwargs)
        output.last_hidden_state = -output.last_hidden_state
        return output


def encode_in_another_way(model):
    encoder = NegatedEncoder(model.model.encoder)
    model.model.get_encoder = lambda modality=None: encoder


def scale_each_head(model):
    model.set_attn_implementation("eager")
    # the eager function does not read it
    model.model.decoder.layers[0].self_attention.scaling = torch.full((4, 1, 1), 2.0)


UNPADDED = {
    look_ahead: "model.encoder.layers.0.self_attention has is_causal True",
    own_configuration: "model.encoder has a configuration other than that of the model",
    plain_weight: "fc1 has a weight that is not a parameter",
    weight_as_buffer: "fc1 has a weight that is not a parameter",
    forbid_a_token_and_scale: "the logits of the engine differ",
    call_in_another_way: "feed_forward has its own _call_impl",
    narrow_heads: "the layers of the decoder have different numbers of heads",
    mix_positions: "activation has its own act",
    encode_in_another_way: "VanillaTransformerModel has its own get_encoder",
    scale_each_head: "an attention of the decoder has a scaling that is not a number",
}


@pytest.mark.parametrize("change", UNPADDED, ids=lambda change: change.__name__)
def test_a_change_that_padding_hides_is_searched(change, tokenizer):
    """One sentence, without padding, after an engine of the model before the change."""
    model = make_model(tokenizer, output_bias=True)
    inputs = tokenizer(TEXTS[2], return_tensors="pt")
    before = model.generate(**inputs, engine="required")
    change(model)
    for search in SEARCHES:
        expected = model.generate(**inputs, **search, engine="off")
        assert model.generate(**inputs, **search).tolist() == expected.tolist()
        with pytest.raises(ValueError, match=UNPADDED[change]):
            model.generate(**inputs, **search, engine="required")
    is_same = before.tolist() == expected.tolist()
    assert not is_same or change in (narrow_heads, forbid_a_token_and_scale, scale_each_head)


def hide_the_feed_forward(model):
    layer = model.model.decoder.layers[0]
    feed_forward = layer.feed_forward
    object.__setattr__(layer, "feed_forward", lambda x: -2 * feed_forward(x))


def hide_the_head(model):
    head = model.lm_head
    object.__setattr__(model, "lm_head", lambda x: -head(x))


def hide_the_layers(model):
    model.model.decoder.__dict__["layers"] = model.model.decoder.layers[:0]


def see_the_future(model):
    model.config.is_causal = False


def slide_a_window(model):
    model.config.sliding_window = 2


UNSEEN = {
    hide_the_feed_forward: "layers.0 has an attribute feed_forward that hides its feed_forward",
    hide_the_head: "Generation has an attribute lm_head that hides its lm_head",
    hide_the_layers: "model.decoder has an attribute layers that hides its layers",
    see_the_future: "the configuration has an is_causal that is not true",
    slide_a_window: "the configuration has sliding_window",
}


@pytest.mark.parametrize("change", UNSEEN, ids=lambda change: change.__name__)
def test_a_change_without_a_new_module_is_searched(change, tokenizer):
    model = make_model(tokenizer)
    inputs = tokenizer(TEXTS[2], return_tensors="pt")
    inputs["decoder_input_ids"] = torch.tensor([[1, 5, 9, 14, 30]])
    settings = {"num_beams": 1, "max_new_tokens": 5}
    model.generate(**inputs, **settings, engine="required")
    change(model)
    try:
        expected = model.generate(**inputs, **settings, engine="off").tolist()
    except RuntimeError as error:
        # the library's sliding window does not fit this cache
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            model.generate(**inputs, **settings)
    else:
        assert model.generate(**inputs, **settings).tolist() == expected
    with pytest.raises(ValueError, match=UNSEEN[change]):
        model.generate(**inputs, **settings, engine="required")


class RoundedProducts(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            return function(args[0], args[1].mul(4).round() / 4, *args[2:])
        return function(*args, **(kwargs or {}))


class HalvedProducts(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        products = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return result / 2 if function in products else result


@pytest.mark.parametrize("mode", [RoundedProducts, HalvedProducts])
def test_a_mode_of_torch_applies_to_a_search_and_ends_with_it(mode, tokenizer):
    model = make_model(tokenizer)
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    with mode():
        expected = model.generate(**inputs, engine="off")
        assert model.generate(**inputs).tolist() == expected.tolist()
        with pytest.raises(ValueError, match=f"the mode {mode.__name__} is active"):
            model.generate(**inputs, engine="required")
    with torch.device("cpu"):
        assert model.generate(**inputs, engine="required").tolist() != expected.tolist()


def test_a_kernel_of_torch_library_applies_to_a_search_and_ends_with_it(tokenizer):
    model = make_model(tokenizer)
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    # this registers kernels too
    torch.func.vmap(torch.sin)(torch.ones(2))
    before = model.generate(**inputs, engine="required")
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings(action="ignore"):
            library.impl("relu", lambda x: x.clamp(min=0.5), "CPU")
        expected = model.generate(**inputs, engine="off")
        assert expected.tolist() != before.tolist()
        assert model.generate(**inputs).tolist() == expected.tolist()
        with pytest.raises(ValueError, match="the kernel aten/relu/CPU was replaced"):
            model.generate(**inputs, engine="required")
    assert model.generate(**inputs, engine="required").tolist() == before.tolist()


def test_a_weight_that_a_lookup_changes_is_not_packed(tokenizer):
    model = make_model(tokenizer)
    model.model.encoder.embed_tokens.max_norm = 1.0
    assert "embed_tokens has max_norm" in reason_against_engine(model)


def test_an_engine_follows_the_attention_function(tokenizer):
    model = make_model(tokenizer)
    for layer in model.model.encoder.layers:
        layer.self_attention.scaling = 1.5
    inputs = tokenizer(TEXTS[2], return_tensors="pt")
    for implementation in ("sdpa", "eager", "sdpa"):
        model.set_attn_implementation(implementation)
        expected = model.generate(**inputs, engine="off")
        assert model.generate(**inputs).tolist() == expected.tolist()


def untie_the_head(model):
    model.lm_head.weight = nn.Parameter(2 * model.lm_head.weight.detach())


def own_embedding(model):
    model.model.decoder.embed_tokens = copy.deepcopy(model.model.decoder.embed_tokens)
    model.model.decoder.embed_tokens.weight.data *= 2


def call_it_untied(model):
    model.config.tie_word_embeddings = False


def drop_words(model):
    def hook(module, args, kwargs):
        return args, {**kwargs, "input_ids": kwargs["input_ids"].clamp(max=40)}

    model.model.encoder.register_forward_pre_hook(hook, with_kwargs=True)


def hook_a_gradient(model):
    model.lm_head.weight.register_hook(lambda gradient: 0 * gradient)


def hook_the_gradient_of_the_head(model):
    model.lm_head.register_full_backward_hook(lambda module, inputs, outputs: None)


def pad_the_embedding(model):
    model.model.encoder.embed_tokens.padding_idx = 7


@pytest.mark.parametrize(
    "change",
    [
        untie_the_head,
        own_embedding,
        call_it_untied,
        drop_words,
        hook_a_gradient,
        hook_the_gradient_of_the_head,
        pad_the_embedding,
        plain_weight,
        add_hook,
        hide_the_head,
    ],
)
def test_a_change_around_the_layers_is_trained(change, tokenizer):
    model = make_model(tokenizer)
    accelerator = Accelerator(cpu=True)
    assert takes_fused_loss(accelerator, model)
    change(model)
    check_losses(model, tokenizer)
    # layers are called as modules: their changes need no other loss
    assert takes_fused_loss(accelerator, model) == (change in (plain_weight, add_hook))


class Patched:
    """A function that is an object."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **kwargs):
        return -0.5 * self.function(*args, **kwargs)


@pytest.mark.parametrize("name", ["linear", "embedding", "scaled_dot_product_attention"])
def test_a_loss_with_a_replaced_function_of_torch_is_that_of_the_modules(
    name, tokenizer, monkeypatch
):
    model = make_model(tokenizer)
    monkeypatch.setattr(nn.functional, name, Patched(getattr(nn.functional, name)))
    check_losses(model, tokenizer)


def test_only_a_released_model_gets_faster_modules_for_training(tokenizer):
    for change in (add_hook, replace_linear, patch_forward):
        model = make_model(tokenizer, dropout=0.3)
        change(model)
        kinds = [type(module) for module in model.modules()]
        use_cpu_kernels(model, is_half=False)
        assert [type(module) for module in model.modules()] == kinds
    plain = make_model(tokenizer, dropout=0.3)
    use_cpu_kernels(plain, is_half=False)
    assert any(type(module) is CheapDropout for module in plain.modules())


# patches of a function, by a lambda and by packages whose names begin like those of the libraries
PATCHES_BEFORE_IMPORT = {
    "masking_utils.create_bidirectional_mask": """
        import transformers.masking_utils as masks
        whole = masks.create_bidirectional_mask
        masks.create_bidirectional_mask = lambda *args, **kwargs: whole(*args, **kwargs)
    """,
    "masking_utils.create_causal_mask": """
        import transformers
        import transformers.masking_utils as masks
        whole = masks.create_causal_mask
        source = "def create_causal_mask(*args, **kwargs): return whole(*args, **kwargs)"
        exec(compile(source, transformers.__path__[0] + "_x/masks.py", "exec"))
        masks.create_causal_mask = create_causal_mask
    """,
    "functional.linear": """
        from torch.nn import functional
        class Linear:
            __module__ = "torchao_patches.layers"
            whole = functional.linear
            def __call__(self, *args):
                return -type(self).whole(*args)
        functional.linear = Linear()
    """,
}


@pytest.mark.parametrize("patched", PATCHES_BEFORE_IMPORT)
def test_a_function_that_was_patched_before_the_import_is_seen(patched, tmp_path):
    code = f"""if True:
        {PATCHES_BEFORE_IMPORT[patched]}
        from vanilla_transformer import VanillaTransformerConfig
        from vanilla_transformer import VanillaTransformerForConditionalGeneration
        from vanilla_transformer.engine_checks_vanilla_transformer import reason_against_engine
        config = VanillaTransformerConfig(vocab_size=50, d_model=16)
        print(reason_against_engine(VanillaTransformerForConditionalGeneration(config).eval()))
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert f"{patched} was replaced" in done.stdout, done.stderr


def warmer(self, x):
    return self.fc2(self.activation(self.fc1(x)) + 0.5)


def colder(module, query, key, value, attention_mask, **kwargs):
    return modeling.eager_attention(module, query / 3, key, value, attention_mask)


def backward_mask(batch_idx, head_idx, q_idx, kv_idx):
    return kv_idx >= q_idx


def rounded_weight(self, name, get=nn.Module.__getattr__):
    value = get(self, name)
    return value.round() if name == "weight" and type(self) is nn.Linear else value


PATCHES = {
    "a method": (modeling.FeedForward, "forward", warmer),
    "a method of a base": (
        modeling.TransformerLayer,
        "add_and_norm",
        lambda self, x, sublayer, norm: norm(x + 0.3 * sublayer(x)),
    ),
    "a method that was inherited": (
        modeling.DecoderLayer,
        "add_and_norm",
        lambda self, x, sublayer, norm: norm(x - sublayer(x)),
    ),
    "a function": (modeling, "sinusoids", lambda *args: modeling.torch.zeros(24)),
    "a method of torch": (nn.Linear, "forward", lambda self, x: x @ self.weight.T.sign()),
    "a function of torch": (
        nn.functional,
        "scaled_dot_product_attention",
        lambda query, key, value, **kwargs: value.mean(dim=2, keepdim=True).expand_as(query),
    ),
    "another function of torch": (nn.functional, "relu", nn.functional.silu),
    "another method of torch": (nn.ReLU, "forward", nn.Sigmoid.forward),
    "an operator of torch": (torch, "layer_norm", lambda x, *args: x),
    "a mask": (masking_utils, "bidirectional_mask_function", lambda b, h, q, k: (k - q).abs() < 2),
    "a mask of padding": (masking_utils, "padding_mask_function", lambda mask: backward_mask),
    "a function that is an object": (nn.functional, "linear", Patched(nn.functional.linear)),
    "a call of torch": (
        nn.Linear,
        "__call__",
        lambda self, x: nn.Module.__call__(self, x).tanh(),
    ),
    "a call": (
        modeling.FeedForward,
        "__call__",
        lambda self, x: -nn.Module.__call__(self, x),
    ),
    "a weight of a class": (
        nn.Linear,
        "weight",
        property(lambda self: rounded_weight(self, "weight")),
    ),
    "a weight at each access": (nn.Module, "__getattr__", rounded_weight),
}


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patched_class_is_searched_with_the_patch(patch, tokenizer, monkeypatch):
    model = make_model(tokenizer)
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    before = logits(model, tokenizer)
    # an engine of the code before the patch exists
    model.generate(**inputs, engine="required")
    with monkeypatch.context() as patching:
        patching.setattr(*PATCHES[patch], raising=patch != "a weight of a class")
        assert (logits(model, tokenizer) - before).abs().max() > 1e-3
        for search in SEARCHES:
            expected = model.generate(**inputs, **search, return_dict_in_generate=True).sequences
            assert model.generate(**inputs, **search).tolist() == expected.tolist()
            with pytest.raises(ValueError, match=r"replaced|changed after|its own|was given"):
                model.generate(**inputs, **search, engine="required")
    model.generate(**inputs, engine="required")


def test_a_patched_way_to_the_encoder_is_searched(tokenizer, monkeypatch):
    model = make_model(tokenizer)
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    before = model.generate(**inputs, engine="required")
    encoder = NegatedEncoder(model.model.encoder)
    monkeypatch.setattr(PreTrainedModel, "get_encoder", lambda self, modality=None: encoder)
    found = model.generate(**inputs)
    assert found.tolist() == model.generate(**inputs, engine="off").tolist() != before.tolist()
    with pytest.raises(ValueError, match="whose get_encoder was replaced"):
        model.generate(**inputs, engine="required")


def test_a_patched_search_of_the_library_runs(tokenizer, monkeypatch):
    def always(self, input_ids, *args, **kwargs):
        return torch.cat((input_ids, torch.full_like(input_ids, 77)), dim=1)

    model = make_model(tokenizer)
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    monkeypatch.setattr(GenerationMixin, "_sample", always)
    assert model.generate(**inputs, num_beams=1)[:, -1].tolist() == [77] * len(TEXTS)
    with pytest.raises(ValueError, match=r"GenerationMixin\._sample was replaced"):
        model.generate(**inputs, num_beams=1, engine="required")
    # a file of a package whose name begins like that of a library
    path = f"{Path(torch.__file__).parent}ao_patches/search.py"
    monkeypatch.setattr(always, "__code__", always.__code__.replace(co_filename=path))
    with pytest.raises(ValueError, match=r"GenerationMixin\._sample was replaced"):
        model.generate(**inputs, num_beams=1, engine="required")


def update_negated(self, *args, update=Cache.update, **kwargs):
    return tuple(-3 * states for states in update(self, *args, **kwargs))


class NegatedCache(DynamicCache):
    update = update_negated


@pytest.mark.parametrize(
    ("owner", "name", "patch"),
    [(Cache, "update", update_negated), (generation_utils, "DynamicCache", NegatedCache)],
)
def test_a_patched_cache_is_searched_with_the_patch(
    owner, name, patch, tokenizer, monkeypatch, caplog
):
    model = make_model(tokenizer)
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    search = {"num_beams": 1, "max_extra_tokens": 9}
    before = model.generate(**inputs, **search, engine="required")
    monkeypatch.setattr(owner, name, patch)
    found = model.generate(**inputs, **search)
    assert found.tolist() == model.generate(**inputs, **search, engine="off").tolist()
    assert found.tolist() != before.tolist()
    with pytest.raises(ValueError, match=rf"\.{name} was replaced"):
        model.generate(**inputs, **search, engine="required")
    assert "uses no cache" not in caplog.text


def test_the_command_line_evaluates_a_file_that_was_edited_in_place(run, tmp_path):
    package = tmp_path / "vanilla_transformer"
    ignored = shutil.ignore_patterns(".*", "tests", "results", "runs", "build", "docs")
    shutil.copytree(ROOT, package, ignore=ignored)
    file = package / "modeling_vanilla_transformer.py"
    file.write_text(file.read_text(encoding="utf-8").replace(*EDITS["feed-forward, eq. (2)"]))
    command = [sys.executable, "-m", "vanilla_transformer.train.evaluate", str(run / "model")]
    command += ["--dataset", str(run), "--source_lang", "en", "--target_lang", "de"]
    found = {}
    for engine in ("auto", "off", "required"):
        output = tmp_path / engine
        done = subprocess.run(
            [*command, "--output_dir", str(output), "--engine", engine],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        found[engine] = done
        if engine != "required":
            assert done.returncode == 0, done.stderr
            (kept,) = (output / "hypotheses").glob("*translation.txt")
            found[engine] = kept.read_text(encoding="utf-8")
    assert found["auto"] == found["off"]
    assert found["required"].returncode == 1
    assert "FeedForward differs from the released code" in found["required"].stderr
    plain = "".join(f"{line}\n" for line in translate_lines(loading.load(run / "model"), TEXTS))
    assert found["auto"] != plain


@pytest.mark.parametrize("kind", ["attention", "mask"])
def test_a_registered_function_under_the_librarys_name_is_seen(kind, tokenizer, monkeypatch):
    model = make_model(tokenizer)
    assert reason_against_engine(model) is None
    registry = AttentionInterface if kind == "attention" else AttentionMaskInterface
    monkeypatch.setitem(registry._global_mapping, "sdpa", colder)
    assert f"the {kind} function 'sdpa'" in reason_against_engine(model)
    monkeypatch.setitem(registry._global_mapping, "sdpa", flash_attention_mask)
    assert f"the {kind} function 'sdpa'" in reason_against_engine(model)


def test_a_patched_operator_of_tensors_is_seen(tokenizer, monkeypatch):
    model = make_model(tokenizer)
    model.set_attn_implementation("eager")
    assert reason_against_engine(model) is None
    for name in ("softmax", "__matmul__"):
        plain = getattr(torch.Tensor, name)
        with monkeypatch.context() as patch:
            patch.setattr(
                torch.Tensor, name, lambda self, *args, plain=plain, **kw: -plain(self, *args, **kw)
            )
            assert reason_against_engine(model) == f"Tensor.{name} was replaced"
        assert reason_against_engine(model) is None


USERS_FILE = """
from vanilla_transformer.modeling_vanilla_transformer import *
from vanilla_transformer.modeling_vanilla_transformer import EncoderLayer


class MyEncoderLayer(EncoderLayer):
    def add_and_norm(self, x, sublayer, norm):
        return norm(x + 0.5 * sublayer(x))


class MyModel(VanillaTransformerForConditionalGeneration):
    def __init__(self, config):
        super().__init__(config)
        for index in range(config.encoder_layers):
            self.model.encoder.layers[index] = MyEncoderLayer(config)
        self.post_init()


class MyHead(VanillaTransformerForConditionalGeneration):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = 0.4 * outputs.logits
        return outputs
"""


@pytest.mark.parametrize("kind", ["MyModel", "MyHead"])
def test_a_subclass_in_a_users_file_is_searched(kind, tokenizer, run, tmp_path, monkeypatch):
    (tmp_path / "my_file.py").write_text(USERS_FILE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("my_file", tmp_path / "my_file.py")
    my_file = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "my_file", my_file)
    spec.loader.exec_module(my_file)
    plain = make_model(tokenizer)
    model = of_class(plain, getattr(my_file, kind))
    check(model, tokenizer, run, plain, monkeypatch, "which is not one of this release")


def test_an_unedited_copy_uses_the_engine(tokenizer, tmp_path):
    module = edited_module(tmp_path, "FeedForward", "FeedForward")
    model = of_class(make_model(tokenizer), module.VanillaTransformerForConditionalGeneration)
    assert type(model) is not modeling.VanillaTransformerForConditionalGeneration
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    expected = make_model(tokenizer).generate(**inputs)
    assert model.generate(**inputs, engine="required").tolist() == expected.tolist()


def test_the_digests_are_those_of_the_released_code():
    for module, current in digests.current_digests().items():
        assert RELEASED[module] == current, (
            f"{module} has changed: change the inference engine alike, then run `make digests`."
        )


def test_the_digests_of_the_library_are_those_of_the_installed_version():
    assert digests.current_library_digests() == library_digests(digests.VERSION)


def test_train_toys_are_released():
    assert reason_against_engine(train_toys.toy_model(dropout=0.1).eval()) is None


def test_a_tensor_that_is_printed_in_another_way_is_computed_by_the_engine(tokenizer, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda tensor, **_: f"{tuple(tensor.shape)}")
    assert reason_against_engine(make_model(tokenizer)) is None
