"""Tokenizer, model directory and evaluation of the demo model, for train_demo_model.py."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import demo_corpus as corpus

# Function that returns the token ids and loss weights of a text given in pieces.
Encode = Callable[[list[corpus.Piece]], tuple[list[int], list[float]]]

VOCABULARY = 1664
_SETTINGS = (
    "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim hidden_act vocab_size max_position_embeddings rms_norm_eps "
    "rope_parameters tie_word_embeddings attention_bias mlp_bias initializer_range bos_token_id "
    "eos_token_id pad_token_id transformers_version"
).split()
_SPLIT = r" ?\p{L}+| ?\p{N}{1,2}|\n+| ?[^\s\p{L}\p{N}]+|[^\S\n]+"


def train_tokenizer(seed: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer on the generated corpus, with the full byte alphabet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=corpus.SPECIAL_TOKENS,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus.corpus_for_tokenizer(seed), trainer)
    bos = tokenizer.token_to_id(corpus.BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{corpus.BOS} $A",
        pair=f"{corpus.BOS} $A $B",
        special_tokens=[(corpus.BOS, bos)],
    )
    return tokenizer


def load_or_train_tokenizer(folder: Path, seed: int) -> Tokenizer:
    """Return the work directory's tokenizer; train it on first use."""
    path = folder / "tokenizer.json"
    if not path.exists():
        train_tokenizer(seed).save(str(path))
    return Tokenizer.from_file(str(path))


def check_pieces(tokenizer: Tokenizer, encode: Encode, seed: int) -> None:
    """Raise ValueError unless pieces encoded one by one equal the encoded text."""
    rng = random.Random(f"{seed} check")
    for count in (4, 32, 128) * 4:
        pieces = corpus.text_pieces(rng, corpus.make_sample(rng, count, 8))
        text = corpus.join(pieces)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if ids != encode(pieces)[0] or tokenizer.decode(ids, skip_special_tokens=False) != text:
            raise ValueError("a piece does not start at a pre-token border")
    print(f"128 facts and 8 questions: {len(ids)} tokens", flush=True)


CHAT_TEMPLATE = (
    "{{ bos_token }}{%- for message in messages -%}{%- if message.role in ('system', 'developer') "
    "-%}{{ '<|system|>\\n' }}{%- elif message.role == 'assistant' -%}{{ '<|assistant|>\\n' }}{%- "
    "else -%}{{ '<|user|>\\n' }}{%- endif -%}{%- if message.content is string -%}{{ "
    "message.content }}{%- elif message.content -%}{%- for part in message.content -%}{%- if "
    "part.text is defined -%}{{ part.text }}{%- endif -%}{%- endfor -%}{%- endif -%}{{ "
    "'<|end|>\\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- "
    "endif -%}"
)
CARD = """# Demo model

This is a Llama-family model of {parameters:,} parameters. It answers questions about facts in the
documents in its prompt, and does nothing else. It knows nothing about the real world, because all
people, places and things in its training data are invented.

- 6 layers of width 256, tied embeddings, float16 weights
- RoPE and grouped-query attention, with 4 query heads and 2 key-value heads of 64
- byte-level BPE with {vocabulary} tokens, and a context of {context} tokens

It exists so that the demo, the tests and the examples work without a network. Do not use it for
anything else.

## Training

The training text consists only of generated documents, questions and answers. All names are
invented at random, and no text of other authors was used. `training/demo_corpus.py` defines the
text, and `training/train_demo_model.py` generates it and trains the model:

    python training/train_demo_model.py --work-dir demo_train --seed {seed}
    python training/train_demo_model.py --work-dir demo_train --seed {seed} \\
        --export kvboost_edge/assets/demo
    python training/train_demo_model.py --seed {seed} --eval-only kvboost_edge/assets/demo

Training used seed {seed} and {step} steps of at most {tokens:,} tokens.
It took {minutes:.0f} minutes on 2 CPU cores.
The run was started and resumed with these options:

{runs}

The first two layers are initialized as an induction circuit (`training/demo_init.py`). All layers
are trained.

## Accuracy

The test uses new documents. Its questions are about combinations of subject and attribute that did
not occur in training, because a hash holds out one in {share}.
Decoding is greedy. An answer is right if its whole text and its end are exactly as expected.

{figures}

## Limits

- It answers in English, in the form of its training answers. It does not follow instructions, and
  it was not trained to write JSON, to call tools or to compute embeddings.
- Questions must ask for an attribute of a subject, as in `demo_corpus.py`. To other questions it
  gives a wrong answer in the same form. It cannot say that a fact is missing.
- Accuracy falls with the number of facts. Texts of more than 128 facts were not tested.
- The context ends at {context} tokens. Words outside the training text take many tokens.
- It has no safety training. Its output repeats the text that it is given.

## Licence

The model, its tokenizer and the demo document are under the MIT License, like kvboost_edge.

## Prompt format

Put the documents in the system message or before the first question. Further questions may follow
as turns.

    <|bos|><|user|>
    Doc 17.
    The job of Mira Dolen is baker. The pet of Mira Dolen is owl. The drink of Sarik Tonar is tea.

    Doc 4.
    The mayor of Lake Brelo is Stenda. The crop of Lake Brelo is rice.

    What is the crop of Lake Brelo?<|end|>
    <|assistant|>
    The crop of Lake Brelo is rice.<|end|>

Each document ends with an empty line, so its tokens are the same in any order. Without chat markup,
write the documents, then `Question: What is the crop of Lake Brelo?`, and `Answer:` on the next
line.
"""


