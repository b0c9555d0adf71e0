"""No layer waits for its device: on the meta device, whose tensors hold no values, every `.item()`, `nonzero`, boolean
index and branch on a value raises, and so does a tensor made elsewhere."""

import pytest
import torch
from tiny import CACHE, MODES, tiny_config, tokens
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import StaticCache

import hla_hf
from hla_hf.modeling_hla import model_class


ON_META = {
    **{name: mode for name, mode in MODES.items() if "mixed" not in name},  # Transformers looks into softmax masks
    "second order": {"hla_operator": "hla2", "hla_window": 8, "hla_accumulator": "key"},
    "third order": {"hla_operator": "hla3", "hla_window": 8, "hla_decay": "learned"},
    "a number as decay": {"hla_operator": "linear", "hla_window": 8, "hla_decay": 0.9},
    "slots by recall": {"hla_window": 8, "hla_slots": 5, "hla_slot_score": "recall"},
    "learned slots": {"hla_window": 8, "hla_slots": 5, "hla_slot_score": "learned"},
}


def meta_model(dtype=torch.bfloat16, **settings):
    with torch.device("meta"):
        model = model_class("llama")(tiny_config(**settings)).to(dtype)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    return model.eval()


def meta_tokens(*shape):
    return tokens(*shape).to("meta")


@pytest.fixture(params=ON_META)
def model(request):
    return meta_model(**ON_META[request.param])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("padding", [False, True])
def test_training(model, padding, checkpointing):
    ids = meta_tokens(2, 40)
    mask = {"attention_mask": torch.ones_like(ids)} if padding else {}
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    model(ids, labels=ids, use_cache=False, **mask).loss.backward()
    for name, parameter in model.named_parameters():
        if "score" not in name:  # of learned slots, which transfer trains
            assert parameter.grad.is_meta, name


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("padding", [False, True])
@torch.no_grad()
def test_prefill_and_decoding(model, padding, static):
    ids = meta_tokens(2, 40)
    cache = StaticCache(config=model.config, max_cache_len=40) if static else hla_hf.new_cache(model.config)
    for start, end in ((0, 20), (20, 21), (21, 22), (22, 30), (30, 31)):
        seen = start if static else 0  # how many a static cache has seen is known on its device only
        mask = {"attention_mask": torch.ones_like(ids[:, seen:end])} if padding else {}
        logits = model(ids[:, start:end], **mask, **{CACHE: cache}).logits
        assert logits.is_meta and logits.shape[1] == end - start
    assert all(x.is_meta for i in model.config.hla_layer_ids for x in cache.layers[i].state if x is not None)


@pytest.mark.parametrize("packing", ["position_ids", "seq_idx", "cu_seq_lens_q"])
def test_packed_documents(packing):
    model, ids = meta_model(**MODES["windowed"]), meta_tokens(1, 40)
    given = {"position_ids": ids, "seq_idx": ids, "cu_seq_lens_q": ids[0, :3]}[packing]
    model(ids, labels=ids, use_cache=False, **{packing: given}).loss.backward()


class Products(TorchDispatchMode):
    """Keeps the matrix products whose inputs are float32: the shapes of their inputs and output."""

    def __init__(self):
        super().__init__()
        self.count, self.float32 = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        if function._opname in ("mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_"):
            self.count += 1
            inputs = args[-2:]
            if any(x.dtype == torch.float32 for x in inputs):
                self.float32.append([tuple(x.shape[-2:]) for x in (*inputs, out)])
        return out


@pytest.mark.parametrize("call", ["training", "prefill", "decoding"])
@pytest.mark.parametrize("settings", [{}, {"hla_slots": 5}, {"hla_slots": 5, "hla_slot_score": "learned"}])
def test_products_are_in_half_precision(settings, call):
    """But for those that sum into the states, in decoding also that which reads one just written, and Transformers' own
    of frequencies and positions."""
    model = meta_model(hla_operator="linear", hla_window=32, hla_num_sinks=2, head_dim=24, **settings)
    assert model.config.hla_feature_map == "hedgehog" and model.config.hla_chunk_size != 32
    ids, cache = meta_tokens(2, 200), hla_hf.new_cache(model.config)
    with torch.set_grad_enabled(call == "training"):
        if call == "decoding":
            model(ids, **{CACHE: cache})
        with Products() as products:
            if call == "training":
                model.train()(ids, labels=ids, use_cache=False).loss.backward()
            else:
                model(ids[:, : 1 if call == "decoding" else 200], **{CACHE: cache})
    state = {(48, 25), (25, 48)}
    others = [
        (a, b, out)
        for a, b, out in products.float32
        if not state & ({out} if call == "prefill" else {a, b, out}) and a[1] != 1
    ]
    assert products.count > 20 and len(products.float32) > 2 and not others


class Waits(TorchFunctionMode):
    """Counts what makes the host wait for a device."""

    LOOKS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "equal", "nonzero", "unique")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += getattr(function, "__name__", "") in self.LOOKS
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(
    "given", ["nothing", "attention_mask", "position_ids", "seq_idx", "cu_seq_lens_q", "mask and documents"]
)
def test_a_forward_pass_waits_once_at_most(given):
    """On the CPU, where a wait is just a call."""
    model, ids = model_class("llama")(tiny_config(**MODES["windowed"])), tokens(1, 40)
    arguments = {
        "nothing": {},
        "attention_mask": {"attention_mask": torch.ones_like(ids)},
        "position_ids": {"position_ids": torch.arange(40)[None] % 20},
        "seq_idx": {"seq_idx": torch.arange(40)[None] // 20},
        "cu_seq_lens_q": {"cu_seq_lens_q": torch.tensor([0, 20, 40])},
        "mask and documents": {"attention_mask": torch.ones_like(ids), "seq_idx": torch.arange(40)[None] // 20},
    }[given]
    with Waits() as waits:
        model(ids, use_cache=False, **arguments)
    assert waits.count == (given != "nothing")
