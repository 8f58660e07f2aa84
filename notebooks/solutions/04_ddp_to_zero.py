# %% zero-gather-once
# %%fsdp
class Kept(ZeRO3):
    def after_forward(self): ...

    def before_backward(self, grad):
        self.unit.begin_backward()


# %% zero-formula
gathered = 4 * num_params
reduced = 4 * num_params


# %% zero-buckets
# %%fsdp
class Bucketed(DDP):
    waiting, sent = [], []  # shared by all units

    def reduce(self, grad):
        self.waiting.append((self, grad))
        if len(self.waiting) == 2:
            self.send()

    def send(self):
        units, grads = zip(*self.waiting, strict=True)
        self.waiting.clear()
        flat = torch.cat(grads)
        with self.unit.reduce():
            self.sent.append((dist.all_reduce(flat, async_op=True), flat, units))

    def before_step(self):
        if self.waiting:
            self.send()
        while self.sent:
            work, flat, units = self.sent.pop(0)
            work.wait()
            for unit, part in zip(units, flat.split([len(unit.full) for unit in units]), strict=True):
                unit.kept.grad = part / world_size
