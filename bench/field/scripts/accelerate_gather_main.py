"""Accelerate: the metric is gathered under is_main_process."""

import os
from datetime import timedelta

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    wait = timedelta(seconds=float(os.environ.get("FIELD_TIMEOUT_S", "1800")))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo", timeout=wait)])
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 5), torch.randn(48, 1))
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.is_main_process:
            mean = accelerator.gather(loss.detach()).mean()  # <- here
            print(f"epoch {epoch}: {mean.item():.3f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
