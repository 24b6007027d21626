"""Similarities and masks of a batch, with one worker and with two, against loops over its texts."""

import math
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.records.tuples import Example
from infembed_ray.training.collate import collate, flatten
from infembed_ray.training.collectives import mean_over_workers
from infembed_ray.training.losses import ALL_OBJECTIVES, NCE, Objective, marginal_loss
from infembed_ray.training.scores import score_batch
from tests.support.workers import run_workers
from tests.training.test_collate import record

FEATURES, DIMENSION, TEMPERATURE, DRAWN = 7, 5, 0.1, 2


def records():
    """Return five InF-IR records and three examples, with every kind of false negative.

    They are the same passage, pair or instruction in other records, on either worker, an instruction for which another
    record has the same query and passage, and a passage that is a second positive or a hard negative elsewhere.
    """
    rows = [record(n) for n in range(5)]
    rows[1] = replace(rows[1], document_positive=rows[3].document_positive)
    rows[2] = replace(rows[2], instruction_positive=rows[0].instruction_positive)
    same = ("query_positive", "document_positive", "instruction_negative", "hard_negative_document_1")
    rows[4] = replace(rows[4], **{name: getattr(rows[0], name) for name in same})
    rows[4] = replace(rows[4], hard_negative_document_1="another answer to the same pair")
    wrong = ("wrong", rows[3].hard_negative_document_2)
    return [
        *rows,
        Example("x0", "plain", ("answer", "other answer", "third answer"), wrong),
        Example("x1", "asked", ("other answer",), ("third answer",), rows[0].instruction_positive, "a poisoned one"),
        Example("x2", rows[0].query_positive, (rows[0].document_positive,), instruction=rows[0].instruction_positive),
    ]


SHARES = [records()[:3], records()[3:]]  # uneven


def vector(tokens):
    """Return random features of a text, the same for the same tokens."""
    generator = torch.Generator().manual_seed(hash(tuple(tokens.ids)) % 2**31)
    return torch.randn(FEATURES, generator=generator, dtype=torch.float64)


def model():
    """Return a linear encoder of these features."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(FEATURES, DIMENSION, generator=generator, dtype=torch.float64, requires_grad=True)


def embed(weight, texts):
    return torch.nn.functional.normalize(torch.stack([vector(t) for t in texts]) @ weight, dim=1)


def loss_of(encoder, weight, shares, rank, objective, once=True, **options):
    """Compute a worker's loss and its share with the code under test."""
    batch = collate(encoder, shares, rank, objective, seed="1/1", **options)
    scores = score_batch(objective, batch, embed(weight, batch.queries), embed(weight, batch.passages))
    return marginal_loss(objective, scores.positive, scores.negatives, TEMPERATURE, once), batch.share


def reference(encoder, weight, shares, objective, once=True, instruction_negatives=None, iq_negatives="kk"):
    """Compute the mean of Eq. 1, 6-21 over all rows of all workers, by loops over texts and a set of positive tuples."""
    cache = {}

    def similarity(a, b):
        vectors = []
        for text in (a, b):
            if text not in cache:
                one = [text] if isinstance(text, str) else text
                tokens = (
                    encoder.tokenize_passages(one) if len(one) == 1 else encoder.tokenize_queries([one[1]], [one[0]])
                )
                cache[text] = embed(weight.detach(), tokens)[0].tolist()
            vectors.append(cache[text])
        return math.fsum(x * y for x, y in zip(*vectors, strict=True))

    def e(instruction, query, passage):
        return math.exp(similarity((instruction, query), passage) / TEMPERATURE)

    by_share = [[t for r in share for t in flatten(r)] for share in shares]
    rows = [t for share in by_share for t in share]
    positives = {(t.instruction, t.query, p) for t in rows for p in (t.passage, *t.other_positives)}
    candidates = [t.passage for t in rows] + [p for t in rows for p in t.negatives]
    total = 0.0
    for n, i in enumerate(rows):
        mine = next(share for share in by_share if any(t is i for t in share))
        own = e(i.instruction, i.query, i.passage)
        sums = {}
        sums["P"] = sum(
            e(i.instruction, i.query, p) for p in candidates if (i.instruction, i.query, p) not in positives
        )
        if instruction_negatives is None:
            others = {t.instruction for t in mine if t.instruction} | {i.poisoned} if i.instruction else {i.poisoned}
            others -= {""}
        else:
            pool = sorted({t.instruction for t in rows if t.instruction})
            rng = random.Random(f"1/1/{n}")
            sampled = rng.sample(pool, min(len(pool), instruction_negatives + 1)) if i.instruction else []
            rest = [j for j in sampled if j != i.instruction and j != i.poisoned]
            others = ([i.poisoned] if i.poisoned not in ("", i.instruction) else []) + rest
            del others[instruction_negatives:]
        sums["I"] = sum(e(j, i.query, i.passage) for j in others if (j, i.query, i.passage) not in positives)
        if iq_negatives == "kk":
            sums["IQ"] = sum(
                e(k.instruction, k.query, i.passage)
                for k in rows
                if (k.instruction, k.query, i.passage) not in positives
            )
        else:
            sums["IQ"] = sum(
                e(i.instruction, q, i.passage)
                for q in {t.query for t in mine}
                if (i.instruction, q, i.passage) not in positives
            )
        if objective == NCE:
            sums["PIQ"] = sum(
                e(j.instruction, k.query, p)
                for p in candidates
                for j in rows
                for k in rows
                if (j.instruction, k.query, p) != (i.instruction, i.query, i.passage)
            )
        if objective.kind == "uni":
            total -= sum(math.log(own / (own + sums[v])) for v in objective.variables)
        else:
            copies = 1 if once else len(objective.variables)
            total -= math.log(own / (copies * own + sum(sums[v] for v in objective.variables)))
    return total / len(rows)


