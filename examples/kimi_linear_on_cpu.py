"""A small Kimi-Linear of transformers on the CPU, with and without kda.

    pip install '.[hf]'
    python examples/kimi_linear_on_cpu.py [--tokens 64] [--prompt 256] [--weights q8g]

Builds the model from a config with random weights (nothing is downloaded), generates token ids greedily from a random
prompt before and after kda.adapters.hf.accelerate, and prints whether they are the same and both times.
"""

import argparse
import time

import torch
from transformers import KimiLinearConfig, KimiLinearForCausalLM

from kda.adapters import hf


def model_of(layers: int) -> KimiLinearForCausalLM:
    """Kimi-Linear's KDA heads (128 channels) in a model of some 25 million parameters."""
    torch.manual_seed(0)
    config = KimiLinearConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1024, moe_intermediate_size=256, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=128, qk_rope_head_dim=32, qk_nope_head_dim=64,
        v_head_dim=64, num_local_experts=4, num_experts_per_tok=2, linear_num_heads=8, pad_token_id=0, bos_token_id=1,
        eos_token_id=None, initializer_range=0.08)
    return KimiLinearForCausalLM(config).eval()


def generate(model: KimiLinearForCausalLM, prompt: torch.Tensor, tokens: int) -> tuple[torch.Tensor, float, float]:
    """Token ids, and seconds for the prompt alone and for all."""
    start = time.perf_counter()
    model.generate(prompt, max_new_tokens=1, do_sample=False)
    first = time.perf_counter() - start
    start = time.perf_counter()
    ids = model.generate(prompt, max_new_tokens=tokens, do_sample=False)[:, prompt.shape[1]:]
    return ids, first, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--layers", type=int, default=5, help="layers, of which every fourth is full attention")
    parser.add_argument("--weights", choices=["q8g", "q4g"], help="quantise the KDA layers (then ids may differ)")
    options = parser.parse_args()

    model = model_of(options.layers)
    prompt = torch.randint(2, 1024, (1, options.prompt), generator=torch.Generator().manual_seed(1))
    before, *seconds_before = generate(model, prompt, options.tokens)
    print(hf.accelerate(model, options.weights))
    after, *seconds_after = generate(model, prompt, options.tokens)

    print("ids:", " ".join(map(str, after[0, :12].tolist())), "...")
    print(f"the same {options.tokens} ids: {torch.equal(before, after)}")
    for what, old, new in zip(("prompt and one token", "prompt and all tokens"), seconds_before, seconds_after,
                              strict=True):
        print(f"{what}: {old:.2f} s before, {new:.2f} s after, {old / new:.1f} times as fast")


if __name__ == "__main__":
    main()
