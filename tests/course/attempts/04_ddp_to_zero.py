# %% zero-gather-once: right
# %%fsdp
class Kept(ZeRO3):
    def after_forward(self):
        pass

    def before_backward(self, grad):
        Unit.before_backward(self, grad)


# %% zero-gather-once: right
# %%fsdp
class Kept(ZeRO3):
    is_whole = False

    def gather(self):
        if not self.is_whole:
            super().gather()
        self.is_whole = True

    def after_forward(self): ...

    def free(self):
        super().free()
        self.is_whole = False


# %% zero-gather-once: right
# %%fsdp
class Kept(ZeRO3):
    after_forward = DDP.after_forward
    before_backward = DDP.before_backward


# %% zero-gather-once: issued 9 all-gathers
# %%fsdp
class Kept(ZeRO3):
    def after_forward(self):
        if self.unit.info.name == "head":
            return
        self.free()

    def before_backward(self, grad):
        self.unit.begin_backward()
        if self.unit.info.name != "head":
            self.gather()


# %% zero-gather-once: issued 10 all-gathers
# %%fsdp
class Kept(ZeRO3):
    pass


# %% zero-gather-once: units that reshard in step
# %%fsdp
class Kept(ZeRO3):
    def after_forward(self): ...

    def before_backward(self, grad):
        self.unit.begin_backward()

    def free(self):
        self.unit.reshard()


# %% zero-gather-once: it holds more than its shards
# %%fsdp
class Kept(ZeRO3):
    def after_forward(self): ...

    def before_backward(self, grad):
        self.unit.begin_backward()

    def gather(self):
        super().gather()
        self.copy = self.full.data.clone()


# %% zero-gather-once: the squares of the gradients of each unit are not those of the reference
# %%fsdp
class Kept(ZeRO3):
    def after_forward(self): ...

    def before_backward(self, grad):
        self.unit.begin_backward()

    def reduce(self, grad):
        super().reduce(grad)
        self.kept.grad *= world_size


# %% zero-gather-once: an older step does not count: rank
# %%fsdp
class Kept(ZeRO3):
    def after_forward(self):
        raise NotImplementedError


# %% zero-gather-once: an older step does not count: nothing is sharded yet
# %%fsdp
class Keep(ZeRO3):
    def after_forward(self): ...


# %% zero-gather-once: head is unsharded, not sharded
# %%fsdp
class Kept(ZeRO3):
    def after_forward(self): ...

    def before_backward(self, grad):
        self.unit.begin_backward()

    def after_backward(self, full):
        grad, full.grad = full.grad, None
        self.unit.end_backward(grad)
        self.reduce(grad)

    def after_step(self):
        self.free()


# %% zero-gather-once: the losses are not those of the reference
# %%fsdp
class Kept(ZeRO3):
    def after_forward(self): ...

    def before_backward(self, grad):
        self.unit.begin_backward()

    def reduce(self, grad):
        super().reduce(grad)
        self.kept.grad.neg_()


# %% zero-formula: right
gathered = reduced = num_params * 4

# %% zero-formula: right
gathered, reduced = 4.0 * num_params, 4.0 * num_params

