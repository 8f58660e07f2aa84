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
