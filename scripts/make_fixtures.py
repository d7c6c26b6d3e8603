"""Makes test/fixtures/<name>/: a tiny random checkpoint of every supported family in the Hugging Face format, and what
transformers computes with it on a packed batch: loss, logits and every gradient.

    <name>/config.json, model.safetensors   as save_pretrained writes them
    <name>/config_v4.json                   the same model in the layout of transformers 4 (rope_theta, rope_scaling)
    <name>/expected.safetensors             loss, grad/*, batch/*, logits: the names of the trainer's debug.dump_dir

The values are exact: the fp32 weights in a float64 model, its norms and softmax kept in float64, rotary tables in float32.
Every document is computed alone; the packed forward, and the same in float32, must agree, or nothing is written.
"""

from __future__ import annotations

import argparse
import json
import shutil
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig

from safetensors import safe_open
from safetensors.torch import save_file

from common import die
from packed import Batch, KeepFloat64, alone_logits, eager, is_vision, model_class, nll_sum, pack_rows, packed_logits
from packed import relative_l2, write_dump

V, PAD = 97, 5
IMAGE, VIDEO = 95, 96  # of vision-language models; in no document
DOCUMENT_TOKENS = ((1, 2, 9, 13), (13, 1, 6, 8))  # (rows, documents); the last 3 tokens of row 0 are padding
ROW_TOKENS = 28
WINDOW = 5  # shorter than a document, and odd


