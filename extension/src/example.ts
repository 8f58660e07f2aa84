/** A cell with everything a step needs: a model, an optimizer and `train_step`. */
import type { Notebook } from "@jupyterlab/notebook";

export const EXAMPLE = `%%fsdp
# A small GPT that learns to predict characters. Run this cell, then shard the model in the FSDP panel.
import torch
from workbench.zoo import GPT, GPTConfig, load_text, next_token_loss, rank_generator, sample_batch

text = load_text()
torch.manual_seed(0)  # the same model on every rank
model = GPT(GPTConfig(vocab_size=len(text.characters), num_blocks=4, width=128, max_tokens=64)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
generator = rank_generator(seed=0, rank=rank)  # other samples on every rank


def train_step():
    inputs, targets = sample_batch(text.train, num_sequences=8, num_tokens=64, generator=generator)
    loss = next_token_loss(model(inputs.to(device)), targets.to(device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
`;

/** Insert the example into a cell at the end and activate it; if a cell has it, activate that one. */
export function insertExample(notebook: Notebook): void {
  const model = notebook.model;
  if (model === null) return;
  const source = EXAMPLE.trimEnd();
  const present = [...model.cells].findIndex(({ sharedModel }) => sharedModel.getSource() === source);
  const index = present >= 0 ? present : model.cells.length;
  if (present < 0) model.sharedModel.insertCell(index, { cell_type: "code", source });
  notebook.deselectAll();
  notebook.activeCellIndex = index;
  notebook.mode = "command";
  void notebook.scrollToItem(index);
}
