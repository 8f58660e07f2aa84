"""Accelerate with accumulation, gather_for_metrics on all ranks, and a print on the main one."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(42, 5), torch.randn(42, 1))
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        mean = accelerator.gather_for_metrics(loss.detach().reshape(1)).mean()
        if accelerator.is_main_process:
            print("loss", mean.item(), flush=True)
    accelerator.wait_for_everyone()
    accelerator.end_training()


main()