# %% zero-formula: right
gathered, reduced = (num_params * 32 // 8 for _ in range(2))

# %% zero-formula: B in all-gathers, which is not what a rank issued in step
gathered, reduced = 8 * num_params, 4 * num_params

# %% zero-formula: you answered 66,274 B in all-gathers and 66,274 B in reduce-scatters
gathered = reduced = num_params // n

# %% zero-formula: you answered 132,548 B
gathered = reduced = num_params

# %% zero-formula: your answer for the all-gathers is right
gathered, reduced = 4 * num_params, 4 * num_params // n

# %% zero-formula: your answer for the reduce-scatters is right
gathered, reduced = 4 * num_params // n, 4 * num_params

# %% zero-formula: the bytes in all-gathers: there is no answer yet
gathered, reduced = ..., 4 * num_params

# %% zero-formula: is a str: write a whole number
gathered, reduced = "4 * num_params", 4 * num_params

# %% zero-formula: you answered 0 B in all-gathers and 0 B in reduce-scatters
gathered = reduced = 0

# %% zero-buckets: right
# %%fsdp
bucket, works = [], []


class Bucketed(DDP):
    def reduce(self, grad):
        bucket.append((self, grad))
        if len(bucket) == 2 or self is model[0]:
            flat = torch.cat([each for _, each in bucket])
            with self.unit.reduce():
                works.append((dist.all_reduce(flat, async_op=True), flat, list(bucket)))
            bucket.clear()

    def before_step(self):
        for work, flat, members in works:
            work.wait()
            for (unit, grad), part in zip(members, flat.split([each.numel() for _, each in members]), strict=True):
                unit.kept.grad = grad.copy_(part).div_(world_size)
        works.clear()


# %% zero-buckets: right
# %%fsdp
class Bucketed(DDP):
    pending = None
    in_flight = []

    def reduce(self, grad):
        if Bucketed.pending is None and self is not model[0]:
            Bucketed.pending = self, grad
            return
        parts = [each for each in (Bucketed.pending, (self, grad)) if each]
        Bucketed.pending = None
        flat = torch.cat([each / world_size for _, each in parts])
        with self.unit.reduce():
            handle = dist.all_reduce(flat, async_op=True)
        self.in_flight.append((handle, flat, [unit for unit, _ in parts]))

    def before_step(self):
        for handle, flat, units in self.in_flight:
            handle.wait()
            first = 0
            for unit in units:
                unit.kept.grad = flat[first : first + unit.full.numel()]
                first += unit.full.numel()
        self.in_flight.clear()


# %% zero-buckets: right
# %%fsdp
class Bucketed(DDP):
    def reduce(self, grad):
        self.grad = grad
        place = [unit is self for unit in model].index(True)
        if place % 2 == 1 or place == 0:
            members = [unit for unit in model if hasattr(unit, "grad")]
            flat = torch.cat([unit.grad for unit in members])
            with self.unit.reduce():
                self.handle = dist.all_reduce(flat, async_op=True)
            self.flat, self.members = flat, members
            for unit in members:
                del unit.grad

    def before_step(self):
        if self is model[0]:
            for first in model:
                if hasattr(first, "handle"):
                    first.handle.wait()
                    parts = first.flat.split([unit.full.numel() for unit in first.members])
                    for unit, part in zip(first.members, parts, strict=True):
                        unit.kept.grad = part / world_size
                    del first.handle, first.flat, first.members


# %% zero-buckets: issued 5 all-reduces
# %%fsdp
class Bucketed(DDP):
    works = []

    def reduce(self, grad):
        with self.unit.reduce():
            self.works.append((dist.all_reduce(grad, async_op=True), self, grad))

    def before_step(self):
        for work, unit, grad in self.works:
            work.wait()
            unit.kept.grad = grad / world_size
        self.works.clear()


# %% zero-buckets: is waited for before anything else runs
# %%fsdp
class Bucketed(DDP):
    waiting = []

    def reduce(self, grad):
        self.waiting.append((self, grad))
        if len(self.waiting) == 2 or self is model[0]:
            flat = torch.cat([each for _, each in self.waiting])
            with self.unit.reduce():
                dist.all_reduce(flat)
            parts = flat.split([each.numel() for _, each in self.waiting])
            for (unit, _), part in zip(self.waiting, parts, strict=True):
                unit.kept.grad = part / world_size
            self.waiting.clear()


# %% zero-buckets: issued 1 all-reduce
# %%fsdp
class Bucketed(DDP):
    def reduce(self, grad):
        self.grad = grad

    def before_step(self):
        if self is model[0]:
            flat = torch.cat([unit.grad for unit in model])
            with self.unit.reduce():
                dist.all_reduce(flat)
            for unit, part in zip(model, flat.split([unit.full.numel() for unit in model]), strict=True):
                unit.kept.grad = part / world_size
                del unit.grad


# %% zero-buckets: (all are 4 times as large)
# %%fsdp
class Bucketed(DDP):
    waiting, sent = [], []

    def reduce(self, grad):
        self.waiting.append((self, grad))
        if len(self.waiting) == 2 or self is model[0]:
            flat = torch.cat([each for _, each in self.waiting])
            with self.unit.reduce():
                self.sent.append((dist.all_reduce(flat, async_op=True), flat, [unit for unit, _ in self.waiting]))
            self.waiting.clear()

    def before_step(self):
        for work, flat, units in self.sent:
            work.wait()
            for unit, part in zip(units, flat.split([unit.full.numel() for unit in units]), strict=True):
                unit.kept.grad = part.clone() * (2 / world_size)
        self.sent.clear()


# %% zero-buckets: the squares of the gradients are not those of the reference
# %%fsdp
class Bucketed(DDP):
    waiting, sent = [], []

    def reduce(self, grad):
        self.waiting.append((self, grad))
        if len(self.waiting) == 2 or self is model[0]:
            flat = torch.cat([each for _, each in self.waiting])
            with self.unit.reduce():
                self.sent.append((dist.all_reduce(flat, async_op=True), flat, [unit for unit, _ in self.waiting]))
            self.waiting.clear()

    def before_step(self):
        for work, flat, units in self.sent:
            work.wait()
            for unit, part in zip(units, flat.split([unit.full.numel() for unit in units]), strict=True):
                unit.kept.grad = part / len(units)
        self.sent.clear()
        if self is model[0]:
            self.kept.grad *= 3


# %% zero-buckets: the squares of the gradients are not those of the reference
# %%fsdp
class Bucketed(DDP):
    waiting, sent = [], []

    def reduce(self, grad):
        self.waiting.append((self, grad))
        if len(self.waiting) == 2:
            flat = torch.cat([each for _, each in self.waiting])
            with self.unit.reduce():
                self.sent.append((dist.all_reduce(flat, async_op=True), flat, [unit for unit, _ in self.waiting]))
            self.waiting.clear()
        elif self is model[0]:
            self.kept.grad = grad

    def before_step(self):
        for work, flat, units in self.sent:
            work.wait()
            for unit, part in zip(units, flat.split([unit.full.numel() for unit in units]), strict=True):
                unit.kept.grad = part / world_size
        self.sent.clear()


# %% zero-buckets: an older step does not count: rank
# %%fsdp
class Bucketed(DDP):
    waiting = []

    def reduce(self, grad):
        self.waiting.append(grad)
        if len(self.waiting) == 2:
            with self.unit.reduce():
                dist.all_reduce(torch.stack(self.waiting))
            self.waiting.clear()


# %% zero-buckets: issued 5 all-reduces
# %%fsdp
class Bucketed(DDP):
    pass


# %% zero-buckets: an older step does not count: nothing is sharded yet
# %%fsdp
class Buckets(DDP):
    pass


# %% zero-buckets: it holds more than its shards
# %%fsdp
class Bucketed(DDP):
    waiting, sent = [], []

    def reduce(self, grad):
        self.waiting.append((self, grad))
        if len(self.waiting) == 2 or self is model[0]:
            flat = torch.cat([each for _, each in self.waiting])
            with self.unit.reduce():
                self.sent.append((dist.all_reduce(flat, async_op=True), flat, [unit for unit, _ in self.waiting]))
            self.waiting.clear()

    def before_step(self):
        for work, flat, units in self.sent[-3:]:
            work.wait()
            for unit, part in zip(units, flat.split([unit.full.numel() for unit in units]), strict=True):
                unit.kept.grad = part / world_size


# %% zero-buckets: while units still have work to do
# %%fsdp
class Bucketed(DDP):
    bucket, sent = [], []

    def reduce(self, grad):
        self.bucket.append((self, grad))
        if len(self.bucket) == 2 or self is model[0]:
            self.finish()  # the bucket before
            members = self.bucket[:]
            self.bucket.clear()
            flat = torch.cat([grad for _, grad in members])
            with self.unit.reduce():
                self.sent.append((members, flat, dist.all_reduce(flat, async_op=True)))

    def finish(self):
        for members, flat, work in self.sent:
            work.wait()
            flat /= world_size
            for (unit, _), part in zip(members, flat.split([len(grad) for _, grad in members])):
                unit.kept.grad = part.clone()
        self.sent.clear()

    def before_step(self):
        self.finish()
