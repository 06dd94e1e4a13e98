"""Reuse on a trained model against transformers: keys rotated to their new positions by hand,
unchanged values, and the same tokens computed between them.

The bundled model answers correctly even with keys that were not rotated, so the test compares its
logits, not its answers.
"""

import dataclasses
import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import kvboost_edge
from helpers.distance import distance
from helpers.pairwise import each_once, pairwise
from kvboost_edge import CPUPagedEngine, SamplingParams
from kvboost_edge.config import GenerationMode, RecomputeStrategy
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.reuse.deviation_scoring import NUM_QUERY_TOKENS
from kvboost_edge.reuse.recompute import Repair
from kvboost_edge.reuse.span_search import prepare_search

pytestmark = pytest.mark.usefixtures("one_torch_thread")

BLOCK = 16
BARE = Repair(strategy=RecomputeStrategy.NONE)
SEAMS = Repair(strategy=RecomputeStrategy.SELECTIVE, overlap=16)
BLOCKS = Repair(overlap=0, ratio=0.25)
BLEND = Repair()
QUERY = Repair(strategy=RecomputeStrategy.QUERY, overlap=0, ratio=0.25)
QUERY_SEAMS = Repair(strategy=RecomputeStrategy.QUERY)
NUM_ROWS = 8


class Oracle:
    """The bundled model in transformers, float32, one attention layer after another."""

    def __init__(self):
        directory = f"{kvboost_edge.__path__[0]}/assets/demo"
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def run(self, ids, cache, **options):
        """Run the model on the tokens after those in the cache, and add theirs to it."""
        start = cache.get_seq_length()
        positions = torch.arange(start, start + len(ids))[None]
        return self.model(
            torch.tensor([list(ids)]), past_key_values=cache, position_ids=positions, **options
        )

    def kv(self, ids):
        """Return keys and values of each layer, [1, kv heads, len(ids), head_dim]."""
        cache = DynamicCache(config=self.model.config)
        self.run(ids, cache)
        return [(layer.keys, layer.values) for layer in cache.layers]

    @torch.inference_mode()
    def turned(self, keys, delta):
        """Rotate keys to positions that are `delta` higher."""
        cos, sin = self.model.model.rotary_emb(keys, torch.tensor([[delta]]))
        first, second = keys.chunk(2, dim=-1)
        return keys * cos + torch.cat((-second, first), dim=-1) * sin

    def logits(self, ids, served, spans):
        """Return logits of the last NUM_ROWS tokens, with the spans' keys and values from their
        original positions.
        """
        return self._after_spans(ids, served, spans).logits[0, -NUM_ROWS:].numpy()

    def masses(self, ids, served, spans, layer):
        """Return the attention that the last tokens of a prompt pay to each token [len(ids)] in a
        layer, over all heads.
        """
        found = self._after_spans(ids, served, spans, output_attentions=True)
        return found.attentions[layer][0, :, -NUM_QUERY_TOKENS:].sum((0, 1)).numpy()

    def _after_spans(self, ids, served, spans, **options):
        """Run the model on the tokens after the last span."""
        stored = self.kv(served)
        cache = DynamicCache(config=self.model.config)
        position = 0
        for span in spans:
            if span.start > position:
                self.run(ids[position : span.start], cache)
            source = slice(span.start - span.delta, span.stop - span.delta)
            assert list(served[source]) == list(ids[span.start : span.stop])
            for layer, (keys, values) in enumerate(stored):
                cache.update(
                    self.turned(keys[:, :, source], span.delta), values[:, :, source], layer
                )
            position = span.stop
        return self.run(ids[position:], cache, **options)


@pytest.fixture(scope="module")
def oracle():
    return Oracle()


RUNNERS = {
    "native": {"weights": "f32"},
    "torch": {"runner": "torch", "backend": "torch", "dtype": "float32", "num_threads": 1},
}


@pytest.fixture(scope="module", params=RUNNERS)
def engine(request):
    with CPUPagedEngine.from_pretrained(
        "kvboost-edge/demo", num_blocks=128, **RUNNERS[request.param]
    ) as made:
        assert made.runner_info.name == request.param
        prepare_search()
        yield made


class Seen:
    """Spans that a request with reuse shared, and the logits of its last tokens."""

    def __init__(self, engine, ids, repair, patch):
        self.placed = ()
        self.spans = ()
        spans = engine._parts.manager.spans
        place = spans.place
        cut = spans.cut

        def placing(table, given, *args, **options):
            self.placed = self.spans = tuple(given)
            return bool(place(table, given, *args, **options))

        def cutting(table, given):
            self.spans = tuple(given)
            cut(table, given)

        patch.setattr(spans, "place", placing)
        patch.setattr(spans, "cut", cutting)
        request = engine._builder.make(
            ids, Terms(), SamplingParams(), logits_start=len(ids) - NUM_ROWS
        )
        terms = dataclasses.replace(request.terms, mode=GenerationMode.CHUNK_KV_REUSE)
        request = dataclasses.replace(request, terms=terms, repair=repair)
        handle, rows = engine._core.submit_logits(request)
        self.result = handle.result()
        self.logits = np.concatenate(rows)

    @property
    def chosen(self):
        """Starts of the blocks that were cut out of the spans."""
        kept = {position for span in self.spans for position in range(span.start, span.stop)}
        placed = [
            position for span in self.placed for position in range(span.start, span.stop, BLOCK)
        ]
        return {position for position in placed if position not in kept}