@dataclass
class Fixture:
    """A checkpoint: model_type and what its config says beyond COMMON; how it is stored."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    store: torch.dtype = torch.float32
    max_shard_size: str = "1GB"
    as_in_memory: bool = False  # stored as transformers 5 has it in memory: experts in one tensor, other names
    quantized: str = ""  # "mxfp4" or "fp8": the weights that are stored so, as in gpt-oss and DeepSeek-V3
    vision: dict[str, Any] = field(default_factory=dict)  # a vision-language model, and its config beside text_config
    store_vision: torch.dtype = torch.float32
    is_flat_in_v4: bool = False  # config_v4.json has the keys of text_config at the top level
    as_published: bool = False  # experts in one tensor are stored (E, in, out), and what sees of Gemma 3 has its older names
    packs: bool = True  # False: transformers joins packed documents (gpt-oss), or counts chunks from the row's start
    rope_by_length: bool = False  # the rotary table depends on the longest document: a document alone has another one


COMMON = dict(vocab_size=V, hidden_size=24, intermediate_size=38, num_hidden_layers=2, num_attention_heads=6,
              num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=1,
              eos_token_id=2, pad_token_id=None)  # fmt: skip
WIDE = dict(hidden_size=30, intermediate_size=44, head_dim=10)


def rope(kind: str, theta: float = 1e4, **keys: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **keys}}


LONGROPE = dict(short_factor=[1.0, 1.3], long_factor=[1.5, 6.0])  # r/2 = 2
PHI3 = dict(hidden_size=36, num_key_value_heads=3, pad_token_id=PAD)  # no head_dim: 6
PARTIAL = dict(partial_rotary_factor=0.7)  # r = int(0.7 * 6) = 4
BALANCE = dict(output_router_logits=True, router_aux_loss_coef=0.3)  # large enough to show in every gradient

GEMMA3 = dict(num_hidden_layers=3, head_dim=10, query_pre_attn_scalar=12, sliding_window=WINDOW, pad_token_id=PAD)
SIGLIP = dict(hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4,
              vision_use_head=False)  # fmt: skip
GEMMA3_VISION = dict(vision_config=SIGLIP, mm_tokens_per_image=1, image_token_index=IMAGE)
QWEN_TOWER = dict(depth=1, hidden_size=8, intermediate_size=12, num_heads=2, out_hidden_size=24, patch_size=4)
QWEN_TOKENS = dict(image_token_id=IMAGE, video_token_id=VIDEO)
QWEN2_VISION = dict(vision_config=dict(**QWEN_TOWER, fullatt_block_indexes=[0], window_size=16), **QWEN_TOKENS)
QWEN3_VISION = dict(vision_config=dict(**QWEN_TOWER, num_position_embeddings=16, deepstack_visual_indexes=[0]), **QWEN_TOKENS)

FIXTURES: dict[str, Fixture] = {
    "llama": Fixture("llama", dict(hidden_size=36, intermediate_size=52, pad_token_id=PAD)),
    "llama_sharded": Fixture("llama", dict(num_hidden_layers=3, head_dim=10), max_shard_size="30KB"),
    "llama_bf16": Fixture("llama", dict(head_dim=10), store=torch.bfloat16),
    "llama_f16": Fixture("llama", dict(head_dim=10, num_key_value_heads=1), store=torch.float16),
    "llama3_rope": Fixture("llama", {**WIDE, "max_position_embeddings": 400, **rope(
        "llama3", 1e4, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=100)}),
    "llama_linear": Fixture("llama", {"head_dim": 10, **rope("linear", factor=3.0)}),
    "llama_dynamic": Fixture("llama", {"head_dim": 10, "max_position_embeddings": 8, **rope("dynamic", factor=2.0)},
                             rope_by_length=True),
    "llama_yarn": Fixture("llama", {"head_dim": 10, "num_key_value_heads": 6, "max_position_embeddings": 2048, **rope(
        "yarn", factor=4.0, original_max_position_embeddings=512)}),
    "llama_biases": Fixture("llama", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=10,
                                          pad_token_id=PAD)),
    "mistral": Fixture("mistral", {**WIDE, "sliding_window": WINDOW, "num_key_value_heads": 3}),
    "qwen2": Fixture("qwen2", dict(num_hidden_layers=3, use_sliding_window=True, sliding_window=WINDOW,
                                   max_window_layers=1, **rope("default", 1e6))),
    "qwen2_tied_yarn": Fixture("qwen2", {"tie_word_embeddings": True, "hidden_size": 36, "num_key_value_heads": 1,
                                         "use_sliding_window": False, "max_position_embeddings": 2048, **rope(
        "yarn", 1e5, factor=2.0, original_max_position_embeddings=1024, attention_factor=1.25)}),
    "qwen3": Fixture("qwen3", {**WIDE, "attention_bias": True}),
    "smollm3": Fixture("smollm3", dict(num_hidden_layers=3, head_dim=10, no_rope_layer_interval=2, pad_token_id=PAD,
                                       use_sliding_window=True, sliding_window=WINDOW, tie_word_embeddings=True,
                                       **rope("default", 5e4))),
    "olmo2": Fixture("olmo2", dict(head_dim=10, num_key_value_heads=3, pad_token_id=PAD)),
    "phi3": Fixture("phi3", {**PHI3, "sliding_window": WINDOW, **rope("default", **PARTIAL)}),
    "phi3_longrope_long": Fixture("phi3", {**PHI3, "max_position_embeddings": 32, "sliding_window": None,
                                           "original_max_position_embeddings": 8, **rope("longrope", **LONGROPE, **PARTIAL)},
                                  rope_by_length=True),
    "phi3_longrope_short": Fixture("phi3", {**PHI3, "max_position_embeddings": 56, "sliding_window": None,
                                            "original_max_position_embeddings": 14, **rope("longrope", **LONGROPE, **PARTIAL)}),
    "gemma2": Fixture("gemma2", dict(num_hidden_layers=2, head_dim=10, query_pre_attn_scalar=12, sliding_window=WINDOW,
                                     attn_logit_softcapping=3.0, final_logit_softcapping=4.0, pad_token_id=PAD,
                                     tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh")),
    "gemma3_text": Fixture("gemma3_text", dict(
        num_hidden_layers=3, head_dim=10, query_pre_attn_scalar=12, sliding_window=WINDOW, pad_token_id=PAD,
        tie_word_embeddings=True, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}})),
    "mixtral": Fixture("mixtral", {**WIDE, **BALANCE, "intermediate_size": 18, "num_local_experts": 5, "num_experts_per_tok": 2,
                                   "sliding_window": WINDOW, "num_key_value_heads": 3}),
    "mixtral_fused": Fixture("mixtral", dict(head_dim=10, intermediate_size=18, num_local_experts=4, num_experts_per_tok=3),
                             as_in_memory=True),
    "qwen2_moe": Fixture("qwen2_moe", dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=14,
                                           shared_expert_intermediate_size=22, tie_word_embeddings=True)),
    "qwen3_moe": Fixture("qwen3_moe", {**WIDE, **BALANCE, "num_hidden_layers": 3, "num_experts": 12, "num_experts_per_tok": 3,
                                       "moe_intermediate_size": 14, "norm_topk_prob": True, "mlp_only_layers": [1],
                                       "attention_bias": True}),
    "qwen3_moe_unnormalised": Fixture("qwen3_moe", {
        "head_dim": 10, **BALANCE, "num_hidden_layers": 4, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 14,
        "norm_topk_prob": False, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": WINDOW}),
    "glm4_moe": Fixture("glm4_moe", dict(
        head_dim=12, num_hidden_layers=3, n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3,
        moe_intermediate_size=14, n_shared_experts=2, first_k_dense_replace=1, routed_scaling_factor=1.7, use_qk_norm=True,
        attention_bias=True, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})),
    "deepseek_v3": Fixture("deepseek_v3", dict(
        num_key_value_heads=6, num_hidden_layers=3, q_lora_rank=14, kv_lora_rank=10, qk_nope_head_dim=7, qk_rope_head_dim=4,
        v_head_dim=9, n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3, moe_intermediate_size=14,
        n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=2.5, attention_bias=True, max_position_embeddings=400,
        **rope("yarn", 1e4, factor=4.0, original_max_position_embeddings=100, mscale=1.0, mscale_all_dim=1.0))),
    "deepseek_v3_plain": Fixture("deepseek_v3", dict(
        num_key_value_heads=6, q_lora_rank=None, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10,
        n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=14, n_shared_experts=2,
        first_k_dense_replace=0, norm_topk_prob=False, rope_interleave=False, pad_token_id=PAD)),
    "deepseek_v3_fp8": Fixture("deepseek_v3", dict(
        num_key_value_heads=6, q_lora_rank=14, kv_lora_rank=150, qk_nope_head_dim=7, qk_rope_head_dim=4, v_head_dim=9, hidden_size=36,
        n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=14, n_shared_experts=1,
        first_k_dense_replace=1, intermediate_size=140), quantized="fp8"),
    "gpt_oss_mxfp4": Fixture("gpt_oss", dict(head_dim=10, hidden_size=64, num_local_experts=4, num_experts_per_tok=2,
                                             sliding_window=WINDOW, intermediate_size=32), quantized="mxfp4", packs=False),
    "gpt_oss": Fixture("gpt_oss", dict(head_dim=10, num_local_experts=6, num_experts_per_tok=2, sliding_window=WINDOW,
                                       intermediate_size=22, swiglu_limit=1.5, **BALANCE), packs=False),
    # Where eps is small nothing shows that it is wrong.
    "cohere2": Fixture("cohere2", dict(hidden_size=36, num_hidden_layers=3, sliding_window=WINDOW, sliding_window_pattern=2,
                                       logit_scale=0.375, layer_norm_eps=0.02, pad_token_id=PAD, tie_word_embeddings=True)),
    "cohere2_biases": Fixture("cohere2", dict(
        head_dim=10, num_key_value_heads=1, sliding_window=WINDOW, attention_bias=True, logit_scale=1.5,
        layer_types=["sliding_attention"] * 2,  # the gradient of k's bias is 0 where nothing rotates: all rounding
        **rope("linear", 5e4, factor=3.0))),
    "glm": Fixture("glm", dict(head_dim=10, pad_token_id=PAD, attention_bias=True, **rope("default", partial_rotary_factor=0.6))),
    "glm4": Fixture("glm4", dict(head_dim=12, num_key_value_heads=3, attention_bias=False)),
    "glm4_biases": Fixture("glm4", {**WIDE, "attention_bias": True, "pad_token_id": PAD, "max_position_embeddings": 400, **rope(
        "yarn", 1e4, factor=4.0, original_max_position_embeddings=100, partial_rotary_factor=0.8)}),
    "qwen3_chunked": Fixture("qwen3", dict(head_dim=10, attention_chunk_size=5, layer_types=["chunked_attention", "full_attention"]),
                             packs=False),
    "granite": Fixture("granite", dict(hidden_size=36, embedding_multiplier=6.0, residual_multiplier=0.3,
                                       attention_multiplier=0.2, logits_scaling=3.0, rms_norm_eps=0.05, pad_token_id=PAD)),
    "granite_biases": Fixture("granite", dict(head_dim=10, num_key_value_heads=3, attention_bias=True, mlp_bias=True,
                                              residual_multiplier=1.7, attention_multiplier=0.4, tie_word_embeddings=True)),
    "gemma3": Fixture("gemma3", {**GEMMA3, "tie_word_embeddings": True,
                                 "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}, vision=GEMMA3_VISION, store_vision=torch.float16,
        as_published=True),
    "gemma3_untied": Fixture("gemma3", GEMMA3, vision=GEMMA3_VISION, as_in_memory=True),
    "qwen2_5_vl": Fixture("qwen2_5_vl", rope("default", 1e6, mrope_section=[0, 1, 1]), vision=QWEN2_VISION,
                          store_vision=torch.bfloat16, is_flat_in_v4=True, max_shard_size="60KB"),
    "qwen2_vl": Fixture("qwen2_vl", {"tie_word_embeddings": True, "num_key_value_heads": 1, "max_position_embeddings": 400, **rope(
        "yarn", 1e5, factor=4.0, original_max_position_embeddings=100, mrope_section=[1, 0, 1])},
        vision=dict(vision_config=dict(depth=1, embed_dim=8, hidden_size=24, mlp_ratio=2, num_heads=2, patch_size=4), **QWEN_TOKENS),
        as_in_memory=True),
    "qwen3_vl": Fixture("qwen3_vl", dict(head_dim=10, num_key_value_heads=3, attention_bias=True, **rope(
        "default", 1e6, mrope_section=[2, 2, 1], mrope_interleaved=True)), vision=QWEN3_VISION),
    "qwen3_vl_moe": Fixture("qwen3_vl_moe", dict(
        head_dim=10, num_hidden_layers=3, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=14, mlp_only_layers=[1],
        **BALANCE, **rope("default", 1e6, mrope_section=[2, 2, 1])), vision=QWEN3_VISION, as_published=True),
}  # fmt: skip


def make_batch(rng: np.random.Generator, pad_id: int | None, num_tokens: int) -> Batch:
    """Documents of 1 token, of 2, one longer than the window and one without any target; some prefixes without loss.
    Where the model has a pad token, it also stands inside documents, as input and as target."""
    rows = []
    for lengths in DOCUMENT_TOKENS:
        documents = []
        for length in lengths:
            tokens = rng.integers(6, num_tokens, length).tolist()
            if length > 5 and pad_id is not None:
                tokens[2] = tokens[length - 2] = pad_id
            masked = {6: length, 13: 4, 8: 1}.get(length, 0)  # the first `masked` labels do not count
            documents.append((tokens, [-100] * masked + tokens[masked:]))
        rows.append(documents)
    return pack_rows(rows, ROW_TOKENS, 0 if pad_id is None else pad_id)


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Every parameter from (seed, its name): nothing is 0 or 1, so that a forgotten bias or norm weight shows."""
    for name, p in model.named_parameters():
        noise = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(tuple(p.shape))
        if name.endswith("sinks"):
            value = noise
        elif "norm" in name or (p.dim() == 1 and not name.endswith("bias")):
            value = 0.25 * noise + (0.0 if model.config.model_type.startswith("gemma") else 1.0)
        elif name.endswith("bias"):
            value = 0.2 * noise
        elif "embed" in name:
            value = 0.5 * noise
        else:
            fan_in = p.shape[1] if p.dim() == 2 or model.config.model_type == "gpt_oss" else p.shape[2]
            value = 1.3 / np.sqrt(fan_in) * noise
        p.data.copy_(torch.from_numpy(value))
    for name, b in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            noise = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(tuple(b.shape))
            b.copy_(torch.from_numpy(0.2 * noise))


