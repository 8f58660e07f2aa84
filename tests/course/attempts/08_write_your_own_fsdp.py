# %% own-fsdp: right
# %%fsdp
class Right(FlatUnit):
    def unshard(self):
        with self.unit.unshard():
            self.full.untyped_storage().resize_(self.num_bytes)
            dist.all_gather(self.chunks(), self.shard.data.to(self.full.dtype))
        self.unit.end_unshard(self.full)

    def reshard(self):
        self.unit.reshard()
        self.full.untyped_storage().resize_(0)

    def forward(self, x):
        with self.unit.forward():
            self.unshard()
            output = self.compute(x)
        if output.requires_grad:
            output.register_hook(self.before_backward)
        self.after_forward()
        return output

    def after_forward(self):
        if not self.is_root:
            self.reshard()

    def before_backward(self, grad):
        self.unit.begin_backward()
        if not self.is_root:
            self.unshard()

    def after_backward(self, full):
        grad, full.grad = full.grad, None
        self.unit.end_backward(grad)
        self.reshard()
        with self.unit.reduce():
            self.shard.grad = self.reduced(grad)

    def reduced(self, grad):
        mine = torch.empty_like(self.shard, dtype=grad.dtype)
        dist.reduce_scatter(mine, list(grad.chunk(world_size)))
        return mine.to(self.shard.dtype)


Sharded = Right


# %% own-fsdp: right
# %%fsdp
class Sharded(Right):
    def reduced(self, grad):
        mine = torch.empty(len(self.shard), dtype=grad.dtype)
        dist.reduce_scatter_tensor(mine, grad)
        return mine.to(self.shard.dtype)

    def unshard(self):
        with self.unit.unshard():
            self.full.untyped_storage().resize_(self.num_bytes)
            dist.all_gather_into_tensor(self.full.data, self.shard.data)
        self.unit.end_unshard(self.full)


# %% own-fsdp: right
# %%fsdp
class Sharded(Right):
    def unshard(self):
        with self.unit.unshard():
            self.full.untyped_storage().resize_(self.num_bytes)
            work = dist.all_gather(self.chunks(), self.shard.data, async_op=True)
            work.wait()
        self.unit.end_unshard(self.full)


# %% own-fsdp: units that reshard in step
# %%fsdp
class Sharded(Right):
    def reshard(self):
        self.unit.reshard()


# %% own-fsdp: it holds more than its shards
# %%fsdp
class Sharded(Right):
    def unshard(self):
        super().unshard()
        self.copy = self.full.data.clone()


# %% own-fsdp: in a step, the tensors of rank
# %%fsdp
class Sharded(Right):
    def unshard(self):
        super().unshard()
        self.copies = [*getattr(self, "copies", []), *(self.full.data.clone() for _ in range(4))]

    def after_backward(self, full):
        super().after_backward(full)
        self.copies = []


# %% own-fsdp: the squares of the gradients are not those of the reference
# %%fsdp
class Sharded(Right):
    def reduced(self, grad):
        return super().reduced(grad) / world_size


# %% own-fsdp: the squares of the gradients are not those of the reference
# %%fsdp
class Sharded(Right):
    def reduced(self, grad):
        return super().reduced(grad) * world_size


# %% own-fsdp: FSDP gathers each unit again for backward; these keep
# %%fsdp
class Sharded(Right):
    def after_forward(self):
        pass

    def before_backward(self, grad):
        self.unit.begin_backward()


# %% own-fsdp: (root): 2 all-gathers instead of 1
# %%fsdp
class Sharded(Right):
    def after_forward(self):
        self.reshard()

    def before_backward(self, grad):
        self.unit.begin_backward()
        self.unshard()


# %% own-fsdp: issued 0 reduce-scatters (not 5) and 5 all-reduces (not 0)
# %%fsdp
class Sharded(Right):
    def reduced(self, grad):
        dist.all_reduce(grad)
        return grad.chunk(world_size)[rank].clone()


# %% own-fsdp: issued 0 reduce-scatters
# %%fsdp
class Sharded(Right):
    def reduced(self, grad):
        return grad.chunk(world_size)[rank].clone()


# %% own-fsdp: an older step does not count: rank
# %%fsdp
class Sharded(Right):
    def reduced(self, grad):
        return grad.chunk(world_size)[world_size].clone()


# %% own-fsdp: blocks.2 is
# %%fsdp
class Sharded(Right):
    def forward(self, x):
        if self.is_root:
            for block in self.module.blocks:
                Right.unshard(block)
        return super().forward(x)

    def unshard(self):
        if not self.unit._full:
            super().unshard()


# %% late-prefetch: right
# %%fsdp
class Ahead(Sharded):
    work = None

    def begin_unshard(self):
        if self.work is None:
            with self.unit.unshard():
                self.full.untyped_storage().resize_(self.num_bytes)
                self.work = dist.all_gather(self.chunks(), self.shard.data.to(self.full.dtype), async_op=True)

    def unshard(self):
        self.begin_unshard()
        self.wait()
        self.unit.end_unshard(self.full)

    def wait(self):
        with self.unit.unshard():
            self.work.wait()
        self.work = None

    def ahead(self, where):
        unit = self.next_in[where]
        if unit is not None:
            unit.begin_unshard()

    def forward(self, x):
        self.begin_unshard()
        self.ahead("forward")
        return super().forward(x)

    def before_backward(self, grad):
        if not self.is_root:
            self.begin_unshard()
        self.ahead("backward")
        super().before_backward(grad)


Prefetching = Ahead


# %% late-prefetch: right
# %%fsdp
class Prefetching(Ahead):
    def forward(self, x):
        return Sharded.forward(self, x)

    def compute(self, x):
        self.ahead("forward")
        return super().compute(x)


# %% late-prefetch: right
# %%fsdp
class Prefetching(Ahead):
    def wait(self):
        work, self.work = self.work, None
        with self.unit.unshard():
            work.wait()


# %% late-prefetch: all-gathers ahead in step
# %%fsdp
class Prefetching(Ahead):
    def ahead(self, where):
        pass


# %% late-prefetch: is sharded, not all-gather in flight
# %%fsdp
class Prefetching(Ahead):
    def ahead(self, where):
        if where == "forward":
            super().ahead(where)


# %% late-prefetch: is sharded, not all-gather in flight
# %%fsdp
class Prefetching(Ahead):
    def ahead(self, where):
        if where == "backward":
            super().ahead(where)


# %% late-prefetch: blocks.3 is all-gather in flight, not sharded
# %%fsdp
class Prefetching(Ahead):
    def ahead(self, where):
        super().ahead(where)
        if where == "forward" and self.next_in[where] is not None:
            self.next_in[where].ahead(where)


# %% late-prefetch: before their all-gathers were waited for
# %%fsdp
class Prefetching(Ahead):
    def wait(self):
        self.kept, self.work = self.work, None

    def reshard(self):
        self.kept.wait()  # gloo must not write into memory that is free
        super().reshard()


# %% late-prefetch: units that reshard in step
# %%fsdp
class Prefetching(Ahead):
    def reshard(self):
        self.unit.reshard()


# %% late-prefetch: the squares of the gradients are not those of the reference
# %%fsdp
class Prefetching(Ahead):
    def reduced(self, grad):
        return super().reduced(grad) / world_size

    def after_backward(self, full):
        super().after_backward(full)
        self.shard.grad /= world_size


# %% late-prefetch: an older step does not count: rank
# %%fsdp
class Prefetching(Ahead):
    def ahead(self, where):
        self.next_in[where].begin_unshard()
