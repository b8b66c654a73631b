"""A tiny random Llama and its tiny tokenizer, of sizes that FSDP and ZeRO have to pad: base.py OUT [--tied] [--bf16]."""

import argparse
import random
from pathlib import Path

import torch
from common import VOCABULARY
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = """the of and to in is it you that he was for on are with as his they be at one have this from or had by hot but
some what there we can out other were all your when up use word how said an each she which do their time if will way about
many then them would write like so these her long make thing see him two has look more day could go come did my sound""".split()  # noqa: SIM905


def corpus() -> list[str]:
    """Return 40 lines of common words, always the same."""
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=12)) for _ in range(40)]


def tokenizer(lines: list[str]) -> PreTrainedTokenizerFast:
    """Train a BPE over the letters of the corpus only: no alphabet of 256 bytes, a file of 4 KB."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    bpe.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    wrapped.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    return wrapped


def model(*, tied: bool) -> LlamaForCausalLM:
    """Return odd vocabulary, odd intermediate size, two heads of 10 over one key-value head."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=20,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=10,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    """Write the model, the tokenizer and the corpus to OUT."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    made = model(tied=options.tied)
    if options.bf16:
        made = made.to(torch.bfloat16)
    lines = corpus()
    made.save_pretrained(options.out)
    tokenizer(lines).save_pretrained(options.out)
    (options.out / "corpus.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