CASES = [(o, once, {}) for o in ALL_OBJECTIVES for once in (True, False) if once or o.kind == "multi"]
CASES += [(Objective.parse(o), True, {"iq_negatives": "ik"}) for o in ("uni{P,IQ}", "multi{P,I,IQ}")]
CASES += [(NCE, True, {})]


@pytest.fixture(scope="module")
def encoder(minilm):
    return InstructionEncoder.from_pretrained(minilm)


@pytest.mark.parametrize("drawn", [None, DRAWN])
def test_every_objective_matches_loops_over_the_texts(encoder, drawn):
    weight = model()
    for objective, once, options in CASES:
        loss, share = loss_of(encoder, weight, [records()], 0, objective, once, instruction_negatives=drawn, **options)
        assert share == 1
        expected = reference(encoder, weight, [records()], objective, once, instruction_negatives=drawn, **options)
        assert loss.item() == pytest.approx(expected, rel=1e-9), (str(objective), once, options)


def losses_and_gradients(rank, minilm):
    """Compute loss and averaged gradient of every case, with sampled instructions and with all of a worker's share."""
    dist.init_process_group("gloo")
    encoder = InstructionEncoder.from_pretrained(minilm)
    got = []
    for drawn in (DRAWN, None):
        for objective, once, options in CASES:
            weight = model()
            loss, share = loss_of(
                encoder, weight, SHARES, rank, objective, once, instruction_negatives=drawn, **options
            )
            (loss * share).backward()
            got.append((mean_over_workers(loss * share).item(), mean_over_workers(weight.grad).tolist()))
    dist.destroy_process_group()
    return got


@pytest.mark.integration
def test_two_workers_with_uneven_shares_match_the_whole_batch(encoder, minilm):
    got, same = run_workers(losses_and_gradients, 2, minilm)
    assert got == same
    for (objective, once, options), (loss, gradient) in zip(CASES, got[: len(CASES)], strict=True):
        if "iq_negatives" in options:  # uses pairs of a worker's own share only
            continue
        weight = model()
        whole, _ = loss_of(encoder, weight, [records()], 0, objective, once, instruction_negatives=DRAWN, **options)
        whole.backward()
        assert loss == pytest.approx(whole.item(), rel=1e-12), (str(objective), once, options)
        torch.testing.assert_close(torch.tensor(gradient, dtype=torch.float64), weight.grad, rtol=1e-9, atol=1e-12)
    for drawn, part in ((DRAWN, got[: len(CASES)]), (None, got[len(CASES) :])):
        for (objective, once, options), (loss, _) in zip(CASES, part, strict=True):
            expected = reference(encoder, model(), SHARES, objective, once, instruction_negatives=drawn, **options)
            assert loss == pytest.approx(expected, rel=1e-9), (str(objective), once, options)


@pytest.mark.parametrize("objective", ["multi{P,I,IQ}", "nce{PIQ}"])
def test_gradients_match_finite_differences(encoder, objective):
    weight = model()
    pair = [records()[:1] + records()[4:]]
    assert torch.autograd.gradcheck(lambda w: loss_of(encoder, w, pair, 0, Objective.parse(objective))[0], [weight])
