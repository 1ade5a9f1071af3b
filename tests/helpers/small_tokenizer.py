"""A tokenizer.json of some hundred tokens, learnt in a moment, and templates of conversations."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|header|>", "<|eot|>", "<start>", "<end>"
)  # fmt: skip

TEXT = """
The ring passes keys from rank to rank, and each rank keeps its queries.  A bucket of gradients is
reduced while backward goes on.  What a rank holds, the plan shows; what it sends, the plan counts.
"""

_TURN = "{% generation %}{{ m.content }}<END>{% endgeneration %}"

MARKED = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\n' }}{% if m.role == 'assistant' %}"
    + _TURN.replace("<END>", "<|im_end|>")
    + "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}",
    "headers": "{{ bos_token }}{% for m in messages %}<|header|>{{ m.role }}<|header|>{{ '\n\n' }}"
    "{% if m.role == 'assistant' %}"
    + _TURN.replace("<END>", "<|eot|>")
    + "{% else %}{{ m.content | trim }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|header|>{{ '\n\n' }}{% endif %}",
    "brackets": "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    + _TURN.replace("<END>", "</s>")
    + "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}",
    "turns": "{{ bos_token }}{% for m in messages %}"
    "<start>{{ 'model' if m.role == 'assistant' else m.role }}{{ '\n' }}"
    "{% if m.role == 'assistant' %}"
    + _TURN.replace("<END>", "<end>")
    + "{% else %}{{ m.content }}<end>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<start>model{{ '\n' }}{% endif %}",
    "plain": "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}"
    + _TURN.replace("<END>", "")
    + "{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
}
"""Templates of the forms that models have, with what the assistant says marked."""


def unmarked(template: str) -> str:
    """A template without its marks."""
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def write_tokenizer(folder: Path, template: str = "") -> Path:
    """A model's folder with a tokenizer of bytes and some words, and this template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