def quantize_fp8(name: str, weight: torch.Tensor, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """A random fp8 weight; `weight` becomes what it stands for. Tiles of 128 x 128, as DeepSeek's own code has them."""
    rows, columns = weight.shape
    scale = torch.from_numpy(np.exp2(rng.uniform(-2, 0, (-(-rows // 128), -(-columns // 128)))).astype(np.float32)) / columns**0.5
    stored = torch.from_numpy(rng.standard_normal((rows, columns))).to(torch.float8_e4m3fn)
    of_element = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    weight.copy_(stored.float() * of_element)
    return {name: stored, f"{name}_scale_inv": scale}


def quantize_mxfp4(name: str, weight: torch.Tensor, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """The same of the experts (E, in, out), decoded by transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    experts, inputs, outputs = weight.shape
    blocks = torch.from_numpy(rng.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8))
    scales = torch.from_numpy(rng.integers(122, 126, (experts, outputs, inputs // 32), dtype=np.uint8))
    weight.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def quantize(model: torch.nn.Module, kind: str, seed: int) -> dict[str, torch.Tensor]:
    """What is stored instead of some weights of the model, which become what that stands for."""
    stored: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, p in model.named_parameters():
            rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
            if kind == "mxfp4" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                stored |= quantize_mxfp4(name, p, rng)
            elif kind == "fp8" and "_proj" in name and name.endswith("weight"):
                stored |= quantize_fp8(name, p, rng)
    return stored


def store_as_published(directory: Path) -> None:
    """transformers 5 opens it and would save it so, had it opened it so."""
    file, tensors = directory / "model.safetensors", {}
    with safe_open(file, framework="pt") as f:
        for name in f.keys():
            t = f.get_tensor(name)
            published = name.replace("vision_tower.", "vision_tower.vision_model.")
            tensors[published] = t.transpose(1, 2).contiguous() if ".mlp.experts." in name else t
    save_file(tensors, file, metadata={"format": "pt"})


def store_quantized(directory: Path, kind: str, stored: dict[str, torch.Tensor]) -> None:
    file = directory / "model.safetensors"
    with safe_open(file, framework="pt") as f:
        tensors = {name: f.get_tensor(name) for name in f.keys()}
    kept = {name: t for name, t in tensors.items() if f"{name}_blocks" not in stored and name not in stored}
    save_file(kept | stored, file, metadata={"format": "pt"})
    settings = {"mxfp4": {"quant_method": "mxfp4"}, "fp8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = settings[kind]
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def v4_layout(config: dict[str, Any], is_flat: bool) -> dict[str, Any]:
    """What transformers 4 would have written: theta beside rope_scaling, no rope_parameters, torch_dtype."""
    out = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    if "dtype" in config:
        out["torch_dtype"] = config["dtype"]
        out["transformers_version"] = "4.57.1"
    if "text_config" in config:
        out["text_config"] = v4_layout(config["text_config"], is_flat)
        return out.pop("text_config") | out if is_flat else out
    table = dict(config["rope_parameters"])
    if "full_attention" in table:  # Gemma 3: two tables
        out["rope_local_base_freq"] = table["sliding_attention"]["rope_theta"]
        table = dict(table["full_attention"])
    out["rope_theta"] = table.pop("rope_theta")
    if "partial_rotary_factor" in table:
        out["partial_rotary_factor"] = table.pop("partial_rotary_factor")
    if table["rope_type"] == "longrope":  # Phi-3 of version 4 takes exactly these keys
        table = {"type": "longrope", "short_factor": table["short_factor"], "long_factor": table["long_factor"]}
    if is_flat and table["rope_type"] == "default":  # as the first checkpoints of Qwen2-VL had it
        del table["rope_type"]
        table["type"] = "mrope"
    out["rope_scaling"] = None if table == {"rope_type": "default"} else table
    return out


def load(directory: Path, config_file: str, dtype: torch.dtype) -> torch.nn.Module:
    config = AutoConfig.from_pretrained(directory / config_file)
    model, info = model_class(config).from_pretrained(
        directory, config=config, dtype=dtype, output_loading_info=True, **eager(config))  # fmt: skip
    wrong = {key: value for key, value in info.items() if value}
    if wrong:
        die(f"{directory}: transformers reports {wrong}")
    return model.train()


def balance_loss(config: transformers.PretrainedConfig, router_logits: list[torch.Tensor]) -> torch.Tensor:
    """Times its coefficient. router_logits (tokens, E) of every layer that has experts, without padding."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    num_experts = getattr(config, "num_local_experts", None) or config.num_experts
    return config.router_aux_loss_coef * load_balancing_loss_func(tuple(router_logits), num_experts, config.num_experts_per_tok)


def compute(model: torch.nn.Module, batch: Batch, alone: bool) -> dict[str, torch.Tensor]:
    """loss, logits and gradients in the model's dtype."""
    model.zero_grad()
    routers, text = RouterLogits(model), model.config.get_text_config()
    with KeepFloat64(), routers:
        logits = (alone_logits if alone else packed_logits)(model, batch)
        loss = nll_sum(logits, batch) / batch.num_loss_tokens
        if getattr(text, "output_router_logits", False):
            is_token = None if alone else torch.from_numpy(batch.document_ids >= 0).flatten()
            loss = loss + balance_loss(text, routers.of_layers(is_token))
        loss.backward()
    valid = torch.from_numpy(batch.document_ids >= 0).unsqueeze(-1)
    out = {"loss": loss.detach().reshape(1), "logits": logits.detach() * valid}
    return out | {f"grad/{name}": p.grad.clone() for name, p in model.named_parameters() if not is_vision(name, model)}


class RouterLogits:
    """What the routers of a model give in its forwards, while this is a context."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.routers = [m for name, m in model.named_modules() if name.endswith((".mlp.gate", ".mlp.router"))]
        self.logits: list[list[torch.Tensor]] = [[] for _ in self.routers]
        self.hooks: list[Any] = []

    def __enter__(self) -> RouterLogits:
        def keep(seen: list[torch.Tensor]) -> Any:
            return lambda module, inputs, outputs: seen.append(outputs[0].reshape(-1, outputs[0].shape[-1]))

        self.hooks = [m.register_forward_hook(keep(seen)) for m, seen in zip(self.routers, self.logits)]
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self.hooks:
            hook.remove()

    def of_layers(self, is_token: torch.Tensor | None) -> list[torch.Tensor]:
        """(tokens, E) of each layer; those of one forward without its padding, or of one forward a document."""
        whole = [torch.cat(seen) for seen in self.logits]
        return whole if is_token is None else [logits[is_token] for logits in whole]


def decoder_names(tensors: dict[str, torch.Tensor], stored: set[str]) -> dict[str, torch.Tensor]:
    """Of a vision-language model: gradients by the names of the file, experts (E, in, out)."""
    prefix = next(p for p in ("language_model.model.", "model.language_model.", "model.") if f"{p}norm.weight" in stored)
    return {key.replace("grad/model.language_model.", f"grad/{prefix}"): value.transpose(1, 2) if ".mlp.experts." in key else value
            for key, value in tensors.items()}  # fmt: skip


def on_disk(tensors: dict[str, torch.Tensor], stored: set[str]) -> dict[str, torch.Tensor]:
    """Gradients by the names of the file: transformers 5 has all experts of a layer in one tensor."""
    out = {}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        layer, _, part = name.partition(".mlp.")
        if kind != "grad" or name in stored or not part:
            out[key] = value
        elif part == "gate.weight":
            out[f"grad/{layer}.block_sparse_moe.gate.weight"] = value
        else:
            experts = f"{layer}.mlp.experts" if f"{layer}.mlp.experts.0.down_proj.weight" in stored else f"{layer}.block_sparse_moe.experts"
            gate, up, down = ("gate_proj", "up_proj", "down_proj") if ".mlp." in experts else ("w1", "w3", "w2")
            for e, of_expert in enumerate(value):
                parts = zip((gate, up), of_expert.chunk(2)) if part == "experts.gate_up_proj" else [(down, of_expert)]
                out |= {f"grad/{experts}.{e}.{name}.weight": grad for name, grad in parts}
    wrong = {key[5:] for key in out if key.startswith("grad/")} ^ {name for name in stored if "e_score_correction" not in name}
    if wrong:
        die(f"gradients and tensors on disk are not the same: {sorted(wrong)}")
    return out


def check_equal(what: str, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float) -> float:
    worst = max(a, key=lambda name: relative_l2(a[name], b[name]))
    error = relative_l2(a[worst], b[worst])
    if not error <= tolerance:
        die(f"{what}: {worst} differs by {error:.2e}, more than {tolerance:g}")
    return error


def stored_names(directory: Path) -> set[str]:
    names: set[str] = set()
    for file in directory.glob("model*.safetensors"):
        with safe_open(file, framework="pt") as f:
            names |= set(f.keys())
    return names


def make_fixture(name: str, fixture: Fixture, out: Path, seed: int) -> str:
    torch.manual_seed(seed)
    settings = {**COMMON, **fixture.config}
    directory = out / name
    shutil.rmtree(directory, ignore_errors=True)
    if fixture.vision:
        around = {**fixture.vision, "tie_word_embeddings": settings["tie_word_embeddings"]}
        config = AutoConfig.for_model(fixture.model_type, text_config=settings, **around)
    else:
        config = AutoConfig.for_model(fixture.model_type, **settings)
    model = model_class(config).from_config(config)
    randomise(model, seed)
    stored = quantize(model, fixture.quantized, seed)
    how = {"save_original_format": False} if fixture.as_in_memory else {}
    model.to(fixture.store)
    for parameter, p in model.named_parameters():
        if is_vision(parameter, model):
            p.data = p.data.to(fixture.store_vision)
    model.save_pretrained(directory, max_shard_size=fixture.max_shard_size, **how)
    if fixture.as_published:
        store_as_published(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    saved = json.loads((directory / "config.json").read_text())
    (directory / "config_v4.json").write_text(json.dumps(v4_layout(saved, fixture.is_flat_in_v4), indent=2) + "\n")

    batch = make_batch(np.random.default_rng(seed), settings["pad_token_id"], IMAGE if fixture.vision else V)
    alone = not fixture.rope_by_length
    exact = compute(load(directory, "config.json", torch.float32).double(), batch, alone)
    packs = fixture.packs or fixture.rope_by_length
    from_v4 = compute(load(directory, "config_v4.json", torch.float32).double(), batch, alone=not packs)
    fp32 = compute(load(directory, "config.json", torch.float32), batch, alone=not packs)
    if packs:
        packed = compute(load(directory, "config.json", torch.float32).double(), batch, alone=False)
        check_equal(f"{name}: documents alone and packed", packed, exact, 1e-12)
    check_equal(f"{name}: config_v4.json", from_v4, exact, 1e-12)
    error = check_equal(f"{name}: float32", fp32, exact, 2e-5)

    versions = f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"
    metadata = {"made_by": f"scripts/make_fixtures.py --seed {seed}; {versions}"}  # one key: their order is not fixed
    names = stored_names(directory)
    if fixture.vision:
        names = {name for name in names if "visual" not in name and "vision_tower" not in name and "multi_modal" not in name}
        exact = decoder_names(exact, names)
    exact = on_disk(exact, names)
    if stored:
        store_quantized(directory, fixture.quantized, stored)
    write_dump(directory / "expected.safetensors", exact | batch.tensors(), metadata)
    size = sum(f.stat().st_size for f in directory.iterdir())
    parameters = sum(p.numel() for p in model.parameters())
    return f"| {name} | {fixture.model_type} | {parameters} | {size / 1024:.0f} | {exact['loss'].item():.6f} | {error:.0e} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("test/fixtures"), help="default: %(default)s")
    parser.add_argument("--only", nargs="*", metavar="NAME", help=f"some of: {', '.join(FIXTURES)}")
    parser.add_argument("--seed", type=int, default=20250, help="default: %(default)s")
    args = parser.parse_args()
    unknown = set(args.only or ()) - set(FIXTURES)
    if unknown:
        die(f"--only {unknown.pop()}: no such fixture; there are {', '.join(FIXTURES)}")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.use_deterministic_algorithms(True)
    print("| fixture | model_type | parameters | KiB | loss | float32 transformers differs by, at most |\n|---|---|---|---|---|---|")
    for name in args.only or FIXTURES:
        print(make_fixture(name, FIXTURES[name], args.out, args.seed), flush=True)


if __name__ == "__main__":
    main()
