"""Isolation of requests and models: sampling in a batch, and all EOS ids of the model."""

import json
import shutil

from kvboost_edge import CPUPagedEngine, SamplingParams

OPTIONS = {"num_blocks": 64, "dtype": "float32", "num_threads": 1}


def test_each_prompt_of_a_batch_has_its_own_sampling(tiny_engine):
    prompts = ["Hello there", "Hello", "Another"]
    sampling = [
        SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1.5, seed=1, max_new_tokens=8, ignore_eos=True),
        SamplingParams(temperature=0.7, top_k=5, seed=2, max_new_tokens=10, ignore_eos=True),
    ]
    alone = [
        tiny_engine.generate(prompt, sampling=s)
        for prompt, s in zip(prompts, sampling, strict=True)
    ]
    for batch in (tiny_engine.generate_batch, tiny_engine.generate_many):
        together = batch(prompts, sampling=sampling)
        assert [r.output_token_ids for r in together] == [r.output_token_ids for r in alone]


def test_every_eos_id_of_the_generation_config_ends_the_output(tiny_model_dir, tmp_path):
    with CPUPagedEngine.from_pretrained(tiny_model_dir, **OPTIONS) as engine:
        free = engine.generate("Hello", max_new_tokens=8, ignore_eos=True).output_token_ids
        own_eos = engine.tokenizer.eos_token_id
    directory = tmp_path / "two-eos"
    shutil.copytree(tiny_model_dir, directory)
    for extra in (free[2], free[5]):
        ids = sorted({own_eos, extra})
        settings = json.dumps({"eos_token_id": ids})
        (directory / "generation_config.json").write_text(settings, encoding="utf-8")
        with CPUPagedEngine.from_pretrained(directory, **OPTIONS) as engine:
            result = engine.generate("Hello", max_new_tokens=8)
        assert result.finish_reason == "stop"
        assert result.output_token_ids == free[: free.index(extra) + 1]
