"""Write ../architectures.json: configurations as save_pretrained writes them, and the tensors that transformers makes of each."""

import json
from pathlib import Path

import torch
import transformers

CLASSES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Granite", "SmolLM3")
SIZES = {
    "vocab_size": 71,
    "hidden_size": 20,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPTIONS = (
    {"head_dim": 6, "tie_word_embeddings": False},
    {"head_dim": 8, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_hidden_layers": 1},
)
SHARING = {"hidden_size": 24, "num_hidden_layers": 1}  # for the classes that can do without head_dim
SHARES = ("Llama", "Mistral", "Qwen2", "Granite", "SmolLM3")


def described(name: str, options: dict[str, object]) -> dict[str, object]:
    """Return one configuration, and the names and shapes of its model's state dict."""
    kind = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    config = kind(**{**SIZES, **options})
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    config.architectures = [type(model).__name__]
    shapes = {key: list(value.shape) for key, value in model.state_dict().items()}
    return {"config": json.loads(config.to_json_string()), "shapes": shapes}


def main() -> None:
    """Write every class with every set of options that it can have."""
    found = [described(name, options) for name in CLASSES for options in (*OPTIONS, *([SHARING] if name in SHARES else []))]
    path = Path(__file__).resolve().parent.parent / "architectures.json"
    path.write_text("[\n" + ",\n".join(json.dumps(one, separators=(",", ":")) for one in found) + "\n]\n")
    print(f"{len(found)} configurations, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