def document(engine, number, count):
    """Encode facts from words of the model, some 10 tokens each."""
    rng = random.Random(number)
    names = ("Mira Dolen", "Lake Brelo", "Sarik Tonar", "Fort Puna")
    values = ("baker", "owl", "tea", "rice", "steel")
    facts = [
        f"The {rng.choice(('job', 'pet', 'crop', 'code'))} of {rng.choice(names)} is "
        f"{rng.choice(values)}."
        for _ in range(count)
    ]
    return engine.tokenizer.encode(
        f"Doc {number}.\n{' '.join(facts)}\n\n", add_special_tokens=False
    )


def prompts(engine):
    """Return the prompt that is served first, and the one with reuse: one document moved to the
    front, a new one, two moved back.
    """
    encode = engine.tokenizer.encode
    head = encode("<|bos|><|system|>\nRead the documents and answer.<|end|>\n<|user|>\n", False)
    one, two, three = (document(engine, 20 + number, 8 + number) for number in range(3))
    question = encode("What is the pet of Mira Dolen?<|end|>\n<|assistant|>\n", False)
    return head + one + two + three + question, head + three + document(
        engine, 9, 2
    ) + one + two + question


def asked(engine, repair, patch):
    """Serve a prompt with an empty cache, then request another with reuse. Return both, and the
    spans that were shared.
    """
    served, ids = prompts(engine)
    engine.reset_cache()
    engine.generate(served, max_new_tokens=0)
    return served, ids, Seen(engine, ids, repair, patch)


@pytest.mark.parametrize(
    "repair",
    [BARE, SEAMS, BLOCKS, BLEND, QUERY],
    ids=lambda repair: f"{repair.strategy}-{repair.overlap}",
)
@pytest.mark.some(3)
def test_logits_equal_the_reference_with_rotated_keys(engine, oracle, repair, monkeypatch):
    served, ids, seen = asked(engine, repair, monkeypatch)
    assert min(span.delta for span in seen.spans) < 0 < max(span.delta for span in seen.spans)
    expected = oracle.logits(ids, served, seen.spans)
    assert distance(expected, oracle.logits(ids, served, ())) > 0.01, (
        "the shared spans do not change the logits: the test shows nothing"
    )
    assert distance(seen.logits, expected) < 1e-4


@pytest.mark.parametrize(("runner", "repair"), each_once(RUNNERS, [BARE, BLEND, QUERY]), ids=str)
def test_rotated_8_bit_keys_have_the_stored_precision(runner, repair, oracle, monkeypatch):
    options = {**RUNNERS[runner], "kv_cache_bits": 8, "debug_checks": True}
    with CPUPagedEngine.from_pretrained("kvboost-edge/demo", num_blocks=128, **options) as made:
        prepare_search()
        served, ids = prompts(made)
        made.generate(served, max_new_tokens=0)
        seen = Seen(made, ids, repair, monkeypatch)
    expected = oracle.logits(ids, served, seen.spans)
    assert distance(expected, oracle.logits(ids, served, ())) > 0.02
    assert 1e-4 < distance(seen.logits, expected) < 0.01


@pytest.mark.parametrize("repair", [BLOCKS, BLEND], ids=["blocks", "default"])
@pytest.mark.some(2)
def test_cacheblend_recomputes_the_blocks_with_the_largest_value_deviation(
    engine, oracle, repair, monkeypatch
):
    served, ids, seen = asked(engine, repair, monkeypatch)
    true = oracle.kv(ids)[1][1]
    stored = oracle.kv(served)[1][1]
    deviations = {}
    for span in seen.placed:
        for start in range(span.start, span.stop - BLOCK + 1, BLOCK):
            there = stored[:, :, start - span.delta : start - span.delta + BLOCK]
            deviations[start] = float((true[:, :, start : start + BLOCK] - there).square().sum())
    ranked = sorted(deviations, key=deviations.__getitem__, reverse=True)
    count = len(seen.chosen)
    assert count == round(repair.ratio * len(deviations))
    assert seen.chosen == set(ranked[:count])


@pytest.mark.parametrize("repair", [QUERY, QUERY_SEAMS], ids=["blocks", "after seams"])
@pytest.mark.some(2)
def test_query_recompute_chooses_the_most_attended_blocks(engine, oracle, repair, monkeypatch):
    served, ids, seen = asked(engine, repair, monkeypatch)
    prompt = ids[: len(ids) - NUM_ROWS + 1]  # the rest serves as its answer
    masses = oracle.masses(
        prompt, served, seen.placed, 2 * oracle.model.config.num_hidden_layers // 3
    )
    starts = [at for span in seen.placed for at in range(span.start, span.stop - BLOCK + 1, BLOCK)]
    ranked = sorted(starts, key=lambda start: masses[start : start + BLOCK].sum(), reverse=True)
    count = len(seen.chosen)
    assert count == round(repair.ratio * len(starts))
    assert seen.chosen == set(ranked[:count])
    assert seen.result.phases["probe"] > 0


@pytest.mark.parametrize(
    ("runner", "bits", "repair"), pairwise(RUNNERS, (16, 8), [BLOCKS, QUERY]), ids=str
)
@pytest.mark.some(3)
def test_the_chosen_blocks_do_not_depend_on_chunking(runner, bits, repair, monkeypatch):
    """Chunks whose rows are not wanted are available to those after them."""
    chosen = []
    for budget in (512, 48, 16):
        options = {**RUNNERS[runner], "kv_cache_bits": bits, "debug_checks": True}
        with CPUPagedEngine.from_pretrained(
            "kvboost-edge/demo", num_blocks=128, max_batch_tokens=budget, **options
        ) as made:
            served, ids = prompts(made)
            made.generate(served, max_new_tokens=0)
            chosen.append(Seen(made, ids, repair, monkeypatch).chosen)
    assert chosen[0]
    assert chosen[1] == chosen[2] == chosen[0]
