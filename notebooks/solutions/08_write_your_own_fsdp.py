# %% own-fsdp
# %%fsdp
class Sharded(FlatUnit):
    """Gathers a unit before it computes, and frees it after that."""

    def unshard(self):
        with self.unit.unshard():  # watch
            self.full.untyped_storage().resize_(self.num_bytes)
            dist.all_gather(self.chunks(), self.shard.data.to(self.full.dtype))
        self.unit.end_unshard(self.full)  # watch

    def reshard(self):
        self.unit.reshard()  # watch
        self.full.untyped_storage().resize_(0)

    def forward(self, x):
        with self.unit.forward():  # watch
            self.unshard()
            output = self.compute(x)
        if output.requires_grad:
            output.register_hook(self.before_backward)
        if not self.is_root:
            self.reshard()
        return output

    def before_backward(self, grad):
        self.unit.begin_backward()  # watch
        if not self.is_root:
            self.unshard()

    def after_backward(self, full):
        grad, full.grad = full.grad, None
        self.unit.end_backward(grad)  # watch
        self.reshard()
        with self.unit.reduce():  # watch
            mine = torch.empty_like(self.shard, dtype=grad.dtype)
            dist.reduce_scatter(mine, list(grad.chunk(world_size)))
            self.shard.grad = mine.to(self.shard.dtype)


# %% late-prefetch
# %%fsdp
class Prefetching(Sharded):
    """Issues the all-gather of the next unit before it computes with this one."""

    work = None  # the handle of an all-gather that was issued

    def begin_unshard(self):
        if self.work is None:
            with self.unit.unshard():
                self.full.untyped_storage().resize_(self.num_bytes)
                self.work = dist.all_gather(self.chunks(), self.shard.data.to(self.full.dtype), async_op=True)

    def unshard(self):
        self.begin_unshard()
        with self.unit.unshard():
            self.work.wait()
        self.work = None
        self.unit.end_unshard(self.full)

    def prefetch(self, unit):
        if unit is not None:
            unit.begin_unshard()

    def forward(self, x):
        self.begin_unshard()
        self.prefetch(self.next_in["forward"])
        return super().forward(x)

    def before_backward(self, grad):
        if not self.is_root:
            self.begin_unshard()
        self.prefetch(self.next_in["backward"])
        super().before_backward(grad)
