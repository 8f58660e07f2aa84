"""Hugging Face models that we did not write: tiny, from random configs, without downloads.

The package is imported when the first model is made: other tests do not pay for the import.
"""

import importlib
import os
from collections.abc import Callable
from types import ModuleType

import torch
from torch import nn

VOCAB = 61
CAUSAL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 52,  # grouped products need rows of a multiple of 16 bytes
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

PLUGIN = {
    "auto_wrap_policy": "transformer_based_wrap",
    "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"],
    "cpu_ram_efficient_loading": False,
}
"""Arguments of Accelerate's plugin for the Llama, for either API."""


def transformers() -> ModuleType:
    """Import and return the package, with its network switched off."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    return importlib.import_module("transformers")


def _llama() -> nn.Module:
    hf = transformers()
    return hf.LlamaForCausalLM(hf.LlamaConfig(**CAUSAL))


def _checkpointed_llama() -> nn.Module:
    model = _llama()
    model.activation_checkpointing_enable()  # wraps each block's __call__: its hooks run again in backward
    return model


def _gpt2() -> nn.Module:
    hf = transformers()
    sizes = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    tokens = {name: CAUSAL[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **tokens, **dropouts))


def _mixtral() -> nn.Module:
    hf = transformers()
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "output_router_logits": True}
    return hf.MixtralForCausalLM(hf.MixtralConfig(**CAUSAL, **experts))


def _t5() -> nn.Module:
    hf = transformers()
    sizes = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 50, "num_layers": 2, "num_heads": 4}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


def _switch() -> nn.Module:
    hf = transformers()
    sizes = {
        "vocab_size": VOCAB,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 50,
        "num_layers": 2,
        "num_heads": 4,
        "num_decoder_layers": 2,
    }
    experts = {
        "num_experts": 2,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "router_jitter_noise": 0.0,
    }
    config = hf.SwitchTransformersConfig(**sizes, **experts, dropout_rate=0.0, decoder_start_token_id=0)
    return hf.SwitchTransformersForConditionalGeneration(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama": _llama,
    "Llama, checkpointed": _checkpointed_llama,
    "GPT-2": _gpt2,  # head tied to the embedding
    "Mixtral": _mixtral,  # experts stacked in one parameter
    "T5": _t5,  # encoder and decoder; three modules share the embedding; blocks pass on the position bias
    "Switch": _switch,  # T5 with experts, each its own module
}


def load() -> None:
    """Import what the models need, in a process that forks ranks: else each of them does, for seconds."""
    importlib.import_module("peft")
    with torch.random.fork_rng(), torch.device("meta"):
        for build in MODELS.values():
            build()


def make(name: str, seed: int = 0) -> nn.Module:
    """Return a model in training mode, the same on every rank."""
    torch.manual_seed(seed)
    return MODELS[name]().train()


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers that a user would wrap, in order: those that the package says must not be split."""
    return [module for module in model.modules() if type(module).__name__ in model._no_split_modules]


def shard(model: nn.Module, fully_shard: Callable[..., object], **options: object) -> nn.Module:
    """Make every block a unit, and the rest of the model another."""
    for block in blocks(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def batch(rank: int, step: int, size: int = 2, length: int = 12) -> torch.Tensor:
    """Return tokens [B, T] without padding, different for every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(3, VOCAB, (size, length), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the model's own loss; an encoder-decoder has to reverse the tokens."""
    labels = tokens.flip(1) if model.config.is_encoder_decoder else tokens
    return model(input_ids=tokens, labels=labels).loss
