"""Operations are those of the papers' formula; the peak is one that was really reached."""

import pytest
import torch
from torch import nn

from trainer.batches import RowBatch, TokenBatch
from trainer.flops import Peak, flops_per_item, measured_peak, mfu
from trainer.models.decoder import Decoder, DecoderOptions

_OPTIONS = DecoderOptions(vocab=40, sequence=16, dim=32, layers=3, heads=4, kv_heads=2, hidden=48)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_decoder_takes_six_operations_per_weight_and_twelve_per_position_and_width(rows: int) -> None:
    torch.manual_seed(0)
    model = Decoder(_OPTIONS).train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    found = flops_per_item(model, TokenBatch.of(torch.randint(40, (rows, 17))))
    # What tokens are multiplied with: all but norms and the embedding, which is looked up.
    tables = {"embed"}
    weights = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and not tables & set(n.split(".")))
    assert found == 6 * weights + 12 * _OPTIONS.layers * _OPTIONS.dim * _OPTIONS.sequence
    assert model.training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_rows_take_six_operations_per_weight() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(5, 7, bias=False), nn.Linear(7, 1, bias=False)

        def forward(self, numeric: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(numeric)).squeeze(1)

    batch = RowBatch(torch.zeros(4, 5), torch.zeros(4, 0, dtype=torch.int64), torch.zeros(4))
    assert flops_per_item(Rows(), batch) == 6 * (5 * 7 + 7)


def test_the_peak_is_measured_and_says_how() -> None:
    peak = measured_peak("fp32", 0.01)
    assert peak.flops_per_s > 1e8
    assert "fp32 matrix products" in peak.how
    assert "threads" in peak.how


def test_mfu_is_the_share_of_all_ranks_peaks() -> None:
    assert mfu(6e9, 0.5, 2, Peak(1e10, "")) == pytest.approx(0.6)
