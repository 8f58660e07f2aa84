from math import log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from workbench.zoo import (
    heldout_loss,
    load_text,
    next_token_loss,
    rank_generator,
    sample_batch,
    split_text,
    unigram_loss,
)


class Uniform(nn.Module):
    """A model without knowledge: equal scores for all characters."""

    def __init__(self, num_characters):
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(num_characters))

    def forward(self, ids_BT):
        return self.scores.expand(*ids_BT.shape, -1)


class Copycat(nn.Module):
    """A model that is sure that each character is repeated."""

    def __init__(self, num_characters):
        super().__init__()
        self.num_characters = num_characters
        self.seen = []

    def forward(self, ids_BT):
        assert not self.training
        self.seen.append(ids_BT)
        return nn.functional.one_hot(ids_BT, self.num_characters).float()


@given(st.text(min_size=1, max_size=200))
def test_splitting_is_complete_and_disjoint(words):
    text = split_text(words)
    assert text.decode(text.train) + text.decode(text.heldout) == words
    assert len(text.heldout) == round(len(words) / 10)
    assert "".join(sorted(set(words))) == text.characters


def test_the_worked_example():
    text = split_text("abbaabbaca")
    assert text.train.tolist() == [0, 1, 1, 0, 0, 1, 1, 0, 2]
    assert text.heldout.tolist() == [0]


def test_the_text_is_english_prose_and_the_same_each_time():
    text = load_text()
    assert len(text.train) > 200_000
    assert 60 < len(text.characters) < 256
    assert " statement " in text.decode(text.heldout)
    assert torch.equal(text.train, load_text().train)


def test_unigram_loss_by_hand():
    text = split_text("aaabaaabaaabaaabaaab")  # 18 to learn from: 14 a, 4 b; held out: "ab"
    assert text.decode(text.heldout) == "ab"
    assert unigram_loss(text) == pytest.approx(-(log(15 / 20) + log(5 / 20)) / 2)


def test_unigram_loss_is_finite_for_a_character_never_learned():
    text = split_text("a" * 9 + "z")
    assert unigram_loss(text) == pytest.approx(-log(1 / 11))


def test_a_batch_is_pieces_of_the_text_and_the_next_tokens():
    ids = torch.arange(100)
    inputs, targets = sample_batch(ids, num_sequences=7, num_tokens=5, generator=rank_generator(0, 0))
    assert inputs.shape == targets.shape == (7, 5)
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(5))


def test_every_place_can_be_sampled_and_no_other():
    starts = sample_batch(torch.arange(4), num_sequences=200, num_tokens=2, generator=rank_generator(0, 0))[0][:, 0]
    assert set(starts.tolist()) == {0, 1}


def test_ranks_read_other_pieces_and_a_rank_the_same_ones_again():
    def batch(seed, rank):
        return sample_batch(torch.arange(10**6), num_sequences=8, num_tokens=4, generator=rank_generator(seed, rank))[0]

    assert torch.equal(batch(0, 1), batch(0, 1))
    assert not torch.equal(batch(0, 0), batch(0, 1))
    assert not torch.equal(batch(0, 0), batch(1, 0))


def test_a_text_shorter_than_a_sequence_is_refused():
    with pytest.raises(ValueError, match="need a text of 6, not 5"):
        sample_batch(torch.arange(5), num_sequences=1, num_tokens=5, generator=rank_generator(0, 0))


def test_an_uninformed_model_has_the_loss_log_v():
    text = split_text("abcd" * 100)
    assert heldout_loss(Uniform(4), text, num_tokens=7) == pytest.approx(log(4))


def test_the_heldout_loss_is_the_mean_over_whole_sequences():
    text = split_text("ab" * 300 + "b" * 100 + "a" * 1300)  # held out: 200 times a
    model = Copycat(2)
    loss = heldout_loss(model, text, num_tokens=3)
    assert sum(len(ids) for ids in model.seen) == 199 // 3  # in batches of unequal size
    assert torch.cat(model.seen).flatten().tolist() == text.heldout[:198].tolist()
    assert loss == pytest.approx(next_token_loss(torch.tensor([[[1.0, 0.0]]]), torch.tensor([[0]])).item())


@pytest.mark.parametrize("training", [True, False])
def test_evaluating_leaves_the_model_in_its_mode(training):
    text, model = split_text("abc" * 50), Copycat(3).train(training)
    heldout_loss(model, text, num_tokens=4)
    assert model.training is training


def test_too_little_held_out_is_refused():
    with pytest.raises(ValueError, match="need more than 2 held out"):
        heldout_loss(Uniform(2), split_text("ab" * 10), num_tokens=2)