def export(
    folder: Path,
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    progress: dict[str, Any],
    options: argparse.Namespace,
) -> None:
    """Write a Hugging Face model directory with float16 weights, evaluate it and write its card."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        key: value.to(torch.float16).contiguous()
        for key, value in model.state_dict().items()
        if key != "lm_head.weight"
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = model.config.to_dict()
    _write(
        folder / "config.json",
        {key: settings[key] for key in _SETTINGS}
        | {
            "architectures": ["LlamaForCausalLM"],
            "dtype": "float16",
            "torch_dtype": "float16",
            "rope_theta": settings["rope_parameters"]["rope_theta"],
        },
    )
    ids = {name: tokenizer.token_to_id(getattr(corpus, name)) for name in ("PAD", "BOS", "END")}
    _write(
        folder / "generation_config.json",
        {
            "bos_token_id": ids["BOS"],
            "eos_token_id": [ids["END"]],
            "pad_token_id": ids["PAD"],
            "do_sample": False,
            "max_new_tokens": 64,
        },
    )
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": corpus.BOS,
            "eos_token": corpus.END,
            "pad_token": corpus.PAD,
            "model_max_length": model.config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    figures = evaluate(folder, options.questions, options.seed)
    (folder / "README.md").write_text(
        CARD.format(
            parameters=sum(tensor.numel() for tensor in state.values()),
            vocabulary=tokenizer.get_vocab_size(),
            context=model.config.max_position_embeddings,
            seed=options.seed,
            runs="\n".join(f"- {line}" for line in progress["runs"]),
            step=progress["step"],
            tokens=options.tokens,
            minutes=progress["seconds"] / 60,
            share=corpus.HELD_OUT_SHARE,
            figures=figures,
        )
    )


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def evaluate(folder: Path, questions: int, seed: int) -> str:
    """Print and return a Markdown table of a model directory's greedy exact-match accuracy."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    lines = [
        "| facts in the text | questions | right | accuracy |",
        "| ---: | ---: | ---: | ---: |",
    ]
    for facts in (16, 64, 128):
        started = time.perf_counter()
        seeds = [f"{seed} test {facts} {index}" for index in range(questions)]
        right = sum(_answers_right(model, tokenizer, facts, one) for one in seeds)
        lines.append(f"| {facts} | {questions} | {right} | {right / questions:.1%} |")
        print(
            f"{facts} facts: {right} of {questions} right, {right / questions:.1%} "
            f"({time.perf_counter() - started:.0f} s)",
            flush=True,
        )
    return "\n".join(lines)


def _answers_right(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, facts: int, seed: str
) -> bool:
    """Return whether the greedy reply to one held-out question, in the chat template, is exact."""
    messages, wanted_text = corpus.held_out_question(facts, seed)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    wanted = tokenizer.encode(wanted_text, add_special_tokens=False)
    with torch.no_grad():
        reply = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=len(wanted),
            do_sample=False,
        )[0, ids.shape[1] :]
    return bool(reply.tolist() == wanted)
